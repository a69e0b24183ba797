"""Entries of the leaderboard (leaderboard/*.json): made of finished results by `python -m certify submit`, and done
again with draws of one's own by `python -m certify check`."""
