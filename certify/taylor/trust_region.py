"""The largest loss of a margin to first order, second order and remainders together.

The input of leaf l changes by A_l G + b_l. With its form C of either sign and its absolute one |C|
(docs/proofs.md#third-order),

    <H, C H>  <=  <A_l G, C A_l G> + 2 <A_l G, C b_l> + <b_l, |C| b_l>.

Let b = p + o, p of the remainders of earlier units and o of all others. cross.py bounds the sum of the products with p
by forms x d^2 of those earlier units, and propagated.py the sum of the c' b^2 of units. All other products are at
most |G| / E times the length of what moves b, times the norm of a block of sum_l M_l^T C M_l. What is left is a
trust region problem on the image: for the sum S of all (E A_l)^T C E A_l, b = -E g_0, t = e / E, and every m above
lambda_max(S),

    max { <b, u> + <u, S u> / 2 : |u| <= t }  <=  ( m t^2 + <b, (m - S)^-1 b> ) / 2.

S tends to minus the Hessian of the margin as e shrinks. Proof: docs/proofs.md#taylor.

Letters: B images.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from certify.image.ellipsoid import Grown, Margins
from certify.image.joint import IMAGE
from certify.image.measured import COARSE
from certify.taylor.aside import free_length2
from certify.taylor.bent import BentEllipsoids
from certify.taylor.cross import crossed
from certify.taylor.forms import Curvature, smooth_leaves, units_at
from certify.taylor.pairs import Bent
from certify.taylor.propagated import Propagated
from zoo.arithmetic import OUT, U, nan_to_inf, product
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.tape import Vectors

SPARE = (0.01, 0.05, 0.2, 0.5)  # tried multiples of lambda_max above it
STEEP = (1.0, 1.05, 1.15, 1.3, 1.6)  # m in units of |b| / t
APART = (0.05, 0.5)  # tau of the forms x d^2, at the first units, which only errors and attention move, and behind


@dataclass(frozen=True)
class Curved:
    """The second order of the margin of one rival.

    It has the c' of units, the coefficients x of their cross terms, the bound of their products with second orders
    (pairs.py), the forms C of leaves without units, and seeds.
    """

    units: Mapping[int, Curvature]
    crosses: Vectors
    bent: Tensor
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
            _rounded(ellipsoids, {at: of_leaf.absolute for at, of_leaf in of_one.items()} | of_others, most)
            for of_one, of_others, most in zip(units, others, within, strict=True)
        ]
        crosses = crossed(ellipsoids, units, others, torch.cat(off))
        bent = ellipsoids.bent_with_image(units, torch.cat(within)).split(1)
        numbers = [number for margins, _ in rivals for number in margins.numbers]
        return [Curved(*parts) for parts in zip(units, crosses, bent, others, numbers, strict=True)]

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


@dataclass(frozen=True)
class Beside:
    """The share of leaves without units, and of errors, in the loss of one rival, at the largest e: (1, B) each.

    `to_units` and `to_others` are the norms of the blocks between the image and what leaves `apart` and errors do to
    units, up to the leaf `behind`, and leaves `apart_of_others` and errors to other leaves, up to `last`; `errors` is
    that of errors alone and units. `bent` is the product of the image with second orders, and `of_bent` those of all
    units. `others` is the norm of the forms of other leaves for what is not the image.
    """

    to_units: Tensor
    errors: Tensor
    bent: Tensor
    of_bent: Bent
    apart: tuple[int, ...]
    behind: int
    to_others: Tensor
    others: Tensor
    apart_of_others: tuple[int, ...]
    last: int | None
    most_B: Tensor

    @staticmethod
    def of(ellipsoids: BentEllipsoids, margins: Margins, curved: Curved) -> "Beside":
        joint, numbers, within = ellipsoids.joint, [curved.numbers], margins.norm.square()
        units = {at: of_leaf.with_more() for at, of_leaf in curved.units.items()}
        apart, behind = ellipsoids.without_units(max(units)), max(units)
        to_units = ellipsoids.across(units, apart, "to units", numbers, within)
        wanted = bool(curved.bent.isfinite().any())
        errors = ellipsoids.across(units, (), "errors to units", numbers, within) if wanted else to_units
        known = (to_units, errors, curved.bent, ellipsoids.bent, apart, behind)
        if not curved.others:
            zero = torch.zeros_like(to_units)
            return Beside(*known, zero, zero, (), None, joint.most_B)
        last = max(curved.others)
        apart_of_others = ellipsoids.without_units(last)
        to_others = ellipsoids.across(curved.others, apart_of_others, "to others", numbers, within)
        others = free(ellipsoids, {at: margins.forms[at] for at in curved.others}, "others", curved.numbers)
        return Beside(*known, to_others, others, apart_of_others, last, joint.most_B)

    def at(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the loss (1, B)."""
        t_B = e_B / self.most_B
        found = product(self._of_units(grown), t_B)
        if self.last is not None:
            whole_B = grown.before[self.last]
            free_B = (whole_B - t_B.square()).clamp_min(0) + 8 * U * whole_B
            apart_B = sum((grown.theta[k] for k in self.apart_of_others), grown.theta_0[self.last])
            found = found + product(self.to_others, t_B * apart_B.sqrt()) + 0.5 * product(self.others.square(), free_B)
        return nan_to_inf(found * OUT)

    def _of_units(self, grown: Grown) -> Tensor:
        """Return the product of the image and of what moves units, at the largest e of the image."""
        errors_B = grown.theta_0[self.behind]
        together = product(self.to_units, sum((grown.theta[k] for k in self.apart), errors_B).sqrt())
        third_B = free_length2(self.apart, grown, errors_B)
        apart = product(self.to_units, third_B.sqrt()) + product(self.errors, errors_B.sqrt())
        if self.behind in self.of_bent.halves:
            apart = apart + product(self.bent, self.of_bent.theta(self.behind, grown))
        return torch.fmin(together, nan_to_inf(apart))


