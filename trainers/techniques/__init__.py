"""Additions to any objective: attack masks, mixed labels, SAM."""
