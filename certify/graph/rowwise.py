"""Functions of rows in a captured graph: softmax, and cosine normalisation as F.normalize computes it.

    x / max(|x|, eps) = P(x) / eps,    P the projection on the ball of radius eps (`LayerProject`)

Lengths of a tensor may be bounded from below, moved, and divide that tensor, each its own row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from certify.graph import attention
from certify.graph.operations import moved, scaled
from certify.graph.values import Product, Unmapped, Value, by_rows, from_rows, step
from zoo.layers.norms import LayerProject


def along(x: Value, axes: Sequence[int], make: Callable[[int], nn.Module], name: str) -> Value:
    """Return make(width)(rows), for rows along some axes of a tensor."""
    axes = sorted({axis % len(x.shape) for axis in axes})
    if not axes or axes[0] == 0:
        raise Unmapped("rows that run over the images of a batch")
    order = [axis for axis in range(len(x.shape)) if axis not in axes] + list(axes)
    turned = moved(torch.permute, x, order)
    wide = moved(torch.flatten, turned, len(x.shape) - len(axes))
    source, place = by_rows(wide)
    y = from_rows(step(make(wide.shape[-1]), source, source.shape, name), place, wide.shape[:-1])
    found: Value = moved(torch.permute, moved(torch.reshape, y, turned.shape), torch.tensor(order).argsort().tolist())
    return found


def softmax(x: Any, dim: int, *rest: Any) -> Any:
    """Return the weights of attention, or a softmax by itself."""
    if isinstance(x, Product):
        return attention.softmax(x, dim)
    return along(x, (dim,), lambda width: nn.Softmax(-1), "softmax")


# lengths --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Lengths of the rows of a tensor along some axes, at least `least`; `row` says which one every entry is."""

    value: Value
    axes: tuple[int, ...]
    row: Tensor
    least: float = 0.0


def lengths(x: Value, order: Any = 2, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Lengths:
    """Return the L2 norm along some axes; others have no rule."""
    axes = tuple(sorted({axis % len(x.shape) for axis in ([dims] if isinstance(dims, int) else dims or [0])}))
    if order != 2 or 0 in axes:
        raise Unmapped("a norm other than the length of every image or row")
    row = _rows(x, axes)
    return Lengths(x, axes, row if keepdim else row.squeeze(axes))


def _rows(x: Value, axes: Sequence[int]) -> Tensor:
    """Return the number of the row of every entry, of size 1 along the axes."""
    shape = torch.Size(1 if axis in axes else side for axis, side in enumerate(x.shape))
    return torch.arange(shape.numel()).view(shape)


def of_lengths(name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """Return an allowed result of lengths: with a least value, moved, or the tensor divided by them."""
    x, *rest = args
    if isinstance(x, Lengths) and name in ("clamp_min", "clamp") and len(rest) == 1 and not kwargs:
        return replace(x, least=max(x.least, float(rest[0])))
    if isinstance(x, Lengths) and name in ("expand", "expand_as", "unsqueeze", "view", "reshape", "clone", "alias"):
        return replace(x, row=function(x.row, *(arg.index if isinstance(arg, Value) else arg for arg in rest)))
    if isinstance(x, Value) and name == "div" and isinstance(rest[0], Lengths) and not kwargs:
        return normalised(x, rest[0])
    raise Unmapped("lengths of a result of the image that do anything but divide it, as F.normalize does")


def normalised(x: Value, by: Lengths) -> Value:
    """Return x / max(|x|, eps), row by row."""
    rows, same = _rows(x, by.axes), x.node is by.value.node and torch.equal(x.index, by.value.index)
    if not same or by.row.ndim != rows.ndim or not torch.equal(by.row.expand(x.shape), rows.expand(x.shape)):
        raise Unmapped("a quotient by the lengths of another tensor or of other rows")
    if not by.least > 0:
        raise Unmapped("a division by lengths that may be 0; use F.normalize, which has an eps")
    return scaled(along(x, by.axes, lambda width: LayerProject(width, by.least), "normalize"), 1 / by.least, 0, "scale")


ROWWISE: dict[str, Callable[..., Any]] = {
    "softmax": softmax, "_softmax": softmax, "linalg_vector_norm": lengths,
}  # fmt: skip
