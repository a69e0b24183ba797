"""The largest loss of a margin to first order and remainders together: one image seldom attains both worst cases.

`Ellipsoids.cost` adds the worst of each. Split u of ellipsoid.py into its parts: u_0 of the image, u_k of remainders
and u_n of defects. The loss is at most the largest value of

    <b, u_0> + <u, S u> / 2,    |u_0| <= t = e / E,   |u_k|^2 <= <u, Q_k u>,   |u_k|^2 <= theta_k,   |u_n|^2 <= theta_0,

b = -E g_0, S = sum_i M_i^T C_i M_i, Q_k = M_k^T C'_k M_k the form of the remainder of leaf k. The S-procedure: let m
be the multiplier of the first constraint, d_k = q_k + rest the sum of the two of u_k, and d_n that of u_n. For all
multipliers for which P = diag(m, d) - S - sum_k q_k Q_k is positive definite,

    loss <= (m t^2 + sum_k (d_k - q_k) theta_k + d_n theta_0) / 2 + <b, P^-1 b> / 2.

One norm kappa = lambda_max(D^(-1/2) A D^(-1/2)) of A = S + sum_k D_k Q_k shows that P is positive definite for all
multipliers above kappa D, and one product z = A b bounds the last term. Proof: docs/proofs.md#coupled.

Letters: B images, C rivals of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from certify.ellipsoids.ellipsoid import Ellipsoids, Grown, Margins
from certify.ellipsoids.joint import IMAGE, NOISE, Scale, Sizes
from zoo.arithmetic import OUT, U, broadcast_batch, nan_to_inf
from zoo.arithmetic import product as times
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.tape import Vectors

ALIGNED = 0.5  # what remainders add to the image's multiplier, relative to the most they could, approximately
FIRM = 1.2  # multipliers of remainders, relative to what the parts after them require
SPARE = (0.02, 0.05, 0.1, 0.2, 0.4)  # tried multiples of D above kappa D
STEEP = (1.0, 1.1, 1.3, 1.7)  # m in units of |b| / t, where kappa does not require more


@dataclass(frozen=True, kw_only=True)
class Coupled:
    """The terms of some rivals at the largest e, (C, B) each.

    `first` is the loss to first order alone, `length` |b|, and `bent` <b, A b>. `weights` and `pulled` are D and |z| of
    the parts, by their sources, with rounding included. `held` says whose remainders are bounded by their forms, (B,);
    `last` is the last leaf with a form.
    """

    first: Tensor
    length: Tensor
    bent: Tensor
    kappa: Tensor
    weights: Vectors
    pulled: Vectors
    held: Sizes
    last: int
    most_B: Tensor

    def cost(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the largest loss to first order and forms together, for e <= the largest: (C, B)."""
        costs = [self._cost(e_B / self.most_B, grown, *factors) for factors in product(SPARE, STEEP)]
        return nan_to_inf(OUT * torch.stack(costs).amin(0))

    def flat(self) -> "Coupled":
        """Return the terms of the same margins with the gradient 0 at the image."""
        zero = torch.zeros_like(self.first)
        return replace(self, first=zero, length=zero, bent=zero, pulled=Vectors.fromkeys(self.pulled, zero))

    def _cost(self, t_B: Tensor, grown: Grown, spare: float, steep: float) -> Tensor:
        share = self.kappa + spare
        m = torch.maximum(share * self.weights[IMAGE], steep * self.length / t_B.clamp_min(1e-100))
        inverse, first = self.inverse(m, spare), self.first * t_B
        traded = (first / inverse.clamp_min(1e-300)).clamp(max=1)  # every share is sound; this one gives the least sum
        return first * (1 - traded) + (traded.square() * inverse + m * t_B.square() + self.allowed(share, grown)) / 2

    def inverse(self, m: Tensor, spare: float) -> Tensor:
        """Return an upper bound of <b, P^-1 b>, for the multipliers (kappa + spare) D and m."""
        least = self.kappa * self.weights[IMAGE]
        rest = self.pulled[IMAGE].square() / (m - least)
        for part in self.weights.keys() - {IMAGE}:
            rest = rest + self.pulled[part].square() / (spare * self.weights[part])
        return self.length.square() / m + (self.bent + rest) / m.square()

    def allowed(self, share: Tensor, grown: Grown) -> Tensor:
        """Return sum_k (d_k - q_k) theta_k + d_n theta_0 for d = share D.

        Forms bound as much of each remainder as they may, constants the rest.
        """
        total = times(share * self.weights[NOISE], grown.theta_0[self.last])
        for k, held_B in self.held.items():
            total = total + times((share - held_B * share.clamp(max=1)) * self.weights[k], grown.theta[k])
        return total


