"""Resampling in a captured graph: copies of entries, or a product with a constant matrix along either axis of an image.

    adaptive average pooling, bilinear, bicubic:    y = A x B^T for every channel,     A (Y, H), B (X, W)

A and B are what torch's own function makes of unit vectors; that the function is such a product is checked on random
images.

Letters: H x W pixels in, Y x X out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from certify.graph.values import Unmapped, Value, materialised

ALIKE = 1e-12  # a product with both matrices and torch's function, on numbers below 1


def nearest(x: Value, size: Any, scales: Any = None) -> Value:
    """Return copies of entries."""
    if x.constant is not None:
        x = Value.of(materialised(x))
    copied = torch.ops.aten.upsample_nearest2d.vec(x.index.double(), size, scales)
    return Value(x.node, copied.long())


def bilinear(x: Value, size: Any, align: bool, scales: Any = None) -> tuple[Tensor, Tensor]:
    """Return A and B of bilinear resampling."""
    return _matrices(x, lambda t, n, s: torch.ops.aten.upsample_bilinear2d.vec(t, n, align, s), size, scales)


def bicubic(x: Value, size: Any, align: bool, scales: Any = None) -> tuple[Tensor, Tensor]:
    """Return A and B of bicubic resampling."""
    return _matrices(x, lambda t, n, s: torch.ops.aten.upsample_bicubic2d.vec(t, n, align, s), size, scales)


def adaptive(x: Value, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return A and B of adaptive average pooling, whose windows may differ in size."""
    return _matrices(x, lambda t, n, s: F.adaptive_avg_pool2d(t, n), size, None)


def _matrices(x: Value, f: Callable[[Tensor, Any, Any], Tensor], size: Any, scales: Any) -> tuple[Tensor, Tensor]:
    """Return A and B with f(x) = A x B^T. Raises Unmapped for another function."""
    height, width = x.shape[-2:]

    def along(side: int, axis: int) -> Tensor:
        """Resample the unit vectors of one axis, with one pixel along the other: (out, side)."""
        units = torch.eye(side, dtype=torch.float64).view(1, side, *((side, 1) if axis == 0 else (1, side)))
        one = [None if pair is None else list(pair) for pair in (size, scales)]
        for pair, neutral in zip(one, (1, 1.0), strict=True):
            if pair is not None:
                pair[1 - axis] = neutral
        return f(units, *one).view(side, -1).mT.contiguous()

    rows, columns = along(height, 0), along(width, 1)
    probe = torch.rand(1, 2, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = f(probe, size, scales)
    found = rows @ probe @ columns.mT
    if y.shape != found.shape or not torch.allclose(y, found, rtol=0, atol=ALIKE):
        raise Unmapped("resampling that is not a product with a matrix along either axis")
    return rows, columns
