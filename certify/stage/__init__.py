"""The certify stage, `python -m certify`: hand-over in; certificate, curve, model card, report, version out. From
cli.py, the keys of the command, to run.py, the stage from end to end, to certify_batch.py, what is done to images."""
