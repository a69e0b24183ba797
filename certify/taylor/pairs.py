"""The first two orders of all functionals of leaves, from pairs of Gaussian images.

With K as in reaches.py, <X, K Y> of independent Gaussian X, Y takes three pushes for all functionals at once: X and Y,
and then s (A X) (A Y) from all units together. The sums of squares over some pairs bound all |a A| and all |K|_F
(quantiles.py). Proof: docs/proofs.md#second-reaches.

Letters: B images, M vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from certify.image.budget import at_once
from certify.image.ellipsoid import Ellipsoids
from certify.image.joint import Sizes
from certify.image.measured import PROBE_FAILURE, TINY
from certify.shared.quantiles import least_pair_sum, least_square_sum
from zoo.arithmetic import OUT, U, broadcast_batch, nan_to_inf, product
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import Forms
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Vectors

TOGETHER = 16  # pairs


@dataclass(frozen=True)
class Orders:
    """The first two orders of all functionals at the largest E: E |a A| and E^2 |K|_F / 2, (B, ...) of every leaf."""

    first: Vectors
    second: Vectors


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
                longest(seen.units, at, moved[at])

        def bent(at: int, v: Tensor) -> Tensor | None:
            if at in self.formed:
                seen.second[at] = self.formed[at].squares(v) + seen.second.get(at, 0.0)
            if at not in self.units or at == last:
                return None
            one, other = moved[at].chunk(2)
            r = self.curvature(at) * one * other
            longest(seen.sources, at, r / joint.weights[at])
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
        return away(self.ellipsoids, self.formed[at], at, size_B)

    def _source_off(self, at: int, seen: "Seen", away: Tensor) -> Tensor:
        """Bound how far s d d' / W, as computed, is from the exact one: (B,)."""
        worst_B = (self.curvature(at).abs() * away / self.ellipsoids.joint.weights[at]).flatten(1).amax(1)
        longest_B = 2 * seen.units[at] + torch.linalg.vector_norm(away.flatten(1), dim=1)
        return product(worst_B, longest_B) * OUT + 8 * U * seen.sources[at]


def away(ellipsoids: Ellipsoids, forms: Forms, at: int, size_B: Tensor) -> Tensor:
    """Bound how far torch's <a, M u> is from the exact one, for |u| <= size: (B, ...)."""
    length = ellipsoids.lengths_of[at]
    moved_B = product(ellipsoids.rounding.share(at), size_B) * OUT
    far_B, room = product(ellipsoids.rounding.sizes[at], size_B) * 2, length.shape[1:]
    return product(length, broadcast_batch(moved_B, room)) + product(forms.slack, broadcast_batch(far_B, room))


def longest(lengths: Sizes, at: int, v: Tensor) -> None:
    """Take the length of vectors v (M, B, ...) into the largest one of a leaf."""
    length_B = torch.linalg.vector_norm(v.flatten(2), dim=-1).amax(0)
    lengths[at] = torch.maximum(lengths[at], length_B) if at in lengths else length_B


@dataclass
class Seen:
    """Sums of squares of all pairs, and the largest lengths: of images, of units, and of sources over their weights."""

    first: Vectors
    second: Vectors
    image_B: Tensor
    units: Sizes
    sources: Sizes
