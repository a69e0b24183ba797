"""The first orders of all functionals of leaves, from Gaussian images.

A hidden unit with the functional A_k of the image has the remainder s_k (A_k G)^2 / 2 + sigma'''_k (A_k G)^3 / 6 and
more, s = sigma''. So a functional of a later leaf has, with K and T of all units together,

    <a, H>  =  <a, A G> + <G, K G> / 2 + T(G, G, G) / 6 + rest.

<X, K Y> of independent Gaussian X, Y takes three pushes for all functionals at once: X and Y, and then s (A X) (A Y)
from all units. T(X, Y, Z) takes two more. The sums of squares over some triples bound all |a A|, |K|_F and |T|_F
(quantiles.py). Proof: docs/proofs.md#second-reaches.

The second and the third order b of the input of a later leaf have |C^(1/2) b| <= lambda^(1/2) E^2 or E^3 for its form
C >= 0, lambda the largest eigenvalue of the matrix of all <K_a, K_a'> / 4 or <T_a, T_a'> / 36 of the rows a of C^(1/2).
The trace of this matrix is often ten times as large. Proof: docs/proofs.md#through-forms.

Letters: B images, M vectors.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from certify.ellipsoids.budget import at_once
from certify.ellipsoids.ellipsoid import Ellipsoids
from certify.ellipsoids.joint import Sizes
from certify.ellipsoids.measured import PROBE_FAILURE, norm_of_squares
from certify.shared.block_power import largest_eigenvalue
from certify.shared.quantiles import least_product_sum, least_square_sum
from zoo.arithmetic import OUT, U, broadcast_batch, gamma, product
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import Forms, QuadraticForm
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Vectors

TOGETHER = 16  # triples
ORDERS = (2, 3)

Visit = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Orders:
    """The orders of all functionals at the largest E: E |a A|, E^2 |K|_F / 2, E^3 |T|_F / 6; (B, ...) of every leaf."""

    first: Vectors
    second: Vectors
    third: Vectors


@dataclass(frozen=True)
class Through:
    """The effects of the second and third orders of units on the forms of a rival, at the largest E: (1, B) each."""

    second: Tensor
    third: Tensor


@dataclass
class Made:
    """The largest lengths of all that units make of triples, over their weights, and of its errors, by leaf."""

    sources: Sizes = field(default_factory=Sizes)
    errors: Sizes = field(default_factory=Sizes)

    def before(self, at: int, like_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return these lengths for all leaves before one together, that of errors first: (B,) each."""
        source_B, error_B = torch.zeros_like(like_B), torch.zeros_like(like_B)
        for k, of_leaf in self.sources.items():
            if k < at:
                error_B = error_B + self.errors[k] * OUT + 16 * U * of_leaf
                source_B = torch.hypot(source_B, of_leaf)
        return error_B, source_B


@dataclass(frozen=True)
class Moved:
    """The changes of the inputs of leaves by one order of units, (M, B, ...) for all triples, and their sources."""

    inputs: Vectors
    made: Made


