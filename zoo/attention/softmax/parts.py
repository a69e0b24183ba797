"""Attention as a chain of leaves, for code that measures vectors on their way through a model (zoo/bounds/tape.py).

    X  ->  (q^, k^, v^)  ->  (q, k, v)  ->  softmax(scores) V  ->  Y

The first and the last step are linear; the second is what a variant does to its projections, if anything. It is one
leaf with the first (projected_forms.py). The third is the core, which has quadratic forms: theory/forms.py. Proof:
docs/proofs.md#attention-forms.

Letters: B images, C vectors of each, H heads, N tokens, O width of a head; 3 stands for q, k, v.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zoo.attention.theory.core import Core
from zoo.attention.theory.forms import CoreForms
from zoo.attention.theory.score_errors import FLOOR, SHARE, Inexact
from zoo.attention.theory.score_range import ScoreRange
from zoo.attention.theory.score_rounding import Moduli, terms_rounding
from zoo.attention.theory.squares import QKV, Squares, absolutely, applied, largest, value
from zoo.attention.theory.third_forms import most_second, second_order, third
from zoo.attention.theory.third_norm import bilinear, bilinear_rounding, near, third_norm
from zoo.bounds.contracts import Expansion, QuadraticForm, SignedForm
from zoo.bounds.products import matrix_rounding
from zoo.spectral import sigma_upper

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CoreLeafForms:
    """Forms and second order of the core (`Forms`, `Hessian` in zoo/bounds/contracts.py).

    Inputs are (B, 3, H, N, O), and B = I.
    """

    core: CoreForms
    moduli: Moduli
    inexact: Inexact | None = None  # set where the q, k, v and P of the core are not exact

    @property
    def shared(self) -> bool:
        return False

    @property
    def sizes(self) -> Tensor:
        return self.core.sizes

    @property
    def slack(self) -> Tensor:
        return 2 * terms_rounding(self.core.core) * self.moduli.scores.unsqueeze(-1)

    @property
    def spread_rounding(self) -> float:
        return 0.0

    def squares(self, probes: Tensor) -> Tensor:
        return self.core.functionals(QKV(*probes.unbind(2))).square().sum(0)

    def of_gradient(self, g: Tensor, reach: Tensor) -> QuadraticForm:
        found = self.core.reach(reach)
        form = self._form(self.core.gradient(g, found), 2.0)
        if self.inexact is None:
            return form
        more, constant = self.inexact.along(g, found)
        return self._widened(form, self._form([more], 2.0), constant)

    def of_rest(self, reach: Tensor, weight: Tensor) -> QuadraticForm:
        found = self.core.reach(reach)
        return self._norm(self.core.rest(found, self.core.weights(found)), found, weight)

    def bilinear(self, u: Tensor, v: Tensor) -> Tensor:
        return bilinear(self.core.core, QKV(*u.unbind(2)), QKV(*v.unbind(2)))

    @property
    def bilinear_rounding(self) -> Tensor:
        return bilinear_rounding(self.core.core, self.moduli)

    def rows(self, v: Tensor) -> Tensor:
        q, k, _ = v.unbind(2)
        return (self.core.core.p.sqrt() * self.core.scores.change(q, k)).flatten(2, 3)

    @property
    def rows_rounding(self) -> Tensor:
        return 3 * terms_rounding(self.core.core) * self.moduli.scores

    def of_third(self, reach: Tensor, lengths: Tensor, weight: Tensor) -> QuadraticForm:
        found, core = self.core.reach(reach), self.core.core
        form = self._norm(third_norm(self.core, found, lengths.view(core.p.shape[:-1])), found, weight)
        return replace(form, largest=torch.where(near(found), form.largest, torch.inf))

    def shrink_third(self, share: Tensor) -> Tensor:
        """Return the fourth power; the part that is not exact does not shrink."""
        return share**4 if self.inexact is None else (share**4).clamp_min(FLOOR)

    def _norm(self, sums: Sequence[Squares], reach: ScoreRange, weight: Tensor) -> QuadraticForm:
        """Return the form of sums that bound the square of a remainder of the exact core.

        It is scaled by the largest weight of an image: the norm has a bound, its entries have none.
        """
        form = self._form(sums, 1.0)
        if self.inexact is not None:
            more = self._form([self.inexact.squares(reach)], (1 + 1 / SHARE) / FLOOR)
            form = self._widened(form, more, 0.0, 1 + SHARE)
        most_B = weight.flatten(1).amax(1).square()
        shape = (-1, *(1,) * self.core.core.q.ndim)
        return QuadraticForm(
            lambda v: most_B.view(shape) * form.apply(v), most_B * form.largest, rounding=most_B * form.rounding
        )

    def signed(self, g: Tensor, reach: Tensor) -> SignedForm:
        """Choose for each image the exact second order and the bound of the third, or the form of both together."""
        found = self.core.reach(reach)
        beyond, most, whole = third(self.core, g, found), most_second(self.core, g, found), self.core.gradient(g, found)
        by_third, by_second, by_both = (value(sums, found.linear, found.tokens) for sums in (beyond, most, whole))
        exact = found.gentle.all(-1).all(-1) & (by_third <= torch.maximum(by_second, by_both))
        second, local, other = second_order(self.core, g), self._form([*beyond, *most], 2.0), self._form(whole, 2.0)
        absolute = chosen(exact, local, other)

        def apply(v: Tensor) -> Tensor:
            eta = QKV(*v.unbind(2))
            less = applied(beyond, eta).plus(QKV(*(-one for one in second.apply(eta))))
            return 2 * torch.stack(less, 2)

        form = chosen(exact, replace(local, apply=apply), other)
        if self.inexact is None:
            return SignedForm(form, absolute)
        more, constant = self.inexact.along(g, found)
        return SignedForm(*(self._widened(one, self._form([more], 2.0), constant) for one in (form, absolute)))

    @property
    def pooled(self) -> int:
        return self.core.core.q.ndim - 1

    def size(self, reach: Tensor) -> Tensor:
        return torch.ones_like(self.core.core.q)

    def shrink(self, small: Tensor, large: Tensor) -> Tensor:
        """Bound the factor from below by FLOOR, as the part that is not exact does not shrink."""
        t = self.core.shrink(self.core.reach(small), self.core.reach(large))
        return t if self.inexact is None else t.clamp_min(FLOOR)

    def _widened(
        self, form: QuadraticForm, more: QuadraticForm, constant: Tensor | float, factor: float = 1.0
    ) -> QuadraticForm:
        """Return factor times the first form plus the second; infinite where nothing is known."""
        assert self.inexact is not None
        largest = torch.where(self.inexact.known_B, factor * form.largest + more.largest, torch.inf)
        rounding = 2 * (factor * form.rounding + more.rounding)
        return QuadraticForm(lambda v: factor * form.apply(v) + more.apply(v), largest, constant, rounding)

    def spread(self, r: Tensor) -> Tensor:
        return r

    def collect(self, g: Tensor) -> Tensor:
        return g

    def _form(self, sums: Sequence[Squares], factor: float) -> QuadraticForm:
        """Return the form with <H, C H> = factor F(H)."""

        def apply(v: Tensor) -> Tensor:
            return factor * torch.stack(applied(sums, QKV(*v.unbind(2))), 2)

        found, absolute = factor * largest(sums), factor * absolutely(sums)
        few = found.view(-1, found.shape[-1])  # C = 1 for the norm of a remainder
        rounding = terms_rounding(self.core.core) * absolute
        return QuadraticForm(apply, few, rounding=rounding.view(few.shape))


def chosen(where: Tensor, one: QuadraticForm, other: QuadraticForm) -> QuadraticForm:
    """Return the first form where `where` (C, B) is True, else the other, without constants."""

    def apply(v: Tensor) -> Tensor:
        if not bool(where.any()):
            return other.apply(v)
        found = one.apply(v)
        mask = where.view(*where.shape, *(1,) * (found.ndim - 2))
        return found if bool(where.all()) else torch.where(mask, found, other.apply(v))

    largest = torch.where(where, one.largest, other.largest)
    return QuadraticForm(apply, largest, rounding=torch.where(where, one.rounding, other.rounding))


def affine_leaf(y: Tensor, weight: Tensor, pull: Map, push: Map, off: Tensor | float = 0.0) -> Expansion:
    """Expand a product with this matrix, plus constants; the exact matrix may be `off` from it in norm."""
    numbers = sigma_upper(weight) + off, matrix_rounding(weight) + off
    gain_B, rounding_B = (number.expand(len(y)) for number in numbers)
    return Expansion.without_remainder(
        y=y,
        gain_B=gain_B,
        pull=pull,
        own_push=push,
        rounding_B=rounding_B,
    )


def projection_leaf(y_B3HNO: Tensor, w_3HOD: Tensor, off: Tensor | float = 0.0) -> Expansion:
    """Expand X -> X W^T of queries, keys and values, plus constants; the exact matrix may be `off` from W in norm."""
    w_HOD = w_3HOD.flatten(0, 1)  # 3 H heads: one product instead of three

    def pull(g: Tensor) -> Tensor:
        return join_heads(g.flatten(2, 3), w_HOD)

    def push(v: Tensor) -> Tensor:
        return split_heads(v, w_HOD).unflatten(-3, (3, -1))

    return affine_leaf(y_B3HNO, w_HOD.flatten(0, 1), pull, push, off)


def merge_leaf(y_BND: Tensor, o_HOD: Tensor) -> Expansion:
    """Expand heads -> sum_l Y_l W_Ol, plus constants."""

    def pull(g: Tensor) -> Tensor:
        return split_heads(g, o_HOD)

    def push(v: Tensor) -> Tensor:
        return join_heads(v, o_HOD)

    return affine_leaf(y_BND, o_HOD.flatten(0, 1), pull, push)


def split_heads(x: Tensor, w_HOD: Tensor) -> Tensor:
    """Return x W_l^T of every head in one product: (..., N, D) -> (..., H, N, O)."""
    return (x @ w_HOD.flatten(0, 1).mT).unflatten(-1, w_HOD.shape[:2]).transpose(-3, -2)


def join_heads(z: Tensor, w_HOD: Tensor) -> Tensor:
    """Return sum_l z_l W_l: (..., H, N, O) -> (..., N, D)."""
    return z.transpose(-3, -2).flatten(-2) @ w_HOD.flatten(0, 1)


def core_leaf(core: Core, v: Tensor, inexact: Inexact | None = None) -> Expansion:
    """Expand the core, of which only its forms and its second order are known."""
    found, moduli = CoreForms(core), Moduli.of(core, v)
    forms = CoreLeafForms(found, moduli, inexact)

    def pull(o: Tensor) -> Tensor:
        return torch.stack(core.pull(o), 2)

    def push(v: Tensor) -> Tensor:
        return core.push(*v.unbind(2))

    return Expansion(
        y=core.mixed @ v,
        gain_B=found.gain,
        beta=unknown,
        remainder=lambda g: unknown,
        pull=pull,
        own_push=push,
        rounding_B=terms_rounding(core) * moduli.of_map(),
        forms=forms,
        hessian=forms,
    )


def unknown(r: Tensor) -> Tensor:
    """Return the bound of a leaf of which only forms are known."""
    return torch.where(r > 0, torch.inf, 0.0)
