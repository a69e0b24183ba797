"""`python -m trainers.doctor`: what this machine can do, and whether a run fits on it."""
