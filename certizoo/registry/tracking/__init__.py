"""Track a training run: its folder holds all that MLflow shows, and is sent, and sent again, from there."""
