"""Weights that outlive a process: checkpoints, their average, the hand-over."""