@dataclass(frozen=True)
class Triples:
    """So many triples of Gaussian images, pushed through the tape: what they do to leaves, alone and together.

    They are seeded by a word and numbers (B, n).
    """

    ellipsoids: Ellipsoids
    units: Mapping[int, UnitForms]
    count: int
    word: str
    numbers: Tensor

    def orders(self, formed: Mapping[int, Forms]) -> Orders:
        """Return bounds of the first orders of these leaves, from the sums of squares over all triples."""
        longest_B, first = torch.zeros_like(self.ellipsoids.most_B), Vectors()
        made, squares = {order: Made() for order in ORDERS}, {order: Vectors() for order in ORDERS}

        def add(at: int, v: Tensor, to: Vectors) -> None:
            if at in formed:
                to[at] = formed[at].squares(v) + to.get(at, 0.0)

        for images in self._drawn(max(formed)):
            moved = self._linear(images, max(formed), partial(add, to=first))
            for order in ORDERS:
                self._bent(order, images, moved, made[order], max(formed), partial(add, to=squares[order]))
            longest_B = torch.maximum(longest_B, longest_of(images.flatten(0, 1)))
        self.ellipsoids.failure += 3 * PROBE_FAILURE
        second, third = (self._of_products(order, formed, squares[order], made[order]) for order in ORDERS)
        return Orders(self._first(formed, first, longest_B), second, third)

    def moved(self, leaves: Collection[int]) -> dict[int, Moved]:
        """Return what each order of units adds to the inputs of these leaves, for all triples."""
        last, made = max(leaves), {order: Made() for order in ORDERS}
        seen = {order: {at: list[Tensor]() for at in leaves} for order in ORDERS}

        def keep(at: int, v: Tensor, to: Mapping[int, list[Tensor]]) -> None:
            if at in leaves:
                to[at].append(v)

        for images in self._drawn(last):
            moved = self._linear(images, last, lambda at, v: None)
            for order in ORDERS:
                self._bent(order, images, moved, made[order], last, partial(keep, to=seen[order]))
        inputs = {order: Vectors({at: torch.cat(of_leaf) for at, of_leaf in seen[order].items()}) for order in ORDERS}
        return {order: Moved(inputs[order], made[order]) for order in ORDERS}

    def through(self, forms: Mapping[int, QuadraticForm], moved: Mapping[int, Moved], within: Tensor) -> Through:
        """Bound (sum_l <b, C b>)^(1/2), b what second and what third orders add to the inputs of leaves l: (1, B) each.

        It is for images of length E. The forms do not depend on these triples, and `within` (1, B) is never below the
        norm of sum_l M_l^T C_l M_l.
        """
        self.ellipsoids.failure += len(ORDERS) * PROBE_FAILURE
        return Through(*(self._norm(order, forms, moved[order], within) for order in ORDERS))

    def _norm(self, order: int, forms: Mapping[int, QuadraticForm], moved: Moved, within: Tensor) -> Tensor:
        """Return the norm of one order: (1, B)."""
        last, like_B = max(forms), self.ellipsoids.most_B
        error_B, source_B = moved.made.before(last, like_B)
        off_B = error_B + product(self.ellipsoids.rounding.share(last), source_B)
        squares, least = self._largest(forms, moved.inputs), least_product_sum(self.count, order, PROBE_FAILURE) ** 0.5
        return OUT * norm_of_squares(squares, self.count, product(within.sqrt(), OUT * off_B), least)

    def _largest(self, forms: Mapping[int, QuadraticForm], b: Vectors) -> Tensor:
        """Bound the largest eigenvalue of the Gram matrix of all sum_l <b, C b'>, torch's rounding included: (B,)."""
        gram, rounded_B = torch.zeros(()), torch.zeros_like(self.ellipsoids.most_B)
        for at, form in forms.items():
            of_leaf = b[at].flatten(2).movedim(1, 0)
            pulled = form.apply(b[at]).flatten(2).movedim(1, 0)
            gram = gram + of_leaf @ pulled.mT
            rounding = form.rounding + gamma(of_leaf.shape[-1]) * form.largest[0]
            rounded_B = rounded_B + product(self.count * rounding.view(-1), longest_of(b[at]).square())
        return largest_eigenvalue((gram + gram.mT) / 2) + OUT * rounded_B

    def _drawn(self, last: int) -> Iterator[Tensor]:
        """Draw some triples of images at a time: (3, M, B, n)."""
        joint = self.ellipsoids.joint
        room, fit = torch.Size([joint.images[0].numel()]), at_once(joint.most_B.numel() * joint.room(last), 3)
        for start in range(0, self.count, TOGETHER):
            rooms = torch.Size([3 * min(TOGETHER, self.count - start), *room])
            u = self.ellipsoids.draw(rooms, f"{self.word} {start}", self.numbers).movedim(1, 0)
            for few in zip(*(part.split(fit) for part in u.chunk(3)), strict=True):
                yield torch.stack(few)

    def _linear(self, images: Tensor, last: int, visit: Visit) -> Vectors:
        """Call `visit` with what all images (3, M, B, n) do to leaves; return what they do to units before the last."""
        joint, moved = self.ellipsoids.joint, Vectors()

        def to_units(at: int, v: Tensor) -> None:
            visit(at, v)
            if at in self.units and at < last:
                moved[at] = self.units[at].units(v).unflatten(0, images.shape[:2])

        joint.push(pad(images.flatten(0, 1), (0, joint.room(last) - images.shape[-1])), to_units, last)
        return moved

    def _bent(self, order: int, images: Tensor, moved: Vectors, made: Made, last: int, visit: Visit) -> None:
        """Call `visit` with what units make of the second or third orders of all triples, on the way to leaves."""
        joint, length_B = self.ellipsoids.joint, longest_of(images.flatten(0, 1))

        def from_units(at: int, v: Tensor) -> Tensor | None:
            visit(at, v)
            if at not in moved:
                return None
            d, share = moved[at][:order], self._coefficients[order][at] / joint.weights[at]
            far, whole = (d.abs() + self._away(at, self.units[at], length_B)).prod(0) - d.abs().prod(0), d.prod(0)
            longest(made.sources, at, share * whole)
            longest(made.errors, at, share * far)
            return joint.tape.spread(self._coefficients[order][at] * whole, at)

        joint.tape.push(images.new_zeros(images.shape[1], *joint.images.shape), from_units, last)

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

    def _first(self, formed: Mapping[int, Forms], squares: Vectors, longest_B: Tensor) -> Vectors:
        least = least_square_sum(3 * self.count, PROBE_FAILURE / entries(squares)) ** 0.5
        found = Vectors()
        for at, square in squares.items():
            of_leaf = OUT * norm_of_squares(square, 3 * self.count, self._away(at, formed[at], longest_B), least)
            found[at] = torch.fmin(self.ellipsoids.lengths_of[at], of_leaf)
        return found

    def _of_products(self, order: int, formed: Mapping[int, Forms], squares: Vectors, made: Made) -> Vectors:
        """Return |K|_F / 2 or |T|_F / 6; torch's error in the sources, and that of the second push, are added."""
        least = least_product_sum(self.count, order, PROBE_FAILURE / entries(squares)) ** 0.5
        found = Vectors()
        for at, square in squares.items():
            length, (error_B, source_B) = self.ellipsoids.lengths_of[at], made.before(at, self.ellipsoids.most_B)
            off = self._away(at, formed[at], source_B) + product(length, broadcast_batch(error_B, length.shape[1:]))
            found[at] = OUT * norm_of_squares(square, self.count, off, least)
        return found

    def _away(self, at: int, forms: Forms, size_B: Tensor) -> Tensor:
        return away(self.ellipsoids, forms, at, size_B)


def entries(squares: Vectors) -> int:
    """Return the number of functionals of an image."""
    return sum(found[0].numel() for found in squares.values())


def away(ellipsoids: Ellipsoids, forms: Forms, at: int, size_B: Tensor) -> Tensor:
    """Bound how far torch's <a, M u> is from the exact one, for |u| <= size: (B, ...)."""
    length = ellipsoids.lengths_of[at]
    moved_B = product(ellipsoids.rounding.share(at), size_B) * OUT
    far_B, room = product(ellipsoids.rounding.sizes[at], size_B) * 2, length.shape[1:]
    return product(length, broadcast_batch(moved_B, room)) + product(forms.slack, broadcast_batch(far_B, room))


def longest_of(v: Tensor) -> Tensor:
    """Return the largest length of vectors v (M, B, ...): (B,)."""
    return torch.linalg.vector_norm(v.flatten(2), dim=-1).amax(0)


def longest(lengths: Sizes, at: int, v: Tensor) -> None:
    """Take the length of vectors v (M, B, ...) into the largest one of a leaf."""
    length_B = longest_of(v)
    lengths[at] = torch.maximum(lengths[at], length_B) if at in lengths else length_B
