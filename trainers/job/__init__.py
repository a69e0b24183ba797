"""One run as values: from a resolved configuration to a `Job`, everything wrong refused before work (prepare.py)."""
