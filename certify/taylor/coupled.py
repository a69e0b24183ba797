"""The largest loss of a margin to first order, second order and remainders together.

The units of leaf l change by d = <a, A_l G> + b. With the coefficients c' of forms.py and any tau > 0,

    sum c' d^2  <=  sum (c' + tau |c'|) <a, A_l G>^2 + (1 + 1 / tau) sum |c'| b^2,

where bent.py bounds the last sum. What is left is a trust region problem on the image: for S = sum_l (E A_l)^T
diag(c' + tau |c'|) E A_l, b = -E g_0, t = e / E, and every m above lambda_max(S),

    max { <b, u> + <u, S u> / 2 : |u| <= t }  <=  ( m t^2 + <b, (m - S)^-1 b> ) / 2.

S tends to minus the Hessian of the margin as e and tau shrink. Proof: docs/proofs.md#taylor.

Letters: B images, C rivals of each.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from certify.image.ellipsoid import COARSE, Ellipsoids, Grown, Margins
from certify.image.joint import IMAGE
from certify.taylor.bent import Bent, bent
from certify.taylor.forms import Curvature, smooth_units
from zoo.arithmetic import OUT, nan_to_inf, product
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.tape import Vectors

SPARE = (0.01, 0.05, 0.2, 0.5)  # tried multiples of lambda_max above it
STEEP = (1.0, 1.05, 1.15, 1.3, 1.6)  # m in units of |b| / t
TAU = (0.05, 4.0)  # range of tau


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of some rivals at the largest e, (C, B) each.

    `first` is the loss to first order alone, `length` |b|, `along` <b, S b>, `pulled` |S b| and `top` lambda_max(S),
    with rounding included. `others` is the norm of the forms of leaves without exact second order, `last` their leaf.
    """

    first: Tensor
    length: Tensor
    along: Tensor
    pulled: Tensor
    top: Tensor
    tau: Tensor
    bent: Bent
    others: Tensor
    last: int | None
    most_B: Tensor

    def cost(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the largest loss to first order and forms together, for e <= the largest: (C, B)."""
        total = self.quadratic(e_B) + self._behind(self.bent.at(e_B, grown)) + self._others(grown)
        return nan_to_inf(OUT * total)

    def quadratic(self, e_B: Tensor) -> Tensor:
        """Return the part of the cost from the trust region problem: (C, B)."""
        t_B = e_B / self.most_B
        return torch.stack([self._quadratic(t_B, *factors) for factors in itertools.product(SPARE, STEEP)]).amin(0)

    def free(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the part of the cost from leaves without exact second order: (C, B)."""
        units = self._behind(self.bent.at(e_B, grown, units_alone=True))
        return self._behind(self.bent.at(e_B, grown)) - units + self._others(grown)

    def _behind(self, bent: Tensor) -> Tensor:
        return nan_to_inf(0.5 * (1 + 1 / self.tau) * bent.square())

    def _others(self, grown: Grown) -> Tensor:
        if self.last is None:
            return torch.zeros_like(self.first)
        return nan_to_inf(0.5 * product(self.others.square(), grown.before[self.last]))

    def _quadratic(self, t_B: Tensor, spare: float, steep: float) -> Tensor:
        m = torch.maximum(self.top * (1 + spare), steep * self.length / t_B.clamp_min(1e-100))
        inverse = self.length.square() / m + (self.along + self.pulled.square() / (m - self.top)) / m.square()
        first = self.first * t_B
        traded = (first / inverse.clamp_min(1e-300)).clamp(max=1)  # every share is sound; this one gives the least sum
        return nan_to_inf(first * (1 - traded) + (traded.square() * inverse + m * t_B.square()) / 2)


def coupled(ellipsoids: Ellipsoids, margins: Margins, g: Vectors, g_0: Tensor, first: Tensor) -> Terms | None:
    """Return the terms for margins with gradients g at the leaves and g_0 (C, B, *x) at the image.

    None where no leaf has an exact second order.
    """
    joint, numbers = ellipsoids.joint, list(margins.numbers)
    curved = _curved(ellipsoids, margins, g)
    if not curved:
        return None
    others = {at: form for at, form in margins.forms.items() if at not in curved}
    behind = bent(ellipsoids, {at: of_leaf.c.abs() for at, of_leaf in curved.items()}, "bent", numbers)
    last = max(curved)
    b = F.pad(g_0.flatten(2) * joint.most_B[:, None], (0, joint.room(last) - g_0[0, 0].numel()))
    length = torch.linalg.vector_norm(b, dim=-1)
    absolute = {at: margins.forms[at] for at in curved}
    tau = _tau(ellipsoids, margins, b, absolute, behind)
    forms = {at: of_leaf.with_share(absolute[at], tau) for at, of_leaf in curved.items()}
    within = (1 + tau) * margins.norm.square() * OUT
    z = joint.gram(forms)(b) * joint.part(IMAGE, last)
    off = _rounded(ellipsoids, forms, within) * length
    return Terms(
        first=first * joint.most_B,
        length=length,
        along=(b * z).sum(-1) + off * length,
        pulled=torch.linalg.vector_norm(z, dim=-1) + off,
        top=ellipsoids.top(forms, "taylor", numbers, within).clamp_min(1e-100),
        tau=tau,
        bent=behind,
        others=ellipsoids.seminorms(others, "others", numbers, COARSE) if others else torch.zeros_like(length),
        last=max(others) if others else None,
        most_B=joint.most_B,
    )


def _curved(ellipsoids: Ellipsoids, margins: Margins, g: Vectors) -> dict[int, Curvature]:
    found = dict[int, Curvature]()
    for at in margins.forms:
        forms, reach = smooth_units(ellipsoids.tape.leaves[at].forms), ellipsoids.rests[at].reach
        if forms is not None and reach is not None:
            found[at] = Curvature.of(forms, g[at], reach)
    return found


def _tau(
    ellipsoids: Ellipsoids, margins: Margins, b: Tensor, absolute: Mapping[int, QuadraticForm], behind: Bent
) -> Tensor:
    """Return about the best tau (C, B): what it adds to S where the margin falls, against what it takes of b."""
    along = (b * ellipsoids.joint.gram(absolute)(b)).sum(-1) / b.square().sum(-1).clamp_min(1e-300)
    bent_2 = behind.at(ellipsoids.most_B, ellipsoids.most).square()
    return (bent_2 / along.clamp_min(1e-300)).sqrt().nan_to_num(1.0).clamp(*TAU)


def _rounded(ellipsoids: Ellipsoids, forms: Mapping[int, QuadraticForm], most: Tensor) -> Tensor:
    """Bound the error of torch's S b for |b| = 1, ||S|| <= most: (C, B)."""
    of_forms = [ellipsoids.rounding.of_form(at, form) for at, form in forms.items()]
    share = ellipsoids.rounding.share(max(forms)) + 1e-10  # plus the rounding of <b, z> itself
    return product(share, most) + torch.stack(torch.broadcast_tensors(*of_forms)).sum(0)
