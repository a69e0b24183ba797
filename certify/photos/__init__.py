"""Certificates of your own photographs, `python -m certify image` and `serve`.

An answer is the class, the proved radius, and the nearest attack that was found. Start at cli.py, the keys of the
commands; predict.py is the work per image.
"""
