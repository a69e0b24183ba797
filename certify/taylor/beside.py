"""The share of leaves without units, and of errors, in the loss of one rival.

In the letters of curved.py, with C of either sign and |C| >= C, these are the products <A_l G, C o_l> of the image with
what other leaves and errors add, and the <b_l, |C| b_l> of leaves without units. A product is at most |G| / E times the
length of what moves o, times the norm of a block of sum_l M_l^T C M_l. Of b the second and third orders of units are
known (triples.py), so that only the rest is a free vector of its length. Proof: docs/proofs.md#taylor.

Letters: B images.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from certify.ellipsoids.ellipsoid import Grown, Margins
from certify.reaches.aside import Free, free_length2
from certify.reaches.pairs import Bent
from certify.reaches.reaches import CloserEllipsoids
from certify.reaches.triples import Through
from certify.taylor.curved import Curved
from zoo.arithmetic import OUT, U, nan_to_inf, product


@dataclass(frozen=True)
class ToUnits:
    """The products <A_l G, C o_l> at units, up to the leaf `last`, at the largest e: (1, B) each.

    `whole` is the norm of the block between the image and what `leaves` without units and errors add, `errors` that for
    errors alone. `bent` is the product of the image with the second orders `of_leaves`.
    """

    whole: Tensor
    errors: Tensor
    bent: Tensor
    of_leaves: Bent
    leaves: tuple[int, ...]
    last: int

    @staticmethod
    def of(ellipsoids: CloserEllipsoids, margins: Margins, curved: Curved) -> "ToUnits":
        numbers, within = [curved.numbers], margins.norm.square()
        units = {at: of_leaf.with_more() for at, of_leaf in curved.units.items()}
        leaves, last = ellipsoids.without_units(max(units)), max(units)
        whole = ellipsoids.across(units, leaves, "to units", numbers, within)
        bent = ellipsoids.bent_with_image(curved.units, within, curved.numbers)
        wanted = bool(bent.isfinite().any())
        errors = ellipsoids.across(units, (), "errors to units", numbers, within) if wanted else whole
        return ToUnits(whole, errors, bent, ellipsoids.bent, leaves, last)

    def at(self, grown: Grown) -> Tensor:
        errors_B = grown.theta_0[self.last]
        together = product(self.whole, sum((grown.theta[k] for k in self.leaves), errors_B).sqrt())
        third_B = free_length2(self.leaves, grown, errors_B)
        apart = product(self.whole, third_B.sqrt()) + product(self.errors, errors_B.sqrt())
        if self.last in self.of_leaves.halves:
            apart = apart + product(self.bent, self.of_leaves.theta(self.last, grown))
        return torch.fmin(together, nan_to_inf(apart))


@dataclass(frozen=True)
class AtOthers:
    """The share of leaves without units, up to the leaf `last`, at the largest e: (1, B) each.

    `across` is the norm of the block between the image and what `leaves` without units and errors add. `free` and
    `through` are (sum <b, |C| b>)^(1/2) for sources that are not the image, and for the second and third orders of
    units.
    """

    across: Tensor
    free: Free
    through: Through
    units: tuple[int, ...]
    leaves: tuple[int, ...]
    last: int

    @staticmethod
    def of(ellipsoids: CloserEllipsoids, margins: Margins, curved: Curved) -> "AtOthers | None":
        if not curved.others:
            return None
        last, within = max(curved.others), margins.norm.square()
        leaves, absolute = ellipsoids.without_units(last), {at: margins.forms[at] for at in curved.others}
        across = ellipsoids.across(curved.others, leaves, "to others", [curved.numbers], within)
        through = ellipsoids.through(absolute, within)
        sources = ellipsoids.joint.sources(last)
        free = Free.of(ellipsoids, absolute, sources, ("others", "errors at others"), curved.numbers)
        units = tuple(k for k in sources if k not in leaves)
        return AtOthers(across, free, through, units, leaves, last)

    def at(self, t_B: Tensor, grown: Grown) -> Tensor:
        """Return the loss for t = e / E."""
        whole_B, errors_B = grown.before[self.last], grown.theta_0[self.last]
        of_leaves_B = sum((grown.theta[k] for k in self.leaves), torch.zeros_like(errors_B))
        not_image_B = (whole_B - t_B.square()).clamp_min(0) + 8 * U * whole_B
        beyond_B = free_length2(self.units, grown, errors_B) + of_leaves_B
        orders = product(self.through.second, t_B.square()) + product(self.through.third, t_B**3)
        square = nan_to_inf(orders + self.free.at(beyond_B, errors_B)).square()
        square = torch.fmin(product(self.free.whole.square(), not_image_B), square)
        return product(self.across, t_B * (of_leaves_B + errors_B).sqrt()) + 0.5 * square


@dataclass(frozen=True)
class Beside:
    """The loss that leaves without units, and errors, add for one rival."""

    to_units: ToUnits
    at_others: AtOthers | None
    most_B: Tensor

    @staticmethod
    def of(ellipsoids: CloserEllipsoids, margins: Margins, curved: Curved) -> "Beside":
        parts = ToUnits.of(ellipsoids, margins, curved), AtOthers.of(ellipsoids, margins, curved)
        return Beside(*parts, ellipsoids.joint.most_B)

    def at(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the loss (1, B)."""
        t_B = e_B / self.most_B
        found = product(self.to_units.at(grown), t_B)
        if self.at_others is not None:
            found = found + self.at_others.at(t_B, grown)
        return nan_to_inf(found * OUT)
