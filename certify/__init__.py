"""Proves, image by image, how robust a model is; measures the attacks beside the proofs; publishes both."""

import certizoo.compat  # noqa: F401  (repairs torchvision before timm imports it)
from certify.api import certified_radius, certify
from certify.methods.certificate import Certificate
from certify.stage.outcomes import evaluate

__all__ = ["Certificate", "certified_radius", "certify", "evaluate"]
