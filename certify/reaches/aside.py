"""The effect of leaves without units, and of errors, on units behind them.

Let C >= 0 be diagonal in some units, and o what such leaves and errors add to the units. A leaf k with a Hessian adds
its second order, <u, K_h u> / 2 for unit h (bent.py), and R_3, of which only the length is known. Of all others only
the length is known. So for lengths |R_3 / W|^2 <= theta'_k, theta'_k = theta_k of the others, and M_0 the part of M
that errors enter,

    |C^(1/2) o|  <=  |C^(1/2) M| (sum_k theta'_k)^(1/2) + |C^(1/2) M_0| theta_0^(1/2)
                     + max { (sum_h C_h <u, K_h u>^2)^(1/2) / 2 : |u| = 1 } Theta,

and without the last term where theta'_k = theta_k for all of them.

Proof: docs/proofs.md#bent.

Letters: B images.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certify.ellipsoids.ellipsoid import Before, Ellipsoids, Grown
from certify.ellipsoids.measured import COARSE
from certify.reaches.bent import BentEllipsoids
from certify.reaches.forms import units_at
from certify.reaches.pairs import Bent
from zoo.arithmetic import OUT, nan_to_inf, product
from zoo.bounds.contracts import QuadraticForm


@dataclass(frozen=True)
class Free:
    """The largest (sum <H, C H>)^(1/2) for sources of length 1, and for errors alone: (1, B) each."""

    whole: Tensor
    errors: Tensor

    @staticmethod
    def of(
        ellipsoids: Ellipsoids,
        forms: Mapping[int, QuadraticForm],
        sources: Collection[int],
        words: tuple[str, str],
        numbers: Tensor,
    ) -> "Free":
        """Return it for some leaves as sources, with errors always one of them. Seeds: words, and numbers (B, n)."""
        last = max(forms)

        def norm(some: Collection[int], word: str) -> Tensor:
            scale = ellipsoids.joint.only(some, last, forms[last].largest)
            return ellipsoids.seminorms(forms, word, [numbers], COARSE, scale)

        errors = norm((), words[1])
        return Free(norm(sources, words[0]) if sources else errors, errors)

    def at(self, added_B: Tensor, errors_B: Tensor) -> Tensor:
        """Bound the effect of sources and errors of these square lengths: (1, B)."""
        apart = product(self.whole, added_B.sqrt()) + product(self.errors, errors_B.sqrt())
        return torch.fmin(apart, product(self.whole, (added_B + errors_B).sqrt()))

    def times(self, size: Tensor) -> "Free":
        """Return it for size^2 C, with sizes (1, B)."""
        return Free(product(size, self.whole), product(size, self.errors))


@dataclass(frozen=True)
class Aside:
    """The bound of |C^(1/2) o|, (1, B): what it is for free sources, and for the second order at Theta = 1.

    `leaves` are those without units, and `last` is the last leaf with a coefficient.
    """

    free: Free
    half: Tensor
    leaves: tuple[int, ...]
    last: int
    bent: Bent

    def at(self, grown: Grown | Before) -> Tensor:
        errors_B = grown.theta_0[self.last]
        whole = self.free.at(sum((grown.theta[k] for k in self.leaves), torch.zeros_like(errors_B)), errors_B)
        if self.last not in self.bent.halves:
            return nan_to_inf(whole * OUT)
        beyond = self.free.at(free_length2(self.leaves, grown, errors_B), errors_B)
        apart = beyond + product(self.half, self.bent.theta(self.last, grown))
        return nan_to_inf(torch.fmin(nan_to_inf(apart), whole) * OUT)

    def times(self, size: Tensor) -> "Aside":
        """Return the bound for size^2 C, with sizes (1, B)."""
        return replace(self, free=self.free.times(size), half=product(size, self.half))


def free_length2(leaves: Collection[int], grown: Grown | Before, like_B: Tensor) -> Tensor:
    """Return the square of the length of what these leaves add beyond their known orders: (B,).

    Not even where the whole remainder is shorter does it take this one's place: the orders of all leaves together may
    cancel, so that they bound those of the others only together with this leaf's.
    """
    return sum((grown.third.get(k, grown.theta[k]) for k in leaves), torch.zeros_like(like_B))


def aside(ellipsoids: BentEllipsoids, c: Mapping[int, Tensor], word: str, numbers: Tensor) -> Aside:
    """Return the bound for coefficients c (1, B, N, H) >= 0 of units; numbers (B, n) are seeds."""
    last, bent = max(c), ellipsoids.bent
    forms = {at: units_at(ellipsoids.tape, at).weighted(of_leaf) for at, of_leaf in c.items()}
    leaves = ellipsoids.without_units(last)
    free = Free.of(ellipsoids, forms, leaves, (word, f"{word}, errors"), numbers)
    return Aside(free, ellipsoids.bent_together(c, f"{word}, bent", numbers), leaves, last, bent)
