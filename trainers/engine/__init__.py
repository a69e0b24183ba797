"""DeepSpeed and what a process needs around it: signals, a watchdog, logs."""
