"""The certify stage, `python -m certify`: from a hand-over to a certificate, curve, model card, report and version.

Start at cli.py, the keys of the command; run.py is the stage from end to end, and certify_batch.py the work per image.
"""
