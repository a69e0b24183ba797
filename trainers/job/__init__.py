"""One run as values: a resolved configuration becomes a checked `Job` (prepare.py)."""
