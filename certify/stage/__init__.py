"""The certify stage, `python -m certify`: hand-over in, `certificate.json`, curve, card, report and version out (run.py)."""
