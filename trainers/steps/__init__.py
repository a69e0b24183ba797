"""The training loop (loop.py), one step of it (step.py), and what watches it."""
