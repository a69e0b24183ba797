"""Attention variants: one file each, with its equation, module and rules.

A file that defines `VARIANTS = {"name": class}` is found here by itself; nothing else has to be edited. Every class
takes `(dim, num_heads, **own_options)` and maps x (B, N, D) -> (B, N, D), in train and in eval mode alike.
`softmax.py` is what variants of the form softmax(score) V share; `window.py` and `gpsa.py` go around such a variant.
`theory/` proves what such attention does to a change of its input, `qkv.py` makes rules of that.
"""

import importlib
import pkgutil
from collections.abc import Callable

from torch import nn

Attention = Callable[..., nn.Module]


def variants() -> dict[str, Attention]:
    """All variants by name, in the order of their files."""
    found: dict[str, Attention] = {}
    for info in pkgutil.iter_modules(__path__):
        found.update(getattr(importlib.import_module(f"{__name__}.{info.name}"), "VARIANTS", {}))
    return found
