"""Third order of units sigma(z + d): how far the mean second derivative on the way is from the one at the start.

    r = sigma(z + d) - sigma(z) - sigma'(z) d = c d^2 / 2,   c = int_0^1 2 (1 - t) sigma''(z + t d) dt,   s = sigma''(z)

With |d| <= D, c is within the mean hull of sigma'', and |c - s| <= sup |sigma'''| D / 3, as sigma''(z + t d) is within
sup |sigma'''| t D of s. For the change d = x + b,

    r - s x^2 / 2 = (c - s) x^2 / 2 + c (2 x b + b^2) / 2.

Proofs: docs/proofs.md#third-order, docs/proofs.md#third-units.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.arithmetic import product
from zoo.bounds.activations import PAD, Smooth, range_of_mean_second
from zoo.bounds.contracts import Activation


class SecondRange(NamedTuple):
    """s, bounds lo <= c - s <= hi around 0, and kappa >= |c|, for all |d| within the reach."""

    s: Tensor
    lo: Tensor
    hi: Tensor
    kappa: Tensor

    @property
    def delta(self) -> Tensor:
        """A bound of |c - s|."""
        return torch.maximum(-self.lo, self.hi)

    def against(self, w: Tensor) -> Tensor:
        """Return the largest -w (c - s)."""
        return torch.maximum(-w * self.lo, -w * self.hi)


def second_range(activation: Activation, z: Tensor, reach: Tensor) -> SecondRange | None:
    """Return the ranges of c for |d| <= reach, or None for an activation with kinks."""
    if not isinstance(activation, Smooth):
        return None
    s, (lo, hi) = activation.second(z), range_of_mean_second(activation, z, reach)
    steep = product(torch.full_like(reach, activation.third / 3), reach)
    lo, hi = torch.maximum(lo - s, -steep) - PAD, torch.minimum(hi - s, steep) + PAD
    return SecondRange(s, lo, hi, torch.maximum(-(s + lo), s + hi))
