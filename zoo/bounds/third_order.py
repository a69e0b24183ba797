"""Third order of units sigma(z + d): how far the mean second derivative on the way is from the one at the start.

    r = sigma(z + d) - sigma(z) - sigma'(z) d = c d^2 / 2,   c = int_0^1 2 (1 - t) sigma''(z + t d) dt,   s = sigma''(z)

With |d| <= D, c is within the mean hull of sigma'', and |c - s| <= sup |sigma'''| D / 3, as sigma''(z + t d) is within
sup |sigma'''| t D of s.

Proofs: docs/proofs.md#third-order, docs/proofs.md#third-units.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.arithmetic import product
from zoo.bounds.activations import PAD, Smooth, range_of_mean_second
from zoo.bounds.contracts import Activation


class SecondRange(NamedTuple):
    """s, and bounds lo <= c - s <= hi around 0 for all |d| within the reach."""

    s: Tensor
    lo: Tensor
    hi: Tensor

    def against(self, w: Tensor) -> Tensor:
        """Return the largest -w c, which is -w s and more."""
        return -w * self.s + torch.maximum(-w * self.lo, -w * self.hi)


def second_range(activation: Activation, z: Tensor, reach: Tensor) -> SecondRange | None:
    """Return the range of c for |d| <= reach, or None for an activation with kinks."""
    if not isinstance(activation, Smooth):
        return None
    s, (lo, hi) = activation.second(z), range_of_mean_second(activation, z, reach)
    steep = product(torch.full_like(reach, activation.steepest / 3), reach)
    return SecondRange(s, torch.maximum(lo - s, -steep) - PAD, torch.minimum(hi - s, steep) + PAD)
