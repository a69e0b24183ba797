"""Additions to any objective: attack masks, mixed labels, distillation, SAM."""
