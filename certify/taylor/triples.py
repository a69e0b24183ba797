"""The first orders of all functionals of leaves, from Gaussian images.

A hidden unit with the functional A_k of the image has the remainder s_k (A_k G)^2 / 2 + sigma'''_k (A_k G)^3 / 6 and
more, s = sigma''. So a functional of a later leaf has, with K and T of all units together,

    <a, H>  =  <a, A G> + <G, K G> / 2 + T(G, G, G) / 6 + rest.

<X, K Y> of independent Gaussian X, Y takes three pushes for all functionals at once: X and Y, and then s (A X) (A Y)
from all units. T(X, Y, Z) takes two more. The sums of squares over some triples bound all |a A|, |K|_F and |T|_F
(quantiles.py). Proof: docs/proofs.md#second-reaches.

Letters: B images, M vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from certify.image.budget import at_once
from certify.image.ellipsoid import Ellipsoids
from certify.image.joint import Sizes
from certify.image.measured import PROBE_FAILURE, norm_of_squares
from certify.shared.quantiles import least_product_sum, least_square_sum
from zoo.arithmetic import OUT, U, broadcast_batch, product
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import Forms
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Vectors

TOGETHER = 16  # triples


@dataclass(frozen=True)
class Orders:
    """The orders of all functionals at the largest E: E |a A|, E^2 |K|_F / 2, E^3 |T|_F / 6; (B, ...) of every leaf."""

    first: Vectors
    second: Vectors
    third: Vectors


@dataclass
class Sums:
    """One order: the sums of squares, and the largest length of sources over their weights, and of their errors."""

    squares: Vectors = field(default_factory=Vectors)
    sources: Sizes = field(default_factory=Sizes)
    errors: Sizes = field(default_factory=Sizes)


@dataclass(frozen=True)
class Triples:
    """Triples of Gaussian images, pushed through the tape: what they do to functionals, alone and together."""

    ellipsoids: Ellipsoids
    formed: Mapping[int, Forms]
    units: Mapping[int, UnitForms]
    count: int

    def orders(self) -> Orders:
        """Return bounds of the first orders, from the sums of squares over all triples."""
        most_B, room = self.ellipsoids.most_B, torch.Size([self.ellipsoids.joint.images[0].numel()])
        longest_B, first, second, third = torch.zeros_like(most_B), Vectors(), Sums(), Sums()
        fit = at_once(most_B.numel() * self.ellipsoids.joint.room(max(self.formed)), 3)
        for start in range(0, self.count, TOGETHER):
            rooms = torch.Size([3 * min(TOGETHER, self.count - start), *room])
            u = self.ellipsoids.draw(rooms, f"triples {start}", most_B[:, None]).movedim(1, 0)
            for few in zip(*(part.split(fit) for part in u.chunk(3)), strict=True):
                images = torch.stack(few)
                length_B = torch.linalg.vector_norm(images, dim=-1).flatten(0, 1).amax(0)
                moved = self._linear(images, first)
                self._bent(2, moved, images.shape[1], length_B, second)
                self._bent(3, moved, images.shape[1], length_B, third)
                longest_B = torch.maximum(longest_B, length_B)
        self.ellipsoids.failure += 3 * PROBE_FAILURE
        return Orders(self._first(first, longest_B), self._of_products(2, second), self._of_products(3, third))

    def _linear(self, images: Tensor, first: Vectors) -> Vectors:
        """Add the squares of <a, A G> of all images (3, M, B, n); return what these do to units."""
        joint, last, moved = self.ellipsoids.joint, max(self.formed), Vectors()

        def visit(at: int, v: Tensor) -> None:
            if at in self.formed:
                first[at] = self.formed[at].squares(v) + first.get(at, 0.0)
            if at in self.units and at < last:
                moved[at] = self.units[at].units(v).unflatten(0, images.shape[:2])

        joint.push(pad(images.flatten(0, 1), (0, joint.room(last) - images.shape[-1])), visit, last)
        return moved

    def _bent(self, order: int, moved: Vectors, count: int, length_B: Tensor, sums: Sums) -> None:
        """Add the squares of <X, K Y> / 2 or T(X, Y, Z) / 6 of so many triples."""
        joint = self.ellipsoids.joint

        def visit(at: int, v: Tensor) -> Tensor | None:
            if at in self.formed:
                sums.squares[at] = self.formed[at].squares(v) + sums.squares.get(at, 0.0)
            if at not in moved:
                return None
            d, share = moved[at][:order], self._coefficients[order][at] / joint.weights[at]
            far, whole = (d.abs() + self._away(at, length_B)).prod(0) - d.abs().prod(0), d.prod(0)
            longest(sums.sources, at, share * whole)
            longest(sums.errors, at, share * far)
            return joint.tape.spread(self._coefficients[order][at] * whole, at)

        joint.tape.push(joint.most_B.new_zeros(count, *joint.images.shape), visit, max(self.formed))

    @cached_property
    def _coefficients(self) -> dict[int, Vectors]:
        """Sigma'' / 2 and sigma''' / 6 of the units of every leaf, by order."""
        found = {2: Vectors(), 3: Vectors()}
        for at, forms in self.units.items():
            assert isinstance(forms.activation, Smooth)
            found[2][at], found[3][at] = (
                forms.activation.second(forms.z_BNH) / 2,
                forms.activation.third(forms.z_BNH) / 6,
            )
        return found

    def _first(self, squares: Vectors, longest_B: Tensor) -> Vectors:
        least = least_square_sum(3 * self.count, PROBE_FAILURE / entries(squares)) ** 0.5
        found = Vectors()
        for at, square in squares.items():
            of_leaf = OUT * norm_of_squares(square, 3 * self.count, self._away(at, longest_B), least)
            found[at] = torch.fmin(self.ellipsoids.lengths_of[at], of_leaf)
        return found

    def _of_products(self, order: int, sums: Sums) -> Vectors:
        """Return |K|_F / 2 or |T|_F / 6; torch's error in the sources, and that of the second push, are added."""
        least = least_product_sum(self.count, order, PROBE_FAILURE / entries(sums.squares)) ** 0.5
        error_B, source_B = (torch.zeros_like(self.ellipsoids.most_B) for _ in range(2))
        found = Vectors()
        for at, square in sums.squares.items():
            length = self.ellipsoids.lengths_of[at]
            off = self._away(at, source_B) + product(length, broadcast_batch(error_B, length.shape[1:]))
            found[at] = OUT * norm_of_squares(square, self.count, off, least)
            if at in sums.sources:
                error_B = error_B + sums.errors[at] * OUT + 16 * U * sums.sources[at]
                source_B = torch.hypot(source_B, sums.sources[at])
        return found

    def _away(self, at: int, size_B: Tensor) -> Tensor:
        return away(self.ellipsoids, self.formed[at], at, size_B)


def entries(squares: Vectors) -> int:
    """Return the number of functionals of an image."""
    return sum(found[0].numel() for found in squares.values())


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