def free(ellipsoids: BentEllipsoids, forms: Mapping[int, QuadraticForm], word: str, numbers: Tensor) -> Tensor:
    """Return the largest (sum <H, C H>)^(1/2) for sources of length 1 other than the image: (1, B)."""
    last = max(forms)
    scale = ellipsoids.joint.only(ellipsoids.joint.sources(last), last, forms[last].largest)
    return ellipsoids.seminorms(forms, word, [numbers], COARSE, scale)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one rival at the largest e, (1, B) each.

    `first` is the loss to first order alone, `length` |b|, `along` <b, S b>, `pulled` |S b| and `top` lambda_max(S),
    with rounding included. `propagated` bounds the root of the sum of the b^2 of units, and `most` is this bound at the
    largest e.
    """

    first: Tensor
    length: Tensor
    along: Tensor
    pulled: Tensor
    top: Tensor
    beside: Beside
    propagated: Propagated
    most: Tensor
    most_B: Tensor

    def cost(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the bound of the loss to first order and forms together, for e <= the largest: (1, B)."""
        of_units = nan_to_inf(0.5 * product(self.most, self.propagated.aside(grown)))
        return nan_to_inf(OUT * (self.quadratic(e_B) + of_units + self.beside.at(e_B, grown)))

    def quadratic(self, e_B: Tensor) -> Tensor:
        """Return the part of the cost from the trust region problem: (1, B)."""
        t_B = e_B / self.most_B
        return torch.stack([self._quadratic(t_B, *factors) for factors in itertools.product(SPARE, STEEP)]).amin(0)

    def _quadratic(self, t_B: Tensor, spare: float, steep: float) -> Tensor:
        m = torch.maximum(self.top * (1 + spare), steep * self.length / t_B.clamp_min(1e-100))
        inverse = self.length.square() / m + (self.along + self.pulled.square() / (m - self.top)) / m.square()
        first = self.first * t_B
        traded = (first / inverse.clamp_min(1e-300)).clamp(max=1)  # every share is sound; this one gives the least sum
        return nan_to_inf(first * (1 - traded) + (traded.square() * inverse + m * t_B.square()) / 2)


def terms_of(
    ellipsoids: BentEllipsoids,
    margins: Margins,
    g_0: Tensor,
    first: Tensor,
    curved: Curved,
    beside: Beside,
    behind: Propagated,
) -> Terms:
    """Return the terms for margins with gradients g_0 (1, B, *x) at the image.

    Some leaf has hidden units of a twice differentiable activation. `behind` is the bound for the coefficients
    `curved.squares`, or for larger ones.
    """
    joint, last, most = ellipsoids.joint, margins.last, behind.at(ellipsoids.joint.most_B, ellipsoids.most)
    b = F.pad(g_0.flatten(2) * joint.most_B[:, None], (0, joint.room(last) - g_0[0, 0].numel()))
    more = curved.more(behind, most)
    forms = signed_forms(curved, more)
    within = (margins.norm.square() + _norm_of(ellipsoids, more, curved.numbers)) * OUT
    z = joint.gram(forms)(b) * joint.part(IMAGE, last)
    length = torch.linalg.vector_norm(b, dim=-1)
    off = _rounded(ellipsoids, forms, within) * length
    return Terms(
        first=first * joint.most_B,
        length=length,
        along=(b * z).sum(-1) + off * length,
        pulled=torch.linalg.vector_norm(z, dim=-1) + off,
        top=ellipsoids.top(forms, "taylor", [curved.numbers], within).clamp_min(1e-100),
        beside=beside,
        propagated=behind,
        most=most,
        most_B=joint.most_B,
    )


def _norm_of(ellipsoids: BentEllipsoids, more: Vectors, numbers: Tensor) -> Tensor | float:
    """Bound the norm of the forms with coefficients `more` on all of u: (1, B)."""
    if not more:
        return 0.0
    forms = {at: units_at(ellipsoids.tape, at).weighted(of_leaf) for at, of_leaf in more.items()}
    return ellipsoids.seminorms(forms, "crosses", [numbers], COARSE).square()


def units_of(ellipsoids: BentEllipsoids, margins: Margins, g: Vectors) -> dict[int, Curvature]:
    found = dict[int, Curvature]()
    for at, forms in smooth_leaves(ellipsoids.tape).items():
        reach = ellipsoids.rests[at].reach
        if at in margins.forms and reach is not None:
            found[at] = Curvature.of(forms, g[at], reach)
    return found


def signed_forms(curved: Curved, more: Vectors) -> dict[int, QuadraticForm]:
    """Return C of all leaves, with more on units."""
    return {**curved.others, **{at: of_leaf.with_more(more.get(at)) for at, of_leaf in curved.units.items()}}


def signed_form(ellipsoids: BentEllipsoids, at: int, g: Tensor) -> QuadraticForm:
    """Return C of a leaf without units."""
    forms, reach = ellipsoids.tape.leaves[at].forms, ellipsoids.rests[at].reach
    assert forms is not None
    assert reach is not None
    return forms.signed(g, reach).form


def _rounded(ellipsoids: BentEllipsoids, forms: Mapping[int, QuadraticForm], most: Tensor) -> Tensor:
    """Bound the error of torch's S b for |b| = 1, ||S|| <= most: (1, B)."""
    of_forms = [ellipsoids.rounding.of_form(at, form) for at, form in forms.items()]
    share = ellipsoids.rounding.share(max(forms)) + 1e-10  # plus the rounding of <b, z> itself
    return product(share, most) + torch.stack(torch.broadcast_tensors(*of_forms)).sum(0)
