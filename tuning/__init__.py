"""Searches: spaces, trials and what a person sees of them. Only `tune.py` imports this package.

Importing it is cheap; Ray is imported by `tuning/driver.py` alone.
"""
