"""The second order of the margins of rivals: what remainders of leaves with forms can cost of them.

The input of leaf l changes by A_l G + b_l. With its form C of either sign and its absolute one |C|
(docs/proofs.md#third-order),

    <H, C H>  <=  <A_l G, C A_l G> + 2 <A_l G, C b_l> + <b_l, |C| b_l>.

Let b = p + o, p of the remainders of earlier units and o of all others. cross.py bounds the sum of the products with p
by forms x d^2 of those earlier units, and propagated.py the sum of the c' b^2 of units. Proof: docs/proofs.md#taylor.

Letters: B images, C rivals of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from certify.ellipsoids.ellipsoid import Ellipsoids, Margins
from certify.reaches.bent import BentEllipsoids
from certify.reaches.forms import Curvature, smooth_leaves
from certify.reaches.propagated import Propagated
from certify.taylor.cross import crossed
from zoo.arithmetic import product
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.tape import Vectors

APART = (0.05, 0.5)  # tau of the forms x d^2, at the first units, which only errors and attention move, and behind


@dataclass(frozen=True)
class Curved:
    """The second order of the margin of one rival.

    It has the c' of units, the coefficients x of their cross terms, the forms C of leaves without units, and seeds.
    """

    units: Mapping[int, Curvature]
    crosses: Vectors
    others: Mapping[int, QuadraticForm]
    numbers: Tensor

    @staticmethod
    def of(ellipsoids: BentEllipsoids, rivals: Sequence[tuple[Margins, Vectors]]) -> list["Curved"]:
        """Return it for margins with their gradients at the leaves."""
        units, within = zip(*((units_of(ellipsoids, *one), one[0].norm.square()) for one in rivals), strict=True)
        others = [
            {at: signed_form(ellipsoids, at, g[at]) for at in margins.forms if at not in of_one}
            for of_one, (margins, g) in zip(units, rivals, strict=True)
        ]
        off = [
            rounded(ellipsoids, {at: of_leaf.absolute for at, of_leaf in of_one.items()} | of_others, most)
            for of_one, of_others, most in zip(units, others, within, strict=True)
        ]
        crosses = crossed(ellipsoids, units, others, torch.cat(off))
        numbers = [number for margins, _ in rivals for number in margins.numbers]
        return [Curved(*parts) for parts in zip(units, crosses, others, numbers, strict=True)]

    @property
    def squares(self) -> dict[int, Tensor]:
        """The coefficients (1, B, N, H) of the b^2 of units."""
        found = {at: of_leaf.c.clamp_min(0) for at, of_leaf in self.units.items()}
        return found | {at: found[at] + (1 + 1 / apart) * x for at, (x, apart) in self.apart.items()}

    def more(self, propagated: Propagated, most: Tensor) -> Vectors:
        """Return the coefficients on the image of cross terms, and of the b^2 of units."""
        crosses = {at: (1 + apart) * x for at, (x, apart) in self.apart.items()}
        z = propagated.times(most).z
        assert z.keys() <= self.units.keys()
        return {at: torch.stack([of[at] for of in (crosses, z) if at in of]).sum(0) for at in crosses | z}

    @property
    def apart(self) -> dict[int, tuple[Tensor, float]]:
        """The coefficients x of every leaf with the share by which their part of the image grows."""
        return {at: (x, APART[at > min(self.crosses)]) for at, x in self.crosses.items()}


def units_of(ellipsoids: Ellipsoids, margins: Margins, g: Vectors) -> dict[int, Curvature]:
    found = dict[int, Curvature]()
    for at, forms in smooth_leaves(ellipsoids.tape).items():
        reach = ellipsoids.rests[at].reach
        if at in margins.forms and reach is not None:
            found[at] = Curvature.of(forms, g[at], reach)
    return found


def signed_forms(curved: Curved, more: Vectors) -> dict[int, QuadraticForm]:
    """Return C of all leaves, with more on units."""
    return {**curved.others, **{at: of_leaf.with_more(more.get(at)) for at, of_leaf in curved.units.items()}}


def signed_form(ellipsoids: Ellipsoids, at: int, g: Tensor) -> QuadraticForm:
    """Return C of a leaf without units."""
    forms, reach = ellipsoids.tape.leaves[at].forms, ellipsoids.rests[at].reach
    assert forms is not None
    assert reach is not None
    return forms.signed(g, reach).form


def rounded(ellipsoids: Ellipsoids, forms: Mapping[int, QuadraticForm], most: Tensor) -> Tensor:
    """Bound the error of torch's S b for |b| = 1, ||S|| <= most: (1, B)."""
    of_forms = [ellipsoids.rounding.of_form(at, form) for at, form in forms.items()]
    share = ellipsoids.rounding.share(max(forms)) + 1e-10  # plus the rounding of <b, z> itself
    return product(share, most) + torch.stack(torch.broadcast_tensors(*of_forms)).sum(0)
