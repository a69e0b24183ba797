"""Attention variants: one file each, with its equation, module and rules.

A file that defines `VARIANTS = {"name": class}` is found here automatically; nothing else needs an edit. Every class
takes `(dim, num_heads, **own_options)` and maps x (B, N, D) -> (B, N, D), in train and in eval mode alike. Variants
of the form softmax(score) V share what is in `softmax/`; `window.py` and `gpsa.py` wrap such a variant. `theory/`
proves how such attention responds to a change of its input.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

from torch import nn

from certizoo import plugins

Attention = Callable[..., nn.Module]
VARIANTS: dict[str, Attention] = {}  # other packages add theirs here (certizoo/plugins.py)


def variants() -> dict[str, Attention]:
    """Return all variants by name, in the order of their files, then those of other packages."""
    plugins.load()
    return {**_own(), **VARIANTS}


@cache
def _own() -> Mapping[str, Attention]:
    found: dict[str, Attention] = {}
    for info in pkgutil.iter_modules(__path__):
        found.update(getattr(importlib.import_module(f"{__name__}.{info.name}"), "VARIANTS", {}))
    return MappingProxyType(found)
