"""The first two orders of all functionals of leaves, from pairs of Gaussian images.

With K as in reaches.py, <X, K Y> of independent Gaussian X, Y takes three pushes for all functionals at once: X and Y,
and then s (A X) (A Y) from all units together. The sums of squares over some pairs bound all |a A| and all |K|_F
(quantiles.py). Proof: docs/proofs.md#second-reaches.

The values of the units themselves bound many functionals together. Let C >= 0 be diagonal in units, K_a the sum of the
a_h C_h^(1/2) K_h, and a the unit vector with the largest |K_a|_F. Over all pairs, the sum of <X, K_a Y>^2 is at most
the largest eigenvalue of the Gram matrix of the pairs, and seldom less than `least_pair_sum` times |K_a|_F^2. So

    |C^(1/2) b|  <=  e^2 max_a |K_a|_F / 2,      b_h = <G, K_h G> / 2,

for one direction that no sample chose. Proof: docs/proofs.md#lifted.

Letters: B images, M vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from certify.image.budget import at_once
from certify.image.ellipsoid import PROBE_FAILURE, TINY, Ellipsoids
from certify.image.joint import Sizes
from certify.image.quantiles import least_pair_sum, least_square_sum
from certify.taylor.forms import smooth_leaves
from zoo.arithmetic import OUT, U, broadcast_batch, nan_to_inf, product
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import Forms
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Vectors

TOGETHER = 16  # pairs
SAMPLES = 1024  # pairs of `Samples`: with 256 the norm is twice as large, with 2048 a tenth less
FEWEST = 256
MEMORY = 2**28  # bytes an image for the values of units, in float32
STORED, TINIEST = 2.0**-24, 1e-40  # relative and absolute rounding of these values
GRAM = 1e-10  # rounding of the largest eigenvalue, relative to the trace


@dataclass(frozen=True)
class Orders:
    """The first two orders of all functionals at the largest E: E |a A| and E^2 |K|_F / 2, (B, ...) of every leaf."""

    first: Vectors
    second: Vectors


@dataclass(frozen=True)
class Samples:
    """The values <X, K Y> of the units of leaves, (M, B, N, H) of M pairs, and bounds of their errors (B, N, H)."""

    values: Vectors
    errors: Vectors

    def norm(self, c: Mapping[int, Tensor]) -> Tensor:
        """Bound E^2 |K_a|_F / 2 for all unit vectors a and coefficients c (1, B, N, H): (1, B)."""
        rows = [(self.values[at] * c[at][0].sqrt()).flatten(2).movedim(1, 0) for at in self.values if at in c]
        errors = [(c[at][0].sqrt() * (self.errors[at] + TINIEST)).flatten(1) for at in self.values if at in c]
        if not rows:
            return torch.zeros_like(next(iter(c.values()))[..., 0, 0])
        gram_BMM = torch.stack([of_leaf @ of_leaf.mT for of_leaf in rows]).sum(0)
        lost_B, count = ~torch.isfinite(gram_BMM).flatten(1).all(1), gram_BMM.shape[-1]
        gram_BMM = gram_BMM.masked_fill(lost_B[:, None, None], 0.0)
        trace_B = gram_BMM.diagonal(dim1=1, dim2=2).sum(1)
        largest_B = torch.linalg.eigvalsh(gram_BMM)[:, -1].clamp_min(0) + GRAM * trace_B
        off_B = 2 * STORED * trace_B.sqrt() + count**0.5 * torch.linalg.vector_norm(torch.cat(errors, 1), dim=1)
        found_B = 0.5 * OUT * (largest_B.sqrt() + off_B) / least_pair_sum(count, PROBE_FAILURE) ** 0.5
        return nan_to_inf(found_B.masked_fill(lost_B, torch.inf))[None]


@dataclass(frozen=True)
class Pairs:
    """Pairs of Gaussian images, pushed through the tape: what they do to functionals, alone and together."""

    ellipsoids: Ellipsoids
    formed: Mapping[int, Forms]
    units: Mapping[int, UnitForms]
    count: int

    def orders(self) -> Orders:
        """Return bounds of the first two orders, from the sums of squares over all pairs."""
        return self._bounds(self._seen("pairs", {}))

    def samples(self) -> Samples:
        """Return the values of units that others reach."""
        kept = {at: list[Tensor]() for at in self.units if at > min(self.units)}
        errors = self._errors(self._seen("samples", kept))
        return Samples({at: torch.cat(of_leaf) for at, of_leaf in kept.items()}, {at: errors[at][1] for at in kept})

    def _seen(self, word: str, kept: dict[int, list[Tensor]]) -> "Seen":
        most_B, room = self.ellipsoids.most_B, torch.Size([self.ellipsoids.joint.images[0].numel()])
        seen = Seen(Vectors(), Vectors(), torch.zeros_like(most_B), Sizes(), Sizes(), kept)
        fit = at_once(most_B.numel() * self.ellipsoids.joint.room(max(self.formed)), 2)
        for start in range(0, self.count, TOGETHER):
            rooms = torch.Size([2 * min(TOGETHER, self.count - start), *room])
            u = self.ellipsoids.draw(rooms, f"{word} {start}", most_B[:, None]).movedim(1, 0)
            for x, y in zip(*(half.split(fit) for half in u.chunk(2)), strict=True):
                self._look(x, y, seen)
        return seen

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
            if at in seen.kept:
                seen.kept[at].append(self.units[at].units(v).float())
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
        orders = Orders(Vectors(), Vectors())
        for at, (alone, together) in self._errors(seen).items():
            found = (OUT * seen.first[at] + TINY).sqrt() + (2 * self.count) ** 0.5 * alone
            orders.first[at] = torch.fmin(self.ellipsoids.lengths_of[at], OUT / of_one * found)
            found = (OUT * seen.second[at] + TINY).sqrt() + self.count**0.5 * together
            orders.second[at] = nan_to_inf(OUT * 0.5 * found / of_two)
        return orders

    def _errors(self, seen: "Seen") -> dict[int, tuple[Tensor, Tensor]]:
        """Bound how far torch's <a, A X> and <X, K Y> of any pair are from the exact ones."""
        errors, off_B = dict[int, tuple[Tensor, Tensor]](), torch.zeros_like(seen.image_B)
        bent_B = torch.zeros_like(seen.image_B)
        for at in self.formed:
            length, alone = self.ellipsoids.lengths_of[at], self._away(at, seen.image_B)
            pushed = self._away(at, bent_B) + product(length, broadcast_batch(off_B, length.shape[1:]))
            errors[at] = alone, pushed
            if at in seen.sources:
                off_B = off_B + self._source_off(at, seen, alone)
                bent_B = torch.hypot(bent_B, seen.sources[at])
        return errors

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


