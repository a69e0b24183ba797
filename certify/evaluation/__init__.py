"""The evaluation, `python -m certify evaluate`: attacks beside certificates on the same images. From cli.py, the keys
of the command, to run.py, the evaluation from end to end, to evaluate_block.py, what is done to images."""
