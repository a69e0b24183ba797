"""Upper bounds of the norm of a map whose products are inexact, from powers of it and Gaussian vectors.

Lanczos (zoo/bounds/lanczos.py) allows an error of 5e-8 of the norm itself. Here the error may be any number that is
small against the norm. With sigma = ||N||, its unit vector w, and z_j = (N^T N)^j v for M Gaussian vectors v,

    ( sum <w, v>^2 )^(1/2)  =  sigma^-2K ( sum <w, z_K>^2 )^(1/2),

where the left side is the root of a chi^2 variable, and the right one at most that of the largest eigenvalue of the
sum of the z_K z_K^T. So a sigma above x, for which the right side is less than the left one ever is, is impossible.

Proof: docs/proofs.md#block-power. Letters: L maps, M vectors of each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.arithmetic import OUT

Map = Callable[[Tensor], Tensor]  # (L, M, n) -> (L, M, m)

POWERS, VECTORS = 4, 16  # about 1.3 times the norm
TRIED = 400  # values of x between the first estimate and what is known
SPARE = 1e-10  # of the trace, for the rounding of an eigenvalue
LEAST = 1e-20  # norms below it are not told apart


@dataclass(frozen=True)
class Powers:
    """The root of the largest eigenvalue of the sum of the z_K z_K^T, and the lengths of all N z_j and z_j."""

    last_L: Tensor
    forward: list[Tensor]
    back: list[Tensor]

    @staticmethod
    def of(forward: Map, back: Map, start_LMN: Tensor) -> "Powers":
        """Return those of K products with N^T N."""
        z, lengths = start_LMN, (list[Tensor](), [_length(start_LMN)])
        for _ in range(POWERS):
            y = forward(z)
            z = back(y)
            lengths[0].append(_length(y))
            lengths[1].append(_length(z))
        return Powers(largest_eigenvalue(z @ z.mT).sqrt(), *lengths)

    def most(self, x: Tensor, slip_L: Tensor) -> Tensor:
        """Bound the root of the sum of the <w, v>^2, if sigma > x, for products off by at most slip: (..., L)."""
        found = self.last_L / x ** (2 * POWERS)
        for j in range(POWERS):
            found = found + slip_L * (self.forward[j] / x + self.back[j]) / x ** (2 * j + 1)
        return found * OUT


def norm_upper(forward: Map, back: Map, start_LMN: Tensor, slip_L: Tensor, within_L: Tensor, least: float) -> Tensor:
    """Return a bound of ||N|| (L,), at most `within`.

    Args:
        forward: v -> N v.
        back: its transpose.
        start_LMN: independent Gaussian vectors, VECTORS for each map.
        slip_L: never below the distance of a computed product from the exact one, for vectors of length 1.
        within_L: a bound of ||N|| that is known.
        least: what a chi^2 variable with VECTORS degrees of freedom is seldom below.
    """
    powers = Powers.of(forward, back, start_LMN)
    first_L = (powers.last_L / least**0.5) ** (0.5 / POWERS) * OUT
    first_L = torch.minimum(first_L.clamp_min(LEAST), within_L.clamp_min(LEAST))
    share = torch.linspace(0, 1, TRIED, dtype=first_L.dtype, device=first_L.device)[:, None]
    tried = first_L * (within_L.clamp_min(LEAST) / first_L) ** share
    proved = powers.most(tried, slip_L) < least**0.5 * (1 - 1e-9)
    return torch.where(proved, tried, torch.inf).amin(0).fmin(within_L)


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """Bound the largest eigenvalue of Gram matrices (..., M, M); infinite where they are not finite."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    whole = torch.where(gram.isfinite().flatten(-2).all(-1)[..., None, None], gram, 0.0)
    most = torch.linalg.eigvalsh(whole)[..., -1].clamp_min(0) + SPARE * trace
    return torch.where(trace.isfinite(), most, torch.inf)


def _length(z_LMN: Tensor) -> Tensor:
    """Return the root of the sum of squares of all vectors of a map (L,)."""
    return torch.linalg.vector_norm(z_LMN.flatten(1), dim=-1)
