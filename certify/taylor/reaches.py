"""Reaches of a linear part, exact second order and a rest of third order.

`certify.image` throws all remainders of earlier units into one ball. Their second order is known exactly:
r_k = s_k (A_k G)^2 / 2 + t_k with s = sigma''(z). So a functional of a later leaf is

    <a, H>  =  <a, A G> + <G, K G> / 2 + rest,     |<a, H>|  <=  e |a A| + e^2 |K|_F / 2 + |rest|,

K the sum of s_k (a J_k B_k) A_k^T A_k, and only t_k, of third order, and other leaves' remainders are left to the ball.
With b_k what remainders do to unit k, D_k its reach, and delta_k >= |c_k - s_k|,

    |t_k|  =  |(c_k - s_k) (A_k G)^2 + c_k (2 A_k G b_k + b_k^2)| / 2  <=  q_k |A_k G| + p_k |b_k|,

q = delta e |A_k| / 2 and p = kappa (e |A_k| + D_k) / 2; propagated.py bounds the |b_k| of a leaf together.

<X, K Y> of independent Gaussian X, Y takes three pushes for all functionals at once, and a few of them bound all |K|_F
(quantiles.py). Proof: docs/proofs.md#second-reaches.

Letters: B images, M vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from certify.image.budget import at_once
from certify.image.columns import Columns
from certify.image.ellipsoid import (
    PROBE_FAILURE,
    TINY,
    Before,
    Draw,
    Ellipsoids,
    Known,
    Off,
    Rest,
    least_square_sum,
)
from certify.image.joint import IMAGE, Joint, Sizes
from certify.taylor.forms import kappa, smooth_units
from certify.taylor.propagated import Propagated, propagated
from certify.taylor.quantiles import least_pair_sum
from zoo.arithmetic import OUT, U, at_least_near, broadcast_batch, nan_to_inf, product
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import Forms
from zoo.bounds.elementwise import UnitForms, largest_share
from zoo.bounds.tape import Vectors
from zoo.bounds.third_order import second_range

TOGETHER = 16  # pairs
VECTORS = 256  # that bound what earlier units do to a leaf


@dataclass(frozen=True)
class Orders:
    """The first two orders of all functionals at the largest E: E |a A| and E^2 |K|_F / 2, (B, ...) of every leaf."""

    first: Vectors
    second: Vectors


@dataclass(frozen=True)
class Third:
    """The bound of |t / W| of a leaf: the parts q |A G| / W and p |b| / W, for p at the largest e."""

    of_image_B: Tensor
    kappa: Tensor
    p: Tensor
    of_remainders: Propagated


class CloserEllipsoids(Ellipsoids):
    """The ellipsoids of all leaves, with the lesser of both reaches."""

    def __init__(self, joint: Joint, draw: Draw, known: Known, off: Off, first: Columns | None) -> None:
        self._thirds = dict[int, Third]()
        super().__init__(joint, draw, known, off, first)

    def _reach(self, at: int, known: Before) -> Tensor:
        reach = super()._reach(at, known)
        if self._orders is None:
            return reach
        t = broadcast_batch(known.e_B / self.most_B, reach.shape[1:])
        return torch.fmin(reach, nan_to_inf((self._orders.first[at] * t + self._beta(at, known)) * OUT))

    def _rest(self, at: int, known: Before) -> Rest:
        rest = super()._rest(at, known)
        if self._orders is not None and rest.reach is not None and at in self._units and at < max(self._orders.first):
            self._thirds[at] = self._measured_third(at, rest.reach, self._orders.first[at])
        return rest

    def _theta(self, at: int, known: Before) -> Tensor:
        theta_B = super()._theta(at, known)
        if at in self._thirds:
            known.third[at] = self._third(at, known)
        return theta_B

    @cached_property
    def _units(self) -> dict[int, UnitForms]:
        found = {at: smooth_units(self.tape.leaves[at].forms) for at in self.tape.nonlinear}
        return {at: forms for at, forms in found.items() if forms is not None}

    @cached_property
    def _orders(self) -> Orders | None:
        """The first two orders; None where no leaf follows units, or the model is large."""
        formed = {at: forms for at in self.tape.nonlinear if (forms := self.tape.leaves[at].forms) is not None}
        if self.budget.large or not self._units or max(formed) == min(self._units):
            return None
        return Pairs(self, formed, self._units, self.budget.probes // 2).orders()

    def _beta(self, at: int, known: Before) -> Tensor:
        """Bound what remainders and errors add to the functionals of a leaf: (B, ...)."""
        assert self._orders is not None
        second, length = self._orders.second[at], self.lengths_of[at]
        free_B = sum((known.third.get(k, theta_B) for k, theta_B in known.theta.items()), known.theta_0_B)
        rest = product(length, broadcast_batch(free_B.sqrt(), length.shape[1:]))
        return nan_to_inf(second * broadcast_batch((known.e_B / self.most_B).square(), second.shape[1:]) + rest)

    def _measured_third(self, at: int, reach: Tensor, first: Tensor) -> Third:
        """Return the bound of |t / W| at the largest e."""
        forms, weight, numbers = self._units[at], self.joint.weights[at], [self.most_B[:, None]]
        around = second_range(forms.activation, forms.z_BNH, at_least_near(reach))
        assert around is not None
        q, kappa_BNH = 0.5 * torch.maximum(around.hi, -around.lo) * first, kappa(forms, reach)
        form = forms.weighted((q / weight).square()[None])
        of_image = self.seminorms(
            {at: form}, f"third {at}", numbers, self.budget.close, self.joint.only((IMAGE,), at, form.largest)
        )
        p = product(kappa_BNH, 0.5 * (first + reach))
        of_remainders = propagated(self, {at: (p / weight).square()[None]}, f"beyond {at}", numbers, VECTORS)
        return Third(of_image[0], kappa_BNH, p, of_remainders)

    def _third(self, at: int, known: Before) -> Tensor:
        """Bound |t / W|^2 of a leaf: (B,)."""
        third, t_B, reach = self._thirds[at], known.e_B / self.most_B, self._reach(at, known)
        assert self._orders is not None
        linear = nan_to_inf(self._orders.first[at] * broadcast_batch(t_B, reach.shape[1:]))
        p = product(third.kappa, 0.5 * (linear + reach))
        of_remainders_B = product(largest_share(p, third.p), third.of_remainders.at(known.e_B, known)[0])
        return nan_to_inf((product(t_B.square(), third.of_image_B) + of_remainders_B).square() * OUT)


@dataclass(frozen=True)
class Pairs:
    """Pairs of Gaussian images, pushed through the tape: what they do to functionals, alone and together."""

    ellipsoids: Ellipsoids
    formed: Mapping[int, Forms]
    units: Mapping[int, UnitForms]
    count: int

    def orders(self) -> Orders:
        """Return bounds of the first two orders, from the sums of squares over all pairs."""
        most_B, room = self.ellipsoids.most_B, torch.Size([self.ellipsoids.joint.images[0].numel()])
        seen = Seen(Vectors(), Vectors(), torch.zeros_like(most_B), Sizes(), Sizes())
        fit = at_once(most_B.numel() * self.ellipsoids.joint.room(max(self.formed)), 2)
        for start in range(0, self.count, TOGETHER):
            rooms = torch.Size([2 * min(TOGETHER, self.count - start), *room])
            u = self.ellipsoids.draw(rooms, f"pairs {start}", most_B[:, None]).movedim(1, 0)
            for x, y in zip(*(half.split(fit) for half in u.chunk(2)), strict=True):
                self._look(x, y, seen)
        return self._bounds(seen)

    def _look(self, x: Tensor, y: Tensor, seen: "Seen") -> None:
        """Add the squares of <a, A G> of all vectors, and of <G, K G'> of all pairs."""
        joint, last, moved = self.ellipsoids.joint, max(self.formed), Vectors()

        def linear(at: int, v: Tensor) -> None:
            if at in self.formed:
                seen.first[at] = self.formed[at].squares(v) + seen.first.get(at, 0.0)
            if at in self.units:
                moved[at] = self.units[at].units(v)
                seen.longest_of(seen.units, at, moved[at])

        def bent(at: int, v: Tensor) -> Tensor | None:
            if at in self.formed:
                seen.second[at] = self.formed[at].squares(v) + seen.second.get(at, 0.0)
            if at not in self.units or at == last:
                return None
            one, other = moved[at].chunk(2)
            r = self.curvature(at) * one * other
            seen.longest_of(seen.sources, at, r / joint.weights[at])
            return joint.tape.spread(r, at)

        u = torch.cat([x, y])
        seen.image_B = torch.maximum(seen.image_B, torch.linalg.vector_norm(u, dim=-1).amax(0))
        joint.push(pad(u, (0, joint.room(last) - u.shape[-1])), linear, last)
        joint.tape.push(torch.zeros_like(x).unflatten(-1, joint.images.shape[1:]), bent, last)

    def curvature(self, at: int) -> Tensor:
        """Return s of a leaf's units."""
        activation = self.units[at].activation
        assert isinstance(activation, Smooth)
        return activation.second(self.units[at].z_BNH)

    def _bounds(self, seen: "Seen") -> Orders:
        entries = sum(found[0].numel() for found in seen.first.values())
        self.ellipsoids.failure += 2 * PROBE_FAILURE
        of_one = least_square_sum(2 * self.count, PROBE_FAILURE / entries) ** 0.5
        of_two = least_pair_sum(self.count, PROBE_FAILURE / entries) ** 0.5
        orders, off_B = Orders(Vectors(), Vectors()), torch.zeros_like(seen.image_B)
        bent_B = torch.zeros_like(seen.image_B)
        for at in self.formed:
            length = self.ellipsoids.lengths_of[at]
            away = self._away(at, seen.image_B)
            found = (OUT * seen.first[at] + TINY).sqrt() + (2 * self.count) ** 0.5 * away
            orders.first[at] = torch.fmin(length, OUT / of_one * found)
            pushed = self._away(at, bent_B) + product(length, broadcast_batch(off_B, length.shape[1:]))
            found = (OUT * seen.second[at] + TINY).sqrt() + self.count**0.5 * pushed
            orders.second[at] = nan_to_inf(OUT * 0.5 * found / of_two)
            if at in seen.sources:
                off_B = off_B + self._source_off(at, seen, away)
                bent_B = torch.hypot(bent_B, seen.sources[at])
        return orders

    def _away(self, at: int, size_B: Tensor) -> Tensor:
        """Bound how far torch's <a, M u> is from the exact one, for |u| <= size: (B, ...)."""
        ellipsoids, length = self.ellipsoids, self.ellipsoids.lengths_of[at]
        moved_B = product(ellipsoids.rounding.share(at), size_B) * OUT
        far_B = product(ellipsoids.rounding.sizes[at], size_B) * 2
        room = length.shape[1:]
        return product(length, broadcast_batch(moved_B, room)) + product(
            self.formed[at].slack, broadcast_batch(far_B, room)
        )

    def _source_off(self, at: int, seen: "Seen", away: Tensor) -> Tensor:
        """Bound how far s d d' / W, as computed, is from the exact one: (B,)."""
        worst_B = (self.curvature(at).abs() * away / self.ellipsoids.joint.weights[at]).flatten(1).amax(1)
        longest_B = 2 * seen.units[at] + torch.linalg.vector_norm(away.flatten(1), dim=1)
        return product(worst_B, longest_B) * OUT + 8 * U * seen.sources[at]


@dataclass
class Seen:
    """Sums of squares of all pairs, and the largest lengths: of images, of units, and of sources over their weights."""

    first: Vectors
    second: Vectors
    image_B: Tensor
    units: Sizes
    sources: Sizes

    @staticmethod
    def longest_of(lengths: Sizes, at: int, v: Tensor) -> None:
        length_B = torch.linalg.vector_norm(v.flatten(2), dim=-1).amax(0)
        lengths[at] = torch.maximum(lengths[at], length_B) if at in lengths else length_B
