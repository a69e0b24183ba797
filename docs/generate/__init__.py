"""Parts of the site that are made of the code when it is built: see docs/hooks.py."""
