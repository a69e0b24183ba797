"""The rounding of queries, keys and values: of plain projections here, of what a variant does to them in its own file.

Each of the three is a `Rounded` (zoo/bounds/contracts.py) from the tokens x (B, W, N, D) to rows (B, W, H, N, O).
Letters: B images, W windows of an image (1 where there are none), N tokens, D width, H heads, O = D / H.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.attention.softmax import QKVAttention
from zoo.bounds.contracts import Bound, Error, Precision, Rounded
from zoo.bounds.primitives import matrix_product
from zoo.bounds.rounding import OUT, ROOT, TINY, in_range, longest, size


class Rows(NamedTuple):
    """Queries, keys and values around one batch."""

    q: Rounded
    k: Rounded
    v: Rounded


RoundedRows = Callable[[Tensor], Rows]


def projected(module: QKVAttention, precision: Precision) -> RoundedRows:
    """Three products with the tokens."""
    biases = (None,) * 3 if module.qkv.bias is None else module.qkv.bias.chunk(3)
    heads = partial(in_heads, heads=module.num_heads)
    weights = zip(module.qkv.weight.chunk(3), biases, strict=True)
    products = [matrix_product(w, b, precision, shaped=heads) for w, b in weights]
    return lambda x_BWND: Rows(*(product(x_BWND) for product in products))


def in_heads(y_BWND: Tensor, heads: int) -> Tensor:
    """(B, W, N, D) -> (B, W, H, N, O)."""
    return y_BWND.unflatten(-1, (heads, -1)).transpose(-3, -2)


def normalised(rows: Rounded, eps: float, scale: float, radius: Bound, precision: Precision) -> Rounded:
    """u -> scale u / sqrt(|u|^2 + e) of every row, by a factor from a sum of squares; `radius` bounds how far it moves
    where u moves by so much. The derivative is |scale| / sqrt(|u|^2 + e) at most, and no row longer than |scale|."""
    u, gain = rows.y, abs(scale)
    lengths = (u.square().sum(-1, keepdim=True) + eps).sqrt()
    y, least_B, longest_B = scale * u / lengths, lengths.flatten(1).amin(1), longest(u)
    y_B, share = size(y), precision.gamma(u.shape[-1] + 8) + 8 * precision.u

    def error(y_B: Tensor, of: Error, r: Tensor, e: Tensor) -> Tensor:
        r_u, e_u = rows.radius(r), rows.error(r, e)
        low_B = (least_B - r_u - e_u).clamp_min(eps**0.5)
        into_B = gain / low_B * of(r, e)
        own_B = (share + TINY / low_B.square()) * (y_B + into_B)
        return in_range(longest_B + r_u + e_u, (into_B + own_B) * OUT + TINY, ROOT)

    def whole(r: Tensor, e: Tensor) -> Tensor:
        return error(y_B + gain * radius(rows.radius(r)), rows.error, r, e)

    longest_row = torch.full_like(y_B, gain)
    return Rounded(y, lambda r: gain * radius(rows.radius(r)), whole, partial(error, longest_row, rows.row_error))
