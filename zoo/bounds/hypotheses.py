"""Assumptions of every proof about a module's numbers: their shapes, and the range of float64 that bounds use.

    shapes   every parameter and buffer has the shape that the module's rule `shapes` states; torch would broadcast
             other shapes, and so compute another function than the one the rules describe
    numbers  0, or of a modulus between LEAST and MOST, the range of float32: their squares are far from both ends
    radii    0, between NEAR and FAR, or infinite: a smaller radius counts as NEAR, a larger one as infinite

Proofs: docs/proofs.md#shapes, docs/proofs.md#range.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from zoo.arithmetic import FAR, at_least_near
from zoo.bounds.contracts import Bound, Expand, Expansion
from zoo.bounds.integrity import own_tensors, stored

LEAST, MOST = 2.0**-149, 2.0**128  # the smallest positive float32 number, and a number above all of them

Shapes = Mapping[str, tuple[int, ...] | None]
"""Names of a module's parameters and buffers, or paths to those of its parts, with their shapes.

None allows any shape, because neither the forward pass nor a rule reads that tensor.
"""


def fault_of_shapes(module: nn.Module, shapes: Shapes) -> str | None:
    """Describe the first tensor whose shape differs from the stated one. Absent tensors, such as no bias, are fine."""
    for path, shape in shapes.items():
        tensor = None if shape is None else stored(module, path)
        if tensor is not None and shape is not None and tuple(tensor.shape) != tuple(shape):
            return f"its {path} has the shape {tuple(tensor.shape)}, but its rules are proved for {tuple(shape)}"
    return None


def power_vectors(*names: str) -> Shapes:
    """Return shapes (None) for the vectors that a training penalty keeps with the weights."""
    return dict.fromkeys(names)


def unstated(module: nn.Module, shapes: Shapes) -> str | None:
    """Describe the first tensor for which no shape is stated."""
    for name, tensor in own_tensors(module):
        if name not in shapes:
            return f"its {name} has the shape {tuple(tensor.shape)}, but its rules state none; add it to `shapes`"
    return None


def fault_of_numbers(module: nn.Module, shapes: Shapes) -> str | None:
    """Describe the first weight or option outside the range."""
    for name, tensor in own_tensors(module):
        if shapes[name] is not None and tensor.is_floating_point() and (wild := _outside(tensor.detach())) is not None:
            return f"its {name} holds {wild:.3g}, which float32 does not hold; certify model.float()"
    for name, value in _options(module):
        if value and math.isfinite(value) and not LEAST <= abs(value) < MOST:
            return f"its {name} is {value:.3g}, which float32 does not hold; set it between 1e-45 and 1e38"
    return None


def _outside(tensor: Tensor) -> float | None:
    """Return the largest or the smallest modulus if it is beyond the range. NaN and infinity are refused elsewhere."""
    if tensor.is_meta or not tensor.numel():
        return None
    size = tensor.abs()
    least, most = torch.where(size > 0, size, 1.0).aminmax()
    found = most if most >= MOST else least
    return None if LEAST <= found < MOST or not bool(found.isfinite()) else float(found)


def _options(module: nn.Module) -> Iterator[tuple[str, float]]:
    found = object.__getattribute__(module, "__dict__")
    return ((name, value) for name, value in found.items() if isinstance(value, float))


# radii ----------------------------------------------------------------------------------------------------------------


def in_range(bound: Bound) -> Bound:
    """Return the bound for radii within the range. A larger radius is sound, because bounds are nondecreasing."""

    def bounded(r: Tensor) -> Tensor:
        return bound(torch.where(r > FAR, math.inf, at_least_near(r)))

    return bounded


def expanded_in_range(expand: Expand) -> Expand:
    """Return the same for second-order bounds."""

    def expand_in_range(x: Tensor) -> Expansion:
        found = expand(x)
        if found.affine:
            return found
        return replace(found, beta=in_range(found.beta), remainder=lambda g: in_range(found.remainder(g)))

    return expand_in_range
