"""Entries of the leaderboard (leaderboard/*.json).

`python -m certify submit` makes them from finished results, and `python -m certify check` rechecks them with new random
draws.
"""
