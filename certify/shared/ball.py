"""The ball of images that a certificate covers, |G|_p <= eps for p = 2 or infinity.

Everything after the image is measured in L2. A method needs the L2 ball around this ball, and how far a linear
function can fall on it, with d the number of entries of an image:

    |G|_inf <= eps   =>   |G|_2 <= sqrt(d) eps,        max <g, G> = |g|_1 eps = length(g) sqrt(d) eps.

Proof: docs/proofs.md#linf.

Letters: B images.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from certizoo.nearest import unknown
from certizoo.norms import L2, LINF
from zoo.arithmetic import U

NORMS = (L2, LINF)


def known(norm: object) -> str:
    """Return the norm if it is supported. Raises UserError otherwise."""
    if not isinstance(norm, str) or norm not in NORMS:
        raise unknown("norm of a certificate", norm, NORMS)
    return norm


@dataclass(frozen=True)
class Ball:
    """Balls in one norm around images with `entries` numbers; eps is an argument of the methods."""

    norm: str
    entries: int

    @property
    def _spread(self) -> float:
        """The L2 length of the longest vector in the ball of eps = 1."""
        return math.sqrt(self.entries) if self.norm == LINF else 1.0

    def radius(self, eps_B: Tensor) -> Tensor:
        """Return the radii of the L2 balls around the balls of eps, rounded up: (B,)."""
        return eps_B * (self._spread * (1 + 4 * U)) if self.norm == LINF else eps_B

    def length(self, g: Tensor) -> Tensor:
        """Return the largest value of <g, G> on a ball, divided by `radius`: (..., B, C, H, W) -> (..., B).

        It is the L2 norm of g in L2, and never more than that in Linf.
        """
        flat = g.flatten(-3)
        return flat.abs().sum(-1) / self._spread if self.norm == LINF else torch.linalg.vector_norm(flat, dim=-1)

    def eps_within(self, radius: Tensor) -> Tensor:
        """Return the eps of the balls inside L2 balls of these radii, without rounding: a guess, not a bound."""
        return radius / self._spread
