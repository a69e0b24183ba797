"""The parts that are no attention, each with its rules."""
