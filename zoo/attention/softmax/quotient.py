"""The rounding of q / c in Lipschitz normalisation (lipschitz_norm.py): c is the greatest of three products of norms.

c' is that of the exact rows in the ball, c^ that of the computed ones, which are off by e. With a, b two of the norms
in the ball, |a b - a^ b^| <= a e_b + b e_a + e_a e_b, and the greatest of three moves no further than one of them.
c' is at least what a change can leave of it (docs/proofs.md#quotient-forms).

Letters: B images, W windows, H heads; norms (B, W, H) of q, k and v, radii and errors (..., B, 1, 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.arithmetic import OUT, U
from zoo.attention.softmax.rows import Rows
from zoo.bounds.contracts import Precision, Rounded
from zoo.bounds.rounding import ROOT, TINY, in_range, size

PAIRS = ((0, 1), (0, 2), (1, 2))
UNDERFLOW = TINY**0.5  # above what a norm loses where squares of entries underflow


@dataclass(frozen=True)
class Quotient:
    """The quotient around one batch of projections."""

    rows: Rows
    lengths: Sequence[Tensor]  # (B, W, H, N) of the rows that the largest are taken of; of q, the whole
    norms: Sequence[Tensor]
    c: Tensor
    smallest: float  # lower bound of c
    precision: Precision

    @staticmethod
    def of(rows: Rows, smallest: float, precision: Precision) -> Rows:
        """Return the projections, with q divided by c."""
        of_q, *others = (torch.linalg.vector_norm(one.y, dim=-1) for one in rows)
        lengths = torch.linalg.vector_norm(of_q, dim=-1, keepdim=True), *others
        norms = [one.amax(-1) for one in lengths]
        c = largest_product(norms).clamp_min(smallest)
        found, y = Quotient(rows, lengths, norms, c, smallest, precision), rows.q.y / c[..., None, None]
        return Rows(Rounded(y, found.radius, lambda r, e: found.error(y, r, e)), rows.k, rows.v)

    def radius(self, r: Tensor) -> Tensor:
        """Bound |q'/c' - q/c| <= r_q / c' + |q| |c' - c| / (c c')."""
        moved = self._radii(r)
        least = self.least(moved)
        turned = self.norms[0] * _apart(self.norms, moved) / (self.c * least)
        return self.rows.q.radius(r) / least.amin((-2, -1)) + _joined(turned)

    def error(self, y: Tensor, r: Tensor, e: Tensor) -> Tensor:
        """Bound |q^/c^ - q'/c'| <= e_q / c^ + |q'| |c^ - c'| / (c^ c'); c^ itself is rounded by a share."""
        gamma, u, count = self.precision.gamma, self.precision.u, y[0, 0, 0].numel()
        moved, off = self._radii(r), [one.error(r, e)[..., None, None] + UNDERFLOW for one in self.rows]
        far, both = _sums(self.norms, moved), _sums(moved, off)
        exact, served, share = self.least(moved), self.least(both), gamma(2 * count + 20) + 8 * u
        turned = far[0] * (_apart(far, off) / (served * exact) + share / ((1 - share) * served))
        y_B, e_q = size(y) + self.radius(r), self.rows.q.error(r, e)
        into_B = (e_q / served.amin((-2, -1)) + _joined(turned)) / (1 - share)
        error_B = (into_B + 4 * u * (y_B + into_B)) * OUT + TINY
        most_B = torch.stack(_sums(self.norms, both)).amax(0).amax((-2, -1))
        return in_range(most_B, error_B if share < 0.1 else torch.full_like(error_B, torch.inf), ROOT)

    def least(self, off: Sequence[Tensor]) -> Tensor:
        """Return a lower bound of c where Q, K and V change by at most `off`."""
        low = [least_maximum(rows, one) for rows, one in zip(self.lengths, off, strict=True)]
        return largest_product(low).clamp_min(self.smallest)

    def _radii(self, r: Tensor) -> list[Tensor]:
        return [one.radius(r)[..., None, None] for one in self.rows]


def largest_product(norms: Sequence[Tensor]) -> Tensor:
    """Return the largest product of two of three norms."""
    return torch.stack([norms[i] * norms[j] for i, j in PAIRS]).amax(0)


def least_maximum(rows: Tensor, whole: Tensor) -> Tensor:
    """Return a lower bound of the largest of N lengths (..., N) after changes whose squares sum up to whole^2.

    Bringing the m longest rows down to L takes sum_j (row_j - L)^2 <= whole^2. Each m where L is below all of them
    gives a bound, which may be negative: then nothing is known.
    """
    longest = rows.sort(-1, descending=True).values
    count = torch.arange(1, rows.shape[-1] + 1, device=rows.device).to(rows)
    mean, square = longest.cumsum(-1) / count, longest.square().cumsum(-1) / count
    left = mean.square() - square * (1 - 8 * U * (count - 1)) + whole.square().unsqueeze(-1) / count
    level = mean - left.clamp_min(0).sqrt()
    found = torch.where((left >= 0) & (level <= longest), level, 0.0).amax(-1)
    return (found - 8 * U * longest[..., 0]).clamp_min(0)


def _apart(norms: Sequence[Tensor], off: Sequence[Tensor]) -> Tensor:
    """Return how far c may be from that of these norms."""
    return torch.stack([norms[i] * off[j] + norms[j] * off[i] + off[i] * off[j] for i, j in PAIRS]).amax(0)


def _sums(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _joined(lengths_BWH: Tensor) -> Tensor:
    return torch.linalg.vector_norm(lengths_BWH.flatten(-2), dim=-1)
