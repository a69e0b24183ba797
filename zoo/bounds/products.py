"""Bounds of what torch rounds in a product with a linear map: |fl(J v) - J v| <= rounding |v|, and the same of J^T g.

A linear map that torch computes as a sequence of products F_s ... F_1, sums included, is off by at most

    sum_s gamma_s  |F_s| ... |F_1| |v|  <=  share |A| |v|,       share = sum_s gamma_s,   |A| = |F_s| ... |F_1|

entry by entry, |F| the matrix of absolute values (Higham 2002, section 3.5). Its transpose is the same product
backwards. The norm of |A| is at most the root of its largest row sum times its largest column sum, and at most its
Frobenius norm. Proof: docs/proofs.md#rounding-of-products.

Letters: B images.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.arithmetic import OUT, U, gamma, nan_to_inf
from zoo.bounds.contracts import Expansion
from zoo.bounds.running import Known, RunningError
from zoo.spectral import absolute_norm

ABOVE = 10  # powers of two between s v and f(0) in `linear_part` of curvature.py
SLOPE = 128 * U  # of sigma'(z), in units of the largest slope
Map = Callable[[Tensor], Tensor]


def matrix_rounding(weight: Tensor) -> Tensor:
    """Return the rounding of x W^T and of g W, for a matrix of weights (O, I)."""
    return gamma(max(weight.shape) + 2) * absolute_norm(weight) * OUT


def chained(parts: Sequence[Expansion]) -> Tensor:
    """Return the rounding (B,) of J_L ... J_1: each part's own, and what those in front hand it."""
    total_B = torch.zeros_like(parts[0].gain_B)
    before_B = torch.ones_like(total_B)
    for part in parts:
        total_B = part.gain_B * total_B + part.rounding * (before_B + total_B)
        before_B = part.gain_B * before_B
    return nan_to_inf(total_B * OUT)


def affine_rounding(f: Map, pull: Map, x_1: Tensor) -> float:
    """Return the rounding of the linear part of an affine map f, computed as (f(s v) - f(0)) / s, and backwards as
    `pull`, at one image.

    s makes s v 2^ABOVE times as large as f(0), so that what f rounds of its constants is at most 2^-ABOVE |v| in every
    entry, times how much larger the constants are than f(0).
    """
    offset, share = _followed(f, torch.zeros_like(x_1))
    whole, _ = _followed(f, torch.ones_like(x_1))
    back, share_back = _followed(lambda g: pull(g[None])[0], torch.ones_like(offset.value))
    constants = float(offset.size.amax())
    rows = float((whole.size - offset.size).amax()) + 4 * U * constants
    absolute = (rows * float(back.size.amax())) ** 0.5
    largest = float(offset.value.abs().amax())
    cancelled = constants / largest if largest else math.inf if constants else 0.0
    return (max(share, share_back) + 4 * U) * (absolute + 2 * cancelled * offset.value.numel() ** 0.5 / 2**ABOVE) * OUT


def _followed(f: Map, x: Tensor) -> tuple[Known, float]:
    """Return f(x) with its size, and the share of everything that f does."""
    with torch.no_grad(), Shares() as shares:
        return shares.of(f(x)), shares.share


class Shares(RunningError):
    """Follows sizes alone, and adds up what every operation rounds in units of the size of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def _found(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = super()._found(func, args, kwargs)
        if isinstance(found, list | tuple):
            return [self._counted(one) for one in found]
        return self._counted(found)

    def _counted(self, found: Any) -> Any:
        if not isinstance(found, Known):
            return found
        share = torch.where(found.size > 0, found.error / found.size, 0.0)
        self.share += float(share.amax()) if share.numel() else 0.0
        return Known(found.value, found.size, torch.zeros_like(found.error))
