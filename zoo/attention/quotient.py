"""The rounding of q / c in Lipschitz normalisation (lipschitz_norm.py): c is the greatest of three products of norms.

c' is that of the exact rows in the ball, c^ of the computed ones, which are off by e. With a, b two of the norms in the
ball, |a b - a^ b^| <= a e_b + b e_a + e_a e_b, and the greatest of three moves no further than one of them.

Letters: B images, W windows, H heads; norms (B, W, H) of q, k and v, radii and errors (..., B, 1, 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.arithmetic import OUT
from zoo.attention.rows import Rows
from zoo.bounds.contracts import Precision, Rounded
from zoo.bounds.rounding import ROOT, TINY, in_range, size

PAIRS = ((0, 1), (0, 2), (1, 2))


@dataclass(frozen=True)
class Quotient:
    """Around one batch of projections."""

    rows: Rows
    norms: Sequence[Tensor]
    smallest: float  # c is never below
    precision: Precision

    @staticmethod
    def of(rows: Rows, smallest: float, precision: Precision) -> Rows:
        """The projections, with q divided."""
        whole, *longest = (torch.linalg.vector_norm(one.y, dim=-1) for one in rows)
        norms = torch.linalg.vector_norm(whole, dim=-1), *(one.amax(-1) for one in longest)
        found = Quotient(rows, norms, smallest, precision)
        y = rows.q.y / found.least([torch.zeros_like(norm) for norm in norms])[..., None, None]
        return Rows(Rounded(y, found.radius, lambda r, e: found.error(y, r, e)), rows.k, rows.v)

    def radius(self, r: Tensor) -> Tensor:
        """|q'/c' - q/c| <= r_q / c' + |q| |c' - c| / (c c')."""
        moved = self._radii(r)
        least, clean = self.least(moved), self.least([0 * one for one in moved])
        turned = self.norms[0] * _apart(self.norms, moved) / (clean * least)
        return self.rows.q.radius(r) / least.amin((-2, -1)) + _joined(turned)

    def error(self, y: Tensor, r: Tensor, e: Tensor) -> Tensor:
        """|q^/c^ - q'/c'| <= e_q / c^ + |q'| |c^ - c'| / (c^ c'), and c^ itself is rounded by a share."""
        gamma, u, count = self.precision.gamma, self.precision.u, y[0, 0, 0].numel()
        moved, off = self._radii(r), [one.error(r, e)[..., None, None] for one in self.rows]
        far, both = _sums(self.norms, moved), _sums(moved, off)
        exact, served, share = self.least(moved), self.least(both), gamma(2 * count + 20) + 8 * u
        turned = far[0] * (_apart(far, off) / (served * exact) + share / ((1 - share) * served))
        y_B, e_q = size(y) + self.radius(r), self.rows.q.error(r, e)
        into_B = (e_q / served.amin((-2, -1)) + _joined(turned)) / (1 - share)
        error_B = (into_B + 4 * u * (y_B + into_B)) * OUT + TINY
        most_B = torch.stack(_sums(self.norms, both)).amax(0).amax((-2, -1))
        return in_range(most_B, error_B if share < 0.1 else torch.full_like(error_B, torch.inf), ROOT)

    def least(self, off: Sequence[Tensor]) -> Tensor:
        """c is not below this where the norms fall by no more than `off`."""
        low = [(norm - one).clamp_min(0) for norm, one in zip(self.norms, off, strict=True)]
        return torch.stack([low[i] * low[j] for i, j in PAIRS]).amax(0).clamp_min(self.smallest)

    def _radii(self, r: Tensor) -> list[Tensor]:
        return [one.radius(r)[..., None, None] for one in self.rows]


def _apart(norms: Sequence[Tensor], off: Sequence[Tensor]) -> Tensor:
    """How far c may be from that of these norms."""
    return torch.stack([norms[i] * off[j] + norms[j] * off[i] + off[i] * off[j] for i, j in PAIRS]).amax(0)


def _sums(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _joined(lengths_BWH: Tensor) -> Tensor:
    return torch.linalg.vector_norm(lengths_BWH.flatten(-2), dim=-1)
