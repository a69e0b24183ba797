"""The second order of leaves with a Hessian, such as attention: what it adds to functionals of later leaves.

Such a leaf sees H = M u, and its remainder is D^2 f[H, H] / 2 + R_3(H). So a functional of a later leaf changes by
<u, K u> / 2 and what R_3 adds, K the sum of what the Hessians of all earlier leaves do to it, and

    |<u, K u>| / 2  <=  |K|_F Theta / 2,

Theta before the last of them. As in triples.py, pairs of Gaussian vectors measure all |K|_F; but here they are vectors
u of everything that moves the leaf, not of the image alone. Proof: docs/proofs.md#bent.

Letters: B images, M vectors.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from certify.image.budget import at_once
from certify.image.columns import Columns
from certify.image.ellipsoid import Before, Ellipsoids, Grown, Known, Off, Rest
from certify.image.joint import Joint, Sizes
from certify.image.measured import PROBE_FAILURE, Draw, norm_of_squares
from certify.shared.block_power import largest_eigenvalue
from certify.shared.quantiles import least_product_sum, least_square_sum
from certify.taylor.forms import smooth_units
from certify.taylor.triples import TOGETHER, away, entries, longest
from zoo.arithmetic import OUT, U, broadcast_batch, nan_to_inf, product
from zoo.bounds.contracts import Forms, Hessian
from zoo.bounds.tape import Vectors


@dataclass(frozen=True)
class Bent:
    """|K|_F / 2 of the functionals (B, ...) of every leaf behind one with a Hessian.

    `rows` are the norms of all L_r M (B, R) of the leaves with a Hessian.
    """

    halves: Vectors
    rows: Vectors

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(self.rows)

    def theta(self, at: int, grown: Grown | Before) -> Tensor:
        """Return Theta before the last leaf with a Hessian that reaches leaf `at`: (B,)."""
        return grown.before[max(k for k in self.leaves if k < at)]


@dataclass(frozen=True)
class ThirdNorm:
    """The bound of |R_3 / W| of a leaf at the largest e, for Theta = 1, and Theta there."""

    norm_B: Tensor
    total_B: Tensor


class BentEllipsoids(Ellipsoids):
    """The ellipsoids of all leaves, with the second order of leaves that have a Hessian."""

    def __init__(self, joint: Joint, draw: Draw, known: Known, off: Off, first: Columns | None) -> None:
        self._thirds_of_hessians = dict[int, ThirdNorm]()
        super().__init__(joint, draw, known, off, first)

    @cached_property
    def formed(self) -> dict[int, Forms]:
        """The leaves whose functionals get a second order; none in a large model."""
        leaves = {} if self.budget.large else self.tape.leaves
        return {at: forms for at in self.tape.nonlinear if at in leaves and (forms := leaves[at].forms) is not None}

    def without_units(self, last: int) -> tuple[int, ...]:
        """Return the leaves without hidden units that reach leaf `last`."""
        return tuple(k for k in self.joint.sources(last) if smooth_units(self.tape.leaves[k].forms) is None)

    @cached_property
    def hessians(self) -> dict[int, Hessian]:
        """The leaves with a Hessian that others with functionals follow."""
        found = {at: self.tape.leaves[at].hessian for at in self.formed if at < max(self.formed)}
        return {at: hessian for at, hessian in found.items() if hessian is not None}

    @cached_property
    def bent(self) -> Bent:
        return Pushed(self, self.budget.probes // 2).bent() if self.hessians else Bent(Vectors(), Vectors())

    def _rest(self, at: int, known: Before) -> Rest:
        rest = super()._rest(at, known)
        if at in self.hessians and rest.reach is not None:
            form = self.hessians[at].of_third(rest.reach, self._rows(at, known), 1 / self.joint.weights[at])
            norm = self.seminorms({at: form}, f"third of {at}", [self.most_B[:, None]], self.budget.close)
            self._thirds_of_hessians[at] = ThirdNorm(norm[0], known.total_B)
        return rest

    def _theta(self, at: int, known: Before) -> Tensor:
        theta_B, reach = super()._theta(at, known), self.rests[at].reach
        if at in self._thirds_of_hessians and reach is not None:
            third, now = self._thirds_of_hessians[at], self._reach(at, known)
            of_reach_B = torch.where(now > 0, now / reach, 0.0).nan_to_num(1.0).flatten(1).amax(1)
            share_B = torch.maximum(of_reach_B, (known.total_B / third.total_B).sqrt()).clamp_max(1)
            third_B = nan_to_inf(product(third.norm_B.square(), known.total_B)) * OUT
            known.third[at] = torch.fmin(theta_B, product(self.hessians[at].shrink_third(share_B), third_B))
        return theta_B

    def _rows(self, at: int, known: Before) -> Tensor:
        """Return the reaches of the lengths |L_r H| (B, R)."""
        return product(self.bent.rows[at], known.total_B.sqrt()[:, None]) * OUT


@dataclass
class Seen:
    """The sums of squares of all pairs, and the largest lengths: of u, and of sources over their weights.

    `rows` are the sums of all L_r u u^T L_r^T, (B, R, K, K) of every leaf with a Hessian.
    """

    length_B: Tensor
    rows: Vectors = field(default_factory=Vectors)
    squares: Vectors = field(default_factory=Vectors)
    sources: Sizes = field(default_factory=Sizes)


@dataclass(frozen=True)
class Pushed:
    """Pairs of Gaussian vectors u, pushed to all leaves with a Hessian, and what these make of them pushed on."""

    ellipsoids: BentEllipsoids
    count: int

    def bent(self) -> Bent:
        ellipsoids, hessians = self.ellipsoids, self.ellipsoids.hessians
        seen, room = Seen(torch.zeros_like(ellipsoids.most_B)), ellipsoids.joint.room(max(hessians))
        fit = at_once(seen.length_B.numel() * room, 2)
        for start in range(0, self.count, TOGETHER):
            rooms = torch.Size([2 * min(TOGETHER, self.count - start), room])
            u = ellipsoids.draw(rooms, f"bent {start}", ellipsoids.most_B[:, None]).movedim(1, 0)
            for x, y in zip(*(half.split(fit) for half in u.chunk(2)), strict=True):
                self._look(x, y, seen)
        ellipsoids.failure += 2 * PROBE_FAILURE
        return Bent(self._halves(seen), {at: self._row(at, seen) for at in seen.rows})

    def _look(self, x: Tensor, y: Tensor, seen: Seen) -> None:
        """Add the squares of <u, K u'> of all pairs."""
        joint, hessians = self.ellipsoids.joint, self.ellipsoids.hessians
        formed, moved = self.ellipsoids.formed, Vectors()

        def arrive(at: int, v: Tensor) -> None:
            if at in hessians:
                moved[at] = v
                rows = hessians[at].rows(v).movedim(0, -1)
                seen.rows[at] = rows @ rows.mT + seen.rows.get(at, 0.0)

        def leave(at: int, v: Tensor) -> Tensor | None:
            if at in formed and at > min(hessians):
                seen.squares[at] = formed[at].squares(v) + seen.squares.get(at, 0.0)
            if at not in hessians:
                return None
            r = hessians[at].bilinear(*moved[at].chunk(2))
            longest(seen.sources, at, r / joint.weights[at])
            return r

        u = torch.cat([x, y])
        seen.length_B = torch.maximum(seen.length_B, torch.linalg.vector_norm(u, dim=-1).amax(0))
        joint.push(u, arrive, max(hessians))
        joint.tape.push(x.new_zeros(len(x), *joint.images.shape), leave, max(formed))

    def _row(self, at: int, seen: Seen) -> Tensor:
        """Return the norms of all L_r M (B, R) of a leaf.

        Along the top left singular vector of L_r M, of norm x, the sum of squares over vectors u is x^2 times chi^2.
        """
        rounding, number = self.ellipsoids.rounding, sum(grams.shape[1] for grams in seen.rows.values())
        moved_B = (8 * self.count) ** 0.5 * product(rounding.share(at), seen.length_B)
        far_B = 2 * product(rounding.sizes[at], seen.length_B)
        off_B = product(self.ellipsoids.hessians[at].rows_rounding, far_B)
        least = least_square_sum(2 * self.count, PROBE_FAILURE / number) ** 0.5
        squares = largest_eigenvalue(seen.rows[at])
        return OUT * norm_of_squares(squares, 2 * self.count, off_B[:, None], (least - moved_B)[:, None])

    def _halves(self, seen: Seen) -> Vectors:
        """Return |K|_F / 2; torch's error in the sources, and that of the second push, are added."""
        hessians, size_B, halves = self.ellipsoids.hessians, seen.length_B.square(), Vectors()
        own_B, bent_B = torch.zeros_like(size_B), torch.zeros_like(size_B)
        for at, forms in self.ellipsoids.formed.items():
            if at in seen.squares:
                halves[at] = self._half(at, forms, seen, own_B, bent_B)
            if at in hessians:
                weight_B = self.ellipsoids.joint.weights[at].flatten(1).amin(1)
                moved_B = product(self.ellipsoids.rounding.sizes[at].square(), size_B)
                rounded_B = product(hessians[at].bilinear_rounding, moved_B) / weight_B
                own_B = own_B + rounded_B * OUT + 8 * U * seen.sources[at]
                bent_B = torch.hypot(bent_B, seen.sources[at])
        return halves

    def _half(self, at: int, forms: Forms, seen: Seen, own_B: Tensor, bent_B: Tensor) -> Tensor:
        """Return |K|_F / 2 of the functionals of a leaf.

        torch pushes exactly some other u to the leaves with a Hessian, whose distance from u is a share of its length.
        """
        share_B = self.ellipsoids.rounding.share(max(k for k in self.ellipsoids.hessians if k < at))
        moved_B = self.count**0.5 * 4 * product(share_B, seen.length_B.square())
        least = least_product_sum(self.count, 2, PROBE_FAILURE / entries(seen.squares)) ** 0.5
        sure = broadcast_batch(least - moved_B, seen.squares[at].shape[1:])
        length = self.ellipsoids.lengths_of[at]
        off = product(length, broadcast_batch(own_B, length.shape[1:])) + away(self.ellipsoids, forms, at, bent_B)
        return OUT * 0.5 * norm_of_squares(seen.squares[at], self.count, off, sure)
