"""The certify stage, `python -m certify`: hand-over in; certificate, curve, card, report, version out (run.py)."""