def coupled(ellipsoids: Ellipsoids, margins: Margins, g_0: Tensor, first: Tensor) -> Coupled:
    """Return the terms for margins with gradients g_0 (C, B, *x) at the image and first-order losses `first` e."""
    joint, last = ellipsoids.joint, margins.last
    held = {k: ellipsoids.held(k) for k in joint.sources(last)}
    weights = _weights(ellipsoids, margins, held)
    forms = dict(margins.forms)
    for k, held_B in held.items():
        form = ellipsoids.rests[k].form
        if form is not None and bool(held_B.any()):
            forms[k] = _sum(forms.get(k), form, weights[k] * held_B)
    parts = {part: joint.part(part, last) for part in weights}
    scale = _scale(weights, parts)
    kappa = ellipsoids.seminorms(forms, "coupled", margins.numbers, ellipsoids.budget.close, scale).square()
    slope = g_0.flatten(2) * joint.most_B[:, None]
    b = F.pad(slope, (0, joint.room(last) - slope.shape[-1]))  # the image is the first part
    z, length = joint.gram(forms)(b), torch.linalg.vector_norm(b, dim=-1)
    off = _rounded(ellipsoids, forms, kappa, weights) * length
    pulled = {part: torch.linalg.vector_norm(z * mask, dim=-1) + off for part, mask in parts.items()}
    return Coupled(
        first=first * joint.most_B,
        length=length,
        bent=(b * z).sum(-1) + off * length,
        kappa=kappa,
        weights=weights,
        pulled=pulled,
        held=held,
        last=last,
        most_B=joint.most_B,
    )


def _scale(weights: Vectors, parts: Vectors) -> Scale:
    """Return D^(-1/2)."""
    roots = {part: weight.rsqrt() for part, weight in weights.items()}
    entries = torch.stack([roots[part][..., None] * mask for part, mask in parts.items()]).sum(0)
    return Scale(entries, torch.stack(list(roots.values())).amax(0), roots[NOISE])


def _rounded(ellipsoids: Ellipsoids, forms: Mapping[int, QuadraticForm], kappa: Tensor, weights: Vectors) -> Tensor:
    """Bound the error of torch's A b for |b| = 1: (C, B). ||A|| is at most kappa max D."""
    most = kappa * torch.stack(list(weights.values())).amax(0)
    of_forms = [ellipsoids.rounding.of_form(at, form) for at, form in forms.items()]
    share = ellipsoids.rounding.share(max(forms)) + 1e-10  # plus the rounding of <b, z> itself
    return share * most + torch.stack(torch.broadcast_tensors(*of_forms)).sum(0)


def _weights(ellipsoids: Ellipsoids, margins: Margins, held: Sizes) -> Vectors:
    """Return D; any positive numbers are sound. With FIRM = 1 and ALIGNED = 1 kappa would be at most 1."""
    alone = whole = torch.where(torch.isfinite(margins.norm), margins.norm.square(), 1.0).clamp_min(1e-100)
    weights = Vectors()
    for k in sorted(held, reverse=True):
        weights[k] = FIRM * whole
        whole = whole + weights[k] * torch.where(held[k] > 0, ellipsoids.rests[k].norm_B.square(), 0.0)
    return weights | {NOISE: FIRM * whole, IMAGE: alone + ALIGNED * (whole - alone)}


def _sum(form: QuadraticForm | None, rest: QuadraticForm, weight: Tensor) -> QuadraticForm:
    """Return form + weight * rest."""

    def apply(v: Tensor) -> Tensor:
        added = broadcast_batch(weight, v.shape[2:]) * rest.apply(v)
        return added if form is None else form.apply(v) + added

    largest, rounding = times(weight, rest.largest), 2 * times(weight, torch.as_tensor(rest.rounding).to(weight))
    if form is not None:
        largest, rounding = form.largest + largest, 2 * form.rounding + rounding
    return QuadraticForm(apply, largest, rounding=rounding + 8 * U * largest)
