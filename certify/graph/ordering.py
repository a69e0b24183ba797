"""Larger and smaller entries of a captured graph: maxima, minima, sorting, and a choice by a comparison.

The larger and the smaller of two entries are those of one sorted pair. Both come from one node, so that a layer such as
MaxMin, however it is written, permutes its entries and has norm 1; two maxima side by side would have 2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from certify.graph.operations import moved, scaled, stack
from certify.graph.pooling import window_max
from certify.graph.rowwise import along
from certify.graph.values import Comparison, Unmapped, Value
from zoo.primitives.sorting import Sorted


def sort(x: Value, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Value]:
    """Return the values of torch.sort, without the indices."""
    y = along(x, (dim,), lambda width: Sorted(), "sort")
    return (moved(torch.flip, y, [dim]) if descending else y,)


def pairs(x: Value) -> Value:
    """Return the pairs along the last axis in ascending order; for the same pairs it is the same node."""
    for given, found in x.node.sorted:
        if given.shape == x.shape and torch.equal(given.index.sort(-1).values, x.index.sort(-1).values):
            return found
    (found,) = sort(x)
    if x.constant is None:
        x.node.sorted.append((x, found))
    return found


def amax(x: Value, dims: Any = (), keepdim: bool = False, sign: int = 1) -> Value:
    """Return maxima along axes; of -x, negated, with sign -1."""
    axes = sorted(axis % len(x.shape) for axis in ((dims,) if isinstance(dims, int) else dims))
    if not axes or axes[0] == 0:
        raise Unmapped("a maximum over the images of a batch")
    rest = [axis for axis in range(len(x.shape)) if axis not in axes]
    windows: Value = moved(torch.flatten, moved(torch.permute, x, (*rest, *axes)), len(rest))
    y = _largest(windows) if sign == 1 else _smallest(windows)
    for axis in axes if keepdim else ():
        y = moved(torch.unsqueeze, y, axis)
    return y


def amin(x: Value, dims: Any = (), keepdim: bool = False) -> Value:
    return amax(x, dims, keepdim, sign=-1)


def _largest(windows: Value) -> Value:
    found: Value = moved(torch.select, pairs(windows), -1, 1) if windows.shape[-1] == 2 else window_max(windows)
    return found


def _smallest(windows: Value) -> Value:
    if windows.shape[-1] == 2:
        found: Value = moved(torch.select, pairs(windows), -1, 0)
        return found
    return scaled(window_max(scaled(windows, -1, 0, "negate")), -1, 0, "negate")


def _both(x: Any, y: Any) -> Value:
    """Return two results, or a result and a constant, side by side along a last axis."""
    given = [t if isinstance(t, Value | Tensor) else torch.as_tensor(t, dtype=torch.float64) for t in (x, y)]
    shape = torch.broadcast_shapes(*(t.shape for t in given))
    return stack([moved(torch.Tensor.expand, t, shape) if isinstance(t, Value) else t.expand(shape) for t in given], -1)


def maximum(x: Any, y: Any) -> Value:
    return _largest(_both(x, y))


def minimum(x: Any, y: Any) -> Value:
    return _smallest(_both(x, y))


def largest(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """Return torch.max of two results, or along an axis, then without the indices."""
    return (amax(x, dim, keepdim),) if isinstance(dim, int) else maximum(x, dim)


def smallest(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """Return torch.min, as `largest`."""
    return (amin(x, dim, keepdim),) if isinstance(dim, int) else minimum(x, dim)


# comparisons ----------------------------------------------------------------------------------------------------------


def greater(x: Any, y: Any) -> Comparison:
    """Return x > y or x >= y."""
    return Comparison(x, y)


def less(x: Any, y: Any) -> Comparison:
    """Return x < y or x <= y."""
    return Comparison(y, x)


def of_comparison(name: str, args: Any) -> Value:
    """Return torch.where of a comparison, which must choose between the two that it compares."""
    if name == "where" and isinstance(args[0], Comparison):
        given, a, b = args
        if _same(a, given.greater) and _same(b, given.less):
            return maximum(a, b)
        if _same(a, given.less) and _same(b, given.greater):
            return minimum(a, b)
    raise Unmapped("a comparison that does anything but choose, by torch.where, between the two that it compares")


def _same(x: Any, y: Any) -> bool:
    """Return whether two tensors or numbers are the same, wherever they come from."""
    if not isinstance(x, Value) and not isinstance(y, Value):
        return torch.equal(*torch.broadcast_tensors(*(torch.as_tensor(t, dtype=torch.float64) for t in (x, y))))
    return (
        isinstance(x, Value)
        and isinstance(y, Value)
        and x.node is y.node
        and torch.equal(x.index, y.index)
        and x.constant is y.constant is None
    )


COMPARISONS: dict[str, Callable[..., Any]] = {"gt": greater, "ge": greater, "lt": less, "le": less}
ORDERING: dict[str, Callable[..., Any]] = {
    "sort": sort, "amax": amax, "amin": amin, "maximum": maximum, "minimum": minimum, "max": largest, "min": smallest,
    **COMPARISONS,
}  # fmt: skip
