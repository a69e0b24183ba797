"""Certificates, balls, baked models and batches: what every method of certification shares."""
