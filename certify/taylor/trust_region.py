"""The largest loss of a margin to first order, second order and remainders together.

With the terms of curved.py and beside.py, what is left is a trust region problem on the image: for the sum S of all
(E A_l)^T C E A_l, b = -E g_0, t = e / E, and every m above lambda_max(S),

    max { <b, u> + <u, S u> / 2 : |u| <= t }  <=  ( m t^2 + <b, (m - S)^-1 b> ) / 2.

S tends to minus the Hessian of the margin as e shrinks. Proof: docs/proofs.md#taylor.

Letters: B images.
"""

import itertools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from certify.ellipsoids.ellipsoid import Grown, Margins
from certify.ellipsoids.joint import IMAGE
from certify.ellipsoids.measured import COARSE
from certify.reaches.bent import BentEllipsoids
from certify.reaches.forms import units_at
from certify.reaches.propagated import Propagated
from certify.taylor.beside import Beside
from certify.taylor.curved import Curved, rounded, signed_forms
from zoo.arithmetic import OUT, nan_to_inf, product
from zoo.bounds.tape import Vectors

SPARE = (0.01, 0.05, 0.2, 0.5)  # tried multiples of lambda_max above it
STEEP = (1.0, 1.05, 1.15, 1.3, 1.6)  # m in units of |b| / t


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one rival at the largest e, (1, B) each.

    `first` is the loss to first order alone, `length` |b|, `along` <b, S b>, `pulled` |S b| and `top` lambda_max(S),
    with rounding included. `propagated` bounds the root of the sum of the b^2 of units, and `most` is this bound at the
    largest e.
    """

    first: Tensor
    length: Tensor
    along: Tensor
    pulled: Tensor
    top: Tensor
    beside: Beside
    propagated: Propagated
    most: Tensor
    most_B: Tensor

    def cost(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the bound of the loss to first order and forms together, for e <= the largest: (1, B)."""
        of_units = nan_to_inf(0.5 * product(self.most, self.propagated.aside(grown)))
        return nan_to_inf(OUT * (self.quadratic(e_B) + of_units + self.beside.at(e_B, grown)))

    def flat(self) -> "Terms":
        """Return the terms of the same margin with the gradient 0 at the image."""
        zero = torch.zeros_like(self.first)
        return replace(self, first=zero, length=zero, along=zero, pulled=zero)

    def quadratic(self, e_B: Tensor) -> Tensor:
        """Return the part of the cost from the trust region problem: (1, B)."""
        t_B = e_B / self.most_B
        return torch.stack([self._quadratic(t_B, *factors) for factors in itertools.product(SPARE, STEEP)]).amin(0)

    def _quadratic(self, t_B: Tensor, spare: float, steep: float) -> Tensor:
        m = torch.maximum(self.top * (1 + spare), steep * self.length / t_B.clamp_min(1e-100))
        inverse = self.length.square() / m + (self.along + self.pulled.square() / (m - self.top)) / m.square()
        first = self.first * t_B
        traded = (first / inverse.clamp_min(1e-300)).clamp(max=1)  # every share is sound; this one gives the least sum
        return nan_to_inf(first * (1 - traded) + (traded.square() * inverse + m * t_B.square()) / 2)


def terms_of(
    ellipsoids: BentEllipsoids,
    margins: Margins,
    g_0: Tensor,
    first: Tensor,
    curved: Curved,
    beside: Beside,
    behind: Propagated,
) -> Terms:
    """Return the terms for margins with gradients g_0 (1, B, *x) at the image.

    Some leaf has hidden units of a twice differentiable activation. `behind` is the bound for the coefficients
    `curved.squares`, or for larger ones.
    """
    joint, last, most = ellipsoids.joint, margins.last, behind.at(ellipsoids.joint.most_B, ellipsoids.most)
    b = F.pad(g_0.flatten(2) * joint.most_B[:, None], (0, joint.room(last) - g_0[0, 0].numel()))
    more = curved.more(behind, most)
    forms = signed_forms(curved, more)
    within = (margins.norm.square() + _norm_of(ellipsoids, more, curved.numbers)) * OUT
    z = joint.gram(forms)(b) * joint.part(IMAGE, last)
    length = torch.linalg.vector_norm(b, dim=-1)
    off = rounded(ellipsoids, forms, within) * length
    return Terms(
        first=first * joint.most_B,
        length=length,
        along=(b * z).sum(-1) + off * length,
        pulled=torch.linalg.vector_norm(z, dim=-1) + off,
        top=ellipsoids.top(forms, "taylor", [curved.numbers], within).clamp_min(1e-100),
        beside=beside,
        propagated=behind,
        most=most,
        most_B=joint.most_B,
    )


def _norm_of(ellipsoids: BentEllipsoids, more: Vectors, numbers: Tensor) -> Tensor | float:
    """Bound the norm of the forms with coefficients `more` on all of u: (1, B)."""
    if not more:
        return 0.0
    forms = {at: units_at(ellipsoids.tape, at).weighted(of_leaf) for at, of_leaf in more.items()}
    return ellipsoids.seminorms(forms, "crosses", [numbers], COARSE).square()
