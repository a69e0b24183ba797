"""Robust Vision Transformers by name, and the provable properties of each of their modules."""

import certizoo.compat  # noqa: F401  (repairs torchvision before timm imports it)
from zoo import export, handover, hinge, penalty, primitives, rules, spectral, weights
from zoo.attention.softmax.module import without_content
from zoo.models import convert
from zoo.models.factory import attention_name, create_model, input_size, list_models, model_options

__all__ = [
    "attention_name",
    "convert",
    "create_model",
    "export",
    "handover",
    "hinge",
    "input_size",
    "list_models",
    "model_options",
    "penalty",
    "primitives",
    "rules",
    "spectral",
    "weights",
    "without_content",
]
