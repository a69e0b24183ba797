"""CertViT: adapt, constrain layer by layer, fine-tune (run.py)."""
