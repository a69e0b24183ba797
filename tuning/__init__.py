"""Searches: spaces, trials and their display. Only `tune.py` imports this package.

Importing it is cheap; Ray is imported by `tuning/driver.py` alone.
"""
