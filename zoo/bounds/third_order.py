"""Third order of units sigma(z + d): how far the mean second derivative on the way is from the one at the start.

    r = sigma(z + d) - sigma(z) - sigma'(z) d = c d^2 / 2,   c = int_0^1 2 (1 - t) sigma''(z + t d) dt,   s = sigma''(z)

With |d| <= D, c is within the mean hull of sigma'', and |c - s| <= sup |sigma'''| D / 3, as sigma''(z + t d) is within
sup |sigma'''| t D of s. Likewise |c - s - sigma'''(z) d / 3| <= sup |sigma''''| D^2 / 12.

Proofs: docs/proofs.md#third-order, docs/proofs.md#third-units.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.arithmetic import product
from zoo.bounds.activations import PAD, Smooth, range_of_mean_second
from zoo.bounds.contracts import Activation

CLOSE = 1e-12  # relative rounding of sigma'''


class SecondRange(NamedTuple):
    """s, and bounds lo <= c - s <= hi around 0 for all |d| within the reach."""

    s: Tensor
    lo: Tensor
    hi: Tensor

    def against(self, w: Tensor) -> Tensor:
        """Return the largest -w c, which is -w s and more."""
        return -w * self.s + torch.maximum(-w * self.lo, -w * self.hi)


class Cubic(NamedTuple):
    """m = sigma'''(z) / 3, and a bound of |c - s - m d| for all |d| within the reach."""

    m: Tensor
    rest: Tensor


def second_range(activation: Activation, z: Tensor, reach: Tensor) -> SecondRange | None:
    """Return the range of c for |d| <= reach, or None for an activation with kinks."""
    if not isinstance(activation, Smooth):
        return None
    s, (lo, hi) = activation.second(z), range_of_mean_second(activation, z, reach)
    steep = product(torch.full_like(reach, activation.steepest / 3), reach)
    return SecondRange(s, torch.maximum(lo - s, -steep) - PAD, torch.minimum(hi - s, steep) + PAD)


def cubic(activation: Smooth, z: Tensor, reach: Tensor) -> Cubic:
    """Return the first order of c - s, and what is left: sup |sigma''''| D^2 / 12, or |c - s| + |m| D."""
    around, m = second_range(activation, z, reach), activation.third(z) / 3
    assert around is not None
    moved = product(m.abs(), reach)
    far = torch.maximum(around.hi, -around.lo) + moved
    flat = product(torch.full_like(reach, activation.most_fourth / 12), reach.square()) + CLOSE * moved + PAD
    return Cubic(m, torch.minimum(far, flat))
