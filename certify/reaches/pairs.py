"""Pairs of Gaussian vectors u, u', and the effect of their second order on functionals of later leaves.

Leaves with a Hessian make D^2 f[M u, M u'] of a pair, which changes a functional by the <u, K u'> of bent.py. Here u is
of everything that moves the leaf, not of the image alone as in triples.py. Sums of squares bound all |K|_F. For many
units with coefficients c_h >= 0,

    sum_h c_h <u, K_h u>^2  <=  lambda |u|^4,

lambda the largest eigenvalue of the matrix of all (c_h c_k)^(1/2) <K_h, K_k>. Its trace, the sum of the c_h |K_h|_F^2,
is often ten times as large. Likewise the image and these leaves together change a margin by

    | sum_h c'_h (A_h G) <u, K_h u> / 2 |  <=  sigma |G| |u|^2 / 2

with the norm sigma of the map from all u u'^T to sum_h c'_h A_h <u, K_h u'>. Proof: docs/proofs.md#bent.

Letters: B images, M pairs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from certify.ellipsoids.budget import at_once
from certify.ellipsoids.ellipsoid import Before, Ellipsoids, Grown
from certify.ellipsoids.joint import Sizes
from certify.ellipsoids.measured import PROBE_FAILURE, norm_of_squares
from certify.reaches.forms import Curvature
from certify.reaches.triples import TOGETHER, away, entries, longest
from certify.shared.block_power import largest_eigenvalue
from certify.shared.quantiles import least_product_sum, least_square_sum
from zoo.arithmetic import OUT, U, broadcast_batch, gamma, product
from zoo.bounds.contracts import Forms, Hessian
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Vectors

Visit = Callable[[int, Tensor], None]


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


@dataclass
class Seen:
    """The largest lengths of u, and of what leaves with a Hessian add over their weights."""

    length_B: Tensor
    sources: Sizes = field(default_factory=Sizes)


@dataclass(frozen=True)
class Pairs:
    """So many pairs around the images of `ellipsoids`, seeded by a word and numbers (B, n)."""

    ellipsoids: Ellipsoids
    hessians: Mapping[int, Hessian]
    count: int
    word: str
    numbers: Tensor

    def bent(self, formed: Mapping[int, Forms]) -> Bent:
        """Return the bounds of all functionals of these leaves."""
        squares, grams = Vectors(), Vectors()

        def arrive(at: int, v: Tensor) -> None:
            rows = self.hessians[at].rows(v).movedim(0, -1)
            grams[at] = rows @ rows.mT + grams.get(at, 0.0)

        def visit(at: int, v: Tensor) -> None:
            if at in formed and at > min(self.hessians):
                squares[at] = formed[at].squares(v) + squares.get(at, 0.0)

        seen = self._push(arrive, visit, max(formed))
        self.ellipsoids.failure += 2 * PROBE_FAILURE
        least = least_product_sum(self.count, 2, PROBE_FAILURE / entries(squares)) ** 0.5
        halves = {at: self._half(at, formed[at], of_leaf, seen, least) for at, of_leaf in squares.items()}
        return Bent(halves, self._rows(grams, seen))

    def together(self, units: Mapping[int, UnitForms], c: Mapping[int, Tensor]) -> Tensor:
        """Bound lambda^(1/2) / 2 for coefficients c (1, B, N, H) of these units: (B,)."""
        values: dict[int, list[Tensor]] = {at: [] for at in c}

        def visit(at: int, v: Tensor) -> None:
            if at in c:
                values[at].append((units[at].units(v) * c[at].sqrt()).flatten(2))

        seen = self._push(lambda at, v: None, visit, max(c))
        self.ellipsoids.failure += PROBE_FAILURE
        pairs_BMH = torch.cat([torch.cat(of_leaf) for of_leaf in values.values()], -1).movedim(1, 0)
        off2 = [of_leaf[0] * self._off(at, units[at], seen).square() for at, of_leaf in c.items()]
        off_B = torch.stack([of_leaf.flatten(1).sum(1) for of_leaf in off2]).sum(0).sqrt()
        return self._half_norm(pairs_BMH, off_B, max(c), seen)

    def with_image(self, units: Mapping[int, Curvature], within: Tensor) -> Tensor:
        """Bound E sigma / 2 for the c' of a rival: (1, B).

        `within` (1, B) is never below the norm of sum_l M_l^T |C_l| M_l.
        """
        behind = {at: of_leaf for at, of_leaf in units.items() if at > min(self.hessians)}
        joint, last, d, pulled = self.ellipsoids.joint, max(behind), Vectors(), list[Tensor]()
        off_B = torch.zeros_like(within[0])

        def visit(at: int, v: Tensor) -> None:
            nonlocal off_B
            if at in behind:
                d[at] = behind[at].forms.units(v)
            if at == last:
                whole = joint.pull({k: of_leaf.pulled(d[k]) for k, of_leaf in behind.items()}, last)
                pulled.append(whole[..., : joint.images[0].numel()])
                off_B = torch.maximum(off_B, self._off_pull(behind, d, whole))

        seen = self._push(lambda at, v: None, visit, last)
        self.ellipsoids.failure += PROBE_FAILURE
        off2_B = torch.stack([self._off2(of_leaf, at, seen) for at, of_leaf in behind.items()]).sum(0)
        off = off_B + product(within, off2_B).sqrt()
        return self._half_norm(torch.cat(pulled).movedim(1, 0), off, last, seen)

    def _off_pull(self, units: Mapping[int, Curvature], d: Vectors, whole: Tensor) -> Tensor:
        """Bound the error of pulled vectors (M, B, n) for these changes of units: (B,)."""
        rounding = self.ellipsoids.rounding
        off_MB = product(rounding.share(max(d)), torch.linalg.vector_norm(whole, dim=-1))
        for at, of_leaf in d.items():
            forms, length_MB = units[at].forms, torch.linalg.vector_norm((units[at].c * of_leaf).flatten(2), dim=-1)
            off_MB = off_MB + product(gamma(forms.terms + 8) * forms.absolute * length_MB, rounding.sizes[at])
        return OUT * off_MB.amax(0)

    def _off2(self, units: Curvature, at: int, seen: Seen) -> Tensor:
        """Return sum_h |c'_h| o_h^2 for the errors o of the <u, K u'> of a leaf: (B,)."""
        return (units.c[0].abs() * self._off(at, units.forms, seen).square()).flatten(1).sum(1)

    def of_leaf(self) -> Tensor:
        """Bound |D^2 f[M u, M u] / W| / 2 for |u| = 1 and the only leaf with a Hessian here: (B,)."""
        (at,) = self.hessians
        joint, seen, found = self.ellipsoids.joint, Seen(torch.zeros_like(self.ellipsoids.most_B)), list[Tensor]()

        def arrive(k: int, v: Tensor) -> None:
            if k == at:
                r = self.hessians[at].bilinear(*v.chunk(2)) / joint.weights[at]
                longest(seen.sources, at, r)
                found.append(r.flatten(2))

        for u in self._drawn(seen):
            joint.push(u, arrive, at)
        self.ellipsoids.failure += PROBE_FAILURE
        pairs_BMN = torch.cat(found).movedim(1, 0)
        return self._half_norm(pairs_BMN, self._own(at, seen), at, seen)

    def _half_norm(self, pairs: Tensor, off: Tensor, at: int, seen: Seen) -> Tensor:
        """Bound lambda^(1/2) / 2 from what all pairs make at a leaf, (..., B, M, n), off by at most `off` (..., B)."""
        squares = largest_eigenvalue(pairs @ pairs.mT)
        sure_B = least_product_sum(self.count, 2, PROBE_FAILURE) ** 0.5 - self._moved(at, seen)
        return OUT * 0.5 * norm_of_squares(squares, self.count, off, sure_B)

    def _push(self, arrive: Visit, visit: Visit, last: int) -> Seen:
        """Call `arrive` with all u at leaves with a Hessian, and `visit` with what these make of all pairs."""
        seen = Seen(torch.zeros_like(self.ellipsoids.most_B))
        for u in self._drawn(seen):
            self._push_some(u, arrive, visit, last, seen)
        return seen

    def _drawn(self, seen: Seen) -> Iterator[Tensor]:
        """Draw the first and then the second vectors of some pairs at a time."""
        joint = self.ellipsoids.joint
        room = joint.room(max(self.hessians))
        fit = at_once(joint.most_B.numel() * room, 2)
        for start in range(0, self.count, TOGETHER):
            rooms = torch.Size([2 * min(TOGETHER, self.count - start), room])
            u = self.ellipsoids.draw(rooms, f"{self.word} {start}", self.numbers).movedim(1, 0)
            seen.length_B = torch.maximum(seen.length_B, torch.linalg.vector_norm(u, dim=-1).amax(0))
            for x, y in zip(*(half.split(fit) for half in u.chunk(2)), strict=True):
                yield torch.cat([x, y])

    def _push_some(self, u: Tensor, arrive: Visit, visit: Visit, last: int, seen: Seen) -> None:
        joint, moved = self.ellipsoids.joint, Vectors()

        def to_hessians(at: int, v: Tensor) -> None:
            if at in self.hessians:
                moved[at] = v
                arrive(at, v)

        def behind(at: int, v: Tensor) -> Tensor | None:
            visit(at, v)
            if at not in self.hessians:
                return None
            r = self.hessians[at].bilinear(*moved[at].chunk(2))
            longest(seen.sources, at, r / joint.weights[at])
            return r

        joint.push(u, to_hessians, max(self.hessians))
        joint.tape.push(u.new_zeros(len(u) // 2, *joint.images.shape), behind, last)

    def _rows(self, grams: Vectors, seen: Seen) -> Vectors:
        """Return the norms of all L_r M (B, R).

        Along the top left singular vector of L_r M, of norm x, the sum of squares over vectors u is x^2 times chi^2.
        """
        rounding, number = self.ellipsoids.rounding, sum(of_leaf.shape[1] for of_leaf in grams.values())
        least, rows = least_square_sum(2 * self.count, PROBE_FAILURE / number) ** 0.5, Vectors()
        for at, of_leaf in grams.items():
            moved_B = (8 * self.count) ** 0.5 * product(rounding.share(at), seen.length_B)
            off_B = product(self.hessians[at].rows_rounding, 2 * product(rounding.sizes[at], seen.length_B))
            squares, sure = largest_eigenvalue(of_leaf), (least - moved_B)[:, None]
            rows[at] = OUT * norm_of_squares(squares, 2 * self.count, off_B[:, None], sure)
        return rows

    def _half(self, at: int, forms: Forms, squares: Tensor, seen: Seen, least: float) -> Tensor:
        """Return |K|_F / 2 of the functionals of a leaf."""
        sure = broadcast_batch(least - self._moved(at, seen), squares.shape[1:])
        return OUT * 0.5 * norm_of_squares(squares, self.count, self._off(at, forms, seen), sure)

    def _moved(self, at: int, seen: Seen) -> Tensor:
        """Bound how far all <u, K u'> are moved together, relative to |K|_F, as torch pushes slightly other u: (B,)."""
        share_B = self.ellipsoids.rounding.share(max(k for k in self.hessians if k <= at))
        return self.count**0.5 * 4 * product(share_B, seen.length_B.square())

    def _off(self, at: int, forms: Forms, seen: Seen) -> Tensor:
        """Bound the error of the <u, K u'> of a leaf beside that, of the sources and of the second push: (B, ...)."""
        length = self.ellipsoids.lengths_of[at]
        own_B, bent_B = torch.zeros_like(seen.length_B), torch.zeros_like(seen.length_B)
        for k in (k for k in self.hessians if k < at):
            own_B = own_B + self._own(k, seen)
            bent_B = torch.hypot(bent_B, seen.sources[k])
        return product(length, broadcast_batch(own_B, length.shape[1:])) + away(self.ellipsoids, forms, at, bent_B)

    def _own(self, at: int, seen: Seen) -> Tensor:
        """Bound the error of D^2 f[M u, M u'] / W of a leaf: (B,)."""
        moved_B = product(self.ellipsoids.rounding.sizes[at].square(), seen.length_B.square())
        rounded_B = product(self.hessians[at].bilinear_rounding, moved_B)
        return rounded_B / self.ellipsoids.joint.weights[at].flatten(1).amin(1) * OUT + 8 * U * seen.sources[at]
