"""Photographs of anybody's, `python -m certify image` and `serve`: the class, how far it is proved, and the nearest
attack that was found. From cli.py, the keys of the commands, to predict.py, what is done to one image."""
