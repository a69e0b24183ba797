"""Sources of the documentation site; the code here runs when it is built and in its tests."""
