"""Certificates of robustness, image by image, with attacks on the same images; both can be published."""

import certizoo.compat  # noqa: F401  (repairs torchvision before timm imports it)
from certify.api import certified_radius, certify
from certify.explanation import explain
from certify.shared.certificate import Certificate
from certify.stage.outcomes import evaluate

__all__ = ["Certificate", "certified_radius", "certify", "evaluate", "explain"]
