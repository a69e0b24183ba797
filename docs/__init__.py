"""Sources of the documentation site; the code here runs when the site is built and in its tests."""
