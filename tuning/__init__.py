"""Searches: spaces, trials and what a person sees of them. Only `tune.py` imports this package.

Importing it is cheap; Ray is imported by `tuning/driver.py` alone.
"""

import certizoo  # noqa: F401  (repairs torchvision before timm imports it, in Ray's workers too)
