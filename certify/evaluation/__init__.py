"""The evaluation, `python -m certify evaluate`: attacks beside certificates on the same images (run.py)."""
