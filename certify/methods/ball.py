"""The ball of images that a certificate speaks of, |G|_p <= eps for p = 2 or infinity, as far as a proof has to know.

Everything behind the image is measured in L2. What a method needs of the ball is the L2 ball around it, and how far a
linear function can fall on it, with d the number of entries of an image:

    |G|_inf <= eps   =>   |G|_2 <= sqrt(d) eps,        max <g, G> = |g|_1 eps = length(g) sqrt(d) eps.

Proof: docs/proofs.md#linf.

Letters: B images.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from certizoo.nearest import unknown
from certizoo.text import shown
from zoo.arithmetic import U, product

L2, LINF = "l2", "linf"
NORMS = (L2, LINF)


def known(norm: object) -> str:
    """The norm. Raises UserError for another."""
    if not isinstance(norm, str) or norm not in NORMS:
        raise unknown("norm of a certificate", shown(norm), NORMS)
    return norm


@dataclass(frozen=True)
class Ball:
    """Balls in this norm around images of `entries` numbers; of which eps, is asked later."""

    norm: str
    entries: int

    @property
    def _spread(self) -> float:
        """The longest vector of the ball of eps = 1."""
        return math.sqrt(self.entries) if self.norm == LINF else 1.0

    def radius(self, eps_B: Tensor) -> Tensor:
        """Of the L2 balls around those of eps, rounded up: (B,)."""
        return eps_B * (self._spread * (1 + 4 * U)) if self.norm == LINF else eps_B

    def length(self, g: Tensor) -> Tensor:
        """(..., B, C, H, W) -> (..., B): what <g, G> can be at most on a ball, divided by `radius`. Its L2 norm in L2,
        and never more than that."""
        flat = g.flatten(-3)
        return flat.abs().sum(-1) / self._spread if self.norm == LINF else torch.linalg.vector_norm(flat, dim=-1)

    def fall(self, g: Tensor, eps_B: Tensor) -> Tensor:
        """How far linear functions with these gradients can fall: (..., B)."""
        return product(self.length(g), self.radius(eps_B))

    def eps_within(self, radius: Tensor) -> Tensor:
        """Of balls that L2 balls of these radii hold, to rounding: a guess, no bound."""
        return radius / self._spread
