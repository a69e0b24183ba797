"""The evaluation, `python -m certify evaluate`: attacks and certificates on the same images.

Start at cli.py, the keys of the command; run.py is the evaluation from end to end, and evaluate_block.py the work per
image.
"""
