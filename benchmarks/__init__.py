"""Benchmarks behind every claim about speed, each with its command, hardware and results."""

import certizoo.compat  # noqa: F401  (repairs torchvision before a benchmark imports timm)
