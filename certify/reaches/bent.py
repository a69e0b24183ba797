"""The second order of leaves with a Hessian, such as attention: what it adds to functionals of later leaves.

Such a leaf sees H = M u, and its remainder is D^2 f[H, H] / 2 + R_3(H). So a functional of a later leaf changes by
<u, K u> / 2 and what R_3 adds, K the sum of what the Hessians of all earlier leaves do to it, and

    |<u, K u>| / 2  <=  |K|_F Theta / 2,

Theta before the last of them. pairs.py measures all |K|_F. Proof: docs/proofs.md#bent.

Letters: B images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certify.ellipsoids.columns import Columns
from certify.ellipsoids.ellipsoid import Before, Ellipsoids, Known, Off, Rest
from certify.ellipsoids.joint import Joint, Sizes
from certify.ellipsoids.measured import Draw
from certify.reaches.forms import Curvature, units_at
from certify.reaches.pairs import Bent, Pairs
from zoo.arithmetic import OUT, nan_to_inf, product
from zoo.bounds.contracts import Forms, Hessian
from zoo.bounds.elementwise import smooth_units
from zoo.bounds.tape import Vectors

COUNTS = 0.01  # theta of a leaf with a Hessian from which on its second order is worth its time


@dataclass(frozen=True)
class ThirdNorm:
    """The bound of |R_3 / W| of a leaf at the largest e, for Theta = 1, and Theta there."""

    norm_B: Tensor
    total_B: Tensor


class BentEllipsoids(Ellipsoids):
    """The ellipsoids of all leaves, with the second order of leaves that have a Hessian."""

    def __init__(self, joint: Joint, draw: Draw, known: Known, off: Off, first: Columns | None) -> None:
        self._thirds_of_hessians, self._seconds_of_hessians = dict[int, ThirdNorm](), Sizes()
        self._counts_B = torch.zeros_like(joint.most_B, dtype=torch.bool)
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
        if not self.hessians:
            return Bent(Vectors(), Vectors())
        return self._pairs("bent", self.most_B[:, None], 2).bent(self.formed)

    def bent_together(self, c: Mapping[int, Tensor], word: str, numbers: Tensor) -> Tensor:
        """Bound (sum_h c_h <u, K_h u>^2)^(1/2) / 2 for |u| = 1 and coefficients c (1, B, N, H) >= 0 of units: (1, B).

        It takes pairs of its own, as c may depend on earlier ones; numbers (B, n) are their seeds.
        """
        behind = {at: of_leaf for at, of_leaf in c.items() if at in self.bent.halves}
        square_B = torch.zeros_like(self.most_B)
        for at, of_leaf in behind.items():
            square_B = square_B + product(of_leaf[0], self.bent.halves[at].square()).flatten(1).sum(1)
        one_by_one_B = (OUT * square_B).sqrt()
        if not behind or not bool(self._counts_B.any()):
            return one_by_one_B[None]
        together_B = self._pairs(word, numbers, 2).together({at: units_at(self.tape, at) for at in behind}, behind)
        return torch.where(self._counts_B, torch.fmin(together_B, one_by_one_B), one_by_one_B)[None]

    def bent_with_image(self, units: Mapping[int, Curvature], within: Tensor, numbers: Tensor) -> Tensor:
        """Bound sum_h c'_h <a_h, A_h G> <u, K_h u> / 2 for |G| = E, |u| = 1 and the c' of a rival: (1, B).

        `within` (1, B) is never below the norm of sum_l M_l^T |C_l| M_l, and numbers (B, n) are seeds. It is infinite
        where second orders hardly count.
        """
        if not self.bent.halves.keys() & units.keys() or not bool(self._counts_B.any()):
            return torch.full_like(within, torch.inf)
        return torch.where(self._counts_B, self._pairs("with image", numbers, 2).with_image(units, within), torch.inf)

    def _pairs(self, word: str, numbers: Tensor, share: int, only: int | None = None) -> Pairs:
        """Return one pair for every `share` vectors that bound reaches."""
        hessians = self.hessians if only is None else {only: self.hessians[only]}
        return Pairs(self, hessians, self.budget.probes // share, word, numbers)

    def _rest(self, at: int, known: Before) -> Rest:
        rest = super()._rest(at, known)
        if at in self.hessians and rest.reach is not None:
            form = self.hessians[at].of_third(rest.reach, self._rows(at, known), 1 / self.joint.weights[at])
            norm = self.seminorms({at: form}, f"third of {at}", [self.most_B[:, None]], self.budget.close)
            self._thirds_of_hessians[at] = ThirdNorm(norm[0], known.total_B)
            self._seconds_of_hessians[at] = self._second(at, product(rest.norm_B.square(), known.total_B) > COUNTS)
        return rest

    def _second(self, at: int, counts_B: Tensor) -> Tensor:
        """Bound |D^2 f[M u, M u] / W| / 2 of a leaf for |u| = 1; infinite where it hardly counts: (B,)."""
        self._counts_B = self._counts_B | counts_B
        if not bool(counts_B.any()):
            return torch.full_like(self.most_B, torch.inf)
        found_B = self._pairs(f"second of {at}", self.most_B[:, None], 2, at).of_leaf()
        return torch.where(counts_B, found_B, torch.inf)

    def _theta(self, at: int, known: Before) -> Tensor:
        theta_B, reach = super()._theta(at, known), self.rests[at].reach
        if at in self._thirds_of_hessians and reach is not None:
            third, now = self._thirds_of_hessians[at], self._reach(at, known)
            of_reach_B = torch.where(now > 0, now / reach, 0.0).nan_to_num(1.0).flatten(1).amax(1)
            share_B = torch.maximum(of_reach_B, (known.total_B / third.total_B).sqrt()).clamp_max(1)
            third_B = nan_to_inf(product(third.norm_B.square(), known.total_B)) * OUT
            known.third[at] = product(self.hessians[at].shrink_third(share_B), third_B)
            second_B = product(self._seconds_of_hessians[at], known.total_B)
            theta_B = torch.fmin(theta_B, nan_to_inf((second_B + known.third[at].sqrt()).square() * OUT))
        return theta_B

    def _rows(self, at: int, known: Before) -> Tensor:
        """Return the reaches of the lengths |L_r H| (B, R)."""
        return product(self.bent.rows[at], known.total_B.sqrt()[:, None]) * OUT