class Paired(Ellipsoids):
    """Ellipsoids with pairs of images pushed through the tape."""

    @cached_property
    def units(self) -> dict[int, UnitForms]:
        return smooth_leaves(self.tape)

    @cached_property
    def orders(self) -> Orders | None:
        """The first two orders; None where no leaf follows units, or the model is large."""
        formed = {at: forms for at in self.tape.nonlinear if (forms := self.tape.leaves[at].forms) is not None}
        if self.budget.large or not self.units or max(formed) == min(self.units):
            return None
        return Pairs(self, formed, self.units, self.budget.probes // 2).orders()

    @cached_property
    def samples(self) -> Samples | None:
        """The values of units for pairs; None where no units follow others, or the model is large."""
        behind = [at for at in self.units if at > min(self.units, default=at)]
        entries = sum(self.units[at].z_BNH[0].numel() for at in behind)
        if self.budget.large or not behind or 4 * FEWEST * entries > MEMORY:
            return None
        return Pairs(self, self.units, self.units, min(SAMPLES, MEMORY // (4 * entries))).samples()


@dataclass
class Seen:
    """Sums of squares of all pairs, and the largest lengths: of images, of units, and of sources over their weights.

    `kept` are the values of the units of some leaves.
    """

    first: Vectors
    second: Vectors
    image_B: Tensor
    units: Sizes
    sources: Sizes
    kept: dict[int, list[Tensor]]

    @staticmethod
    def longest_of(lengths: Sizes, at: int, v: Tensor) -> None:
        length_B = torch.linalg.vector_norm(v.flatten(2), dim=-1).amax(0)
        lengths[at] = torch.maximum(lengths[at], length_B) if at in lengths else length_B
