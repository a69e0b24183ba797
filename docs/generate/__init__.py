"""Parts of the site that are generated from the code when it is built: see docs/hooks.py."""
