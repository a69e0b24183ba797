"""The rounding of queries, keys and values from plain projections.

A variant that transforms its projections adds the rounding of that in its own file. Each of the three is a `Rounded`
(zoo/bounds/contracts.py) from the tokens x (B, W, N, D) to rows (B, W, H, N, O). Letters: B images, W windows of an
image (1 where there are none), N tokens, D width, H heads, O = D / H.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.arithmetic import OUT
from zoo.attention.softmax.module import QKVAttention
from zoo.bounds.contracts import Bound, Precision, Rounded
from zoo.bounds.primitives import matrix_product
from zoo.bounds.rounding import ROOT, TINY, in_range, longest, size


class Rows(NamedTuple):
    """Queries, keys and values around one batch."""

    q: Rounded
    k: Rounded
    v: Rounded


RoundedRows = Callable[[Tensor], Rows]


def projected(module: QKVAttention, precision: Precision) -> RoundedRows:
    """Bound three products with the tokens."""
    biases = (None,) * 3 if module.qkv.bias is None else module.qkv.bias.chunk(3)
    heads = partial(in_heads, heads=module.num_heads)
    weights = zip(module.qkv.weight.chunk(3), biases, strict=True)
    products = [matrix_product(w, b, precision, shaped=heads) for w, b in weights]
    return lambda x_BWND: Rows(*(product(x_BWND) for product in products))


def in_heads(y_BWND: Tensor, heads: int) -> Tensor:
    """Split the width into heads: (B, W, N, D) -> (B, W, H, N, O)."""
    return y_BWND.unflatten(-1, (heads, -1)).transpose(-3, -2)


def normalised(rows: Rounded, eps: float, scale: float, radius: Bound, precision: Precision) -> Rounded:
    """Bound u -> scale u / sqrt(|u|^2 + e) of every row, computed by a factor from a sum of squares.

    `radius` bounds how far the result moves where u moves by a given radius. The derivative is at most |scale| /
    sqrt(|u|^2 + e), and no row is longer than |scale|.
    """
    u, gain = rows.y, abs(scale)
    lengths = (u.square().sum(-1, keepdim=True) + eps).sqrt()
    y, longest_B, lengths_BR = scale * u / lengths, longest(u), lengths.flatten(1)
    y_B, share = size(y), precision.gamma(u.shape[-1] + 8) + 8 * precision.u

    def whole(r: Tensor, e: Tensor) -> Tensor:
        """Return the error of all rows: each may have all of the error, but none more than a row can have."""
        low_BR = lows(r, e)
        joint_B = torch.linalg.vector_norm(1 / low_BR, dim=-1) * rows.row_error(r, e)
        into_B = gain * torch.fmin(rows.error(r, e) / low_BR.amin(-1), joint_B)
        return known(into_B, y_B + moved(r) + into_B, low_BR, r, e)

    def row(r: Tensor, e: Tensor) -> Tensor:
        low_BR = lows(r, e)
        into_B = gain * rows.row_error(r, e) / low_BR.amin(-1)
        return known(into_B, gain + into_B, low_BR, r, e)

    def lows(r: Tensor, e: Tensor) -> Tensor:
        return (lengths_BR - (rows.radius(r) + rows.row_error(r, e)).unsqueeze(-1)).clamp_min(eps**0.5)

    def moved(r: Tensor) -> Tensor:
        return gain * radius(rows.radius(r))

    def known(into_B: Tensor, y_B: Tensor, low_BR: Tensor, r: Tensor, e: Tensor) -> Tensor:
        own_B = (share + TINY / low_BR.amin(-1).square()) * y_B
        return in_range(longest_B + rows.radius(r) + rows.error(r, e), (into_B + own_B) * OUT + TINY, ROOT)

    return Rounded(y, moved, whole, row)
