"""Reaches of a linear part, exact second and third orders and a rest of fourth order.

`certify.image` throws all remainders of earlier units into one ball. Their first orders are known exactly:
r_k = s_k (A_k G)^2 / 2 + m_k (A_k G)^3 / 2 + t_k with s = sigma''(z) and m = sigma'''(z) / 3. So a functional of a
later leaf is

    <a, H>  =  <a, A G> + <G, K G> / 2 + T(G, G, G) / 6 + rest,
    |<a, H>|  <=  e |a A| + e^2 |K|_F / 2 + e^3 |T|_F / 6 + |rest|,

K the sum of s_k (a J_k B_k) A_k^T A_k and T likewise, and only t_k and other leaves' remainders are left to the ball.
With b_k what remainders do to unit k, D_k its reach, and nu_k >= |c_k - s_k - m_k d_k|,

    |t_k|  =  |(c_k - s_k - m_k A_k G) (A_k G)^2 + c_k (2 A_k G b_k + b_k^2)| / 2  <=  q_k |A_k G| + p_k |b_k|,

q = nu e |A_k| / 2 and p = (kappa (e |A_k| + D_k) + |m| (e |A_k|)^2) / 2; propagated.py bounds the |b_k| of a leaf
together.

triples.py measures the first orders. Leaves with a Hessian add a second order of their own (bent.py). Proof:
docs/proofs.md#second-reaches.

Letters: B images.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certify.ellipsoids.columns import Columns
from certify.ellipsoids.ellipsoid import Before, Known, Off, Rest
from certify.ellipsoids.joint import IMAGE, Joint
from certify.ellipsoids.measured import Draw
from certify.reaches.aside import free_length2
from certify.reaches.bent import BentEllipsoids
from certify.reaches.forms import cubic_of, kappa, smooth_leaves
from certify.reaches.propagated import Propagated, propagated
from certify.reaches.triples import Moved, Orders, Through, Triples
from zoo.arithmetic import OUT, broadcast_batch, nan_to_inf, product
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.elementwise import UnitForms, largest_share

VECTORS = 256  # that bound what earlier units do to a leaf


@dataclass(frozen=True)
class Third:
    """The bound of |t / W| of a leaf: the parts q |A G| / W and p |b| / W, for p at the largest e."""

    of_image_B: Tensor
    kappa: Tensor
    m: Tensor
    p: Tensor
    of_remainders: Propagated


class CloserEllipsoids(BentEllipsoids):
    """The ellipsoids of all leaves, with the lesser of both reaches."""

    def __init__(self, joint: Joint, draw: Draw, known: Known, off: Off, first: Columns | None) -> None:
        self._thirds = dict[int, Third]()
        super().__init__(joint, draw, known, off, first)

    def _reach(self, at: int, known: Before) -> Tensor:
        reach = super()._reach(at, known)
        if self._orders is None:
            return reach
        t = broadcast_batch(known.e_B / self.most_B, reach.shape[1:])
        return torch.fmin(reach, nan_to_inf((self._orders.first[at] * t + self._beta(at, known)) * OUT))

    def _rest(self, at: int, known: Before) -> Rest:
        rest = super()._rest(at, known)
        if self._orders is not None and rest.reach is not None and at in self._units and at < max(self._orders.first):
            self._thirds[at] = self._measured_third(at, rest.reach, self._orders.first[at], known)
        return rest

    def _theta(self, at: int, known: Before) -> Tensor:
        if at in self._thirds:
            known.third[at] = self._third(at, known)
        return super()._theta(at, known)

    @cached_property
    def _units(self) -> dict[int, UnitForms]:
        return smooth_leaves(self.tape)

    @cached_property
    def _orders(self) -> Orders | None:
        """The first orders; None where no leaf follows units or a leaf with a Hessian, or the model is large."""
        if not self._units or max(self.formed, default=-1) <= min(self._units | self.hessians):
            return None
        return Triples(self, self._units, self.budget.probes // 2, "triples", self.most_B[:, None]).orders(self.formed)

    def through(self, forms: Mapping[int, QuadraticForm], within: Tensor) -> Through:
        """Bound what second and third orders of units do to the forms C of a rival, of leaves without units.

        `within` (1, B) is never below the norm of sum_l M_l^T C_l M_l. The bounds are infinite where no unit comes
        before, and for a large model.
        """
        if self._orders is None or min(self._units) > max(forms):
            return Through(*[torch.full_like(within, torch.inf)] * 2)
        return self._triples.through(forms, self._at_inputs, within)

    @cached_property
    def _triples(self) -> Triples:
        """Triples apart from those of the first orders, on which forms depend."""
        return Triples(self, self._units, self.budget.probes, "through", self.most_B[:, None])

    @cached_property
    def _at_inputs(self) -> dict[int, Moved]:
        """The effect of units on all leaves without units, for these triples; it serves all rivals."""
        return self._triples.moved([at for at in self.formed if at not in self._units])

    def _beta(self, at: int, known: Before) -> Tensor:
        """Bound what remainders and errors add to the functionals of a leaf: (B, ...)."""
        assert self._orders is not None
        length, t = self.lengths_of[at], broadcast_batch(known.e_B / self.most_B, self.lengths_of[at].shape[1:])
        rest = self._free(at, known.theta, known)
        if at in self.bent.halves:
            theta_B = self.bent.theta(at, known)
            rest = rest + product(self.bent.halves[at], broadcast_batch(theta_B, length.shape[1:]))
            rest = torch.fmin(rest, self._free(at, [k for k in known.theta if k not in self.hessians], known))
        return nan_to_inf(self._orders.second[at] * t.square() + self._orders.third[at] * t**3 + rest)

    def _free(self, at: int, ordered: Collection[int], known: Before) -> Tensor:
        """Bound what remainders add to the functionals of a leaf beyond known orders, which `ordered` leaves have."""
        length, whole = self.lengths_of[at], [known.theta[k] for k in known.theta if k not in ordered]
        free_B = sum(whole, free_length2(ordered, known, known.e_B) + known.theta_0[at])
        return product(length, broadcast_batch(free_B.sqrt(), length.shape[1:]))

    def _measured_third(self, at: int, reach: Tensor, first: Tensor, known: Before) -> Third:
        """Return the bound of |t / W| at the largest e."""
        forms, weight, numbers = self._units[at], self.joint.weights[at], self.most_B[:, None]
        (m, nu), kappa_BNH = cubic_of(forms, reach), kappa(forms, reach)
        form = forms.weighted((product(0.5 * nu, first) / weight).square()[None])
        of_image = self.seminorms(
            {at: form}, f"third {at}", [numbers], self.budget.close, self.joint.only((IMAGE,), at, form.largest)
        )
        p = share_of_b(kappa_BNH, m, first, reach)
        of_remainders = propagated(self, {at: (p / weight).square()[None]}, f"beyond {at}", numbers, known, VECTORS)
        return Third(of_image[0], kappa_BNH, m, p, of_remainders)

    def _third(self, at: int, known: Before) -> Tensor:
        """Bound |t / W|^2 of a leaf: (B,)."""
        third, t_B, reach = self._thirds[at], known.e_B / self.most_B, self._reach(at, known)
        assert self._orders is not None
        linear = nan_to_inf(self._orders.first[at] * broadcast_batch(t_B, reach.shape[1:]))
        p = share_of_b(third.kappa, third.m, linear, reach)
        of_remainders_B = product(largest_share(p, third.p), third.of_remainders.at(known.e_B, known)[0])
        return nan_to_inf((product(t_B.square(), third.of_image_B) + of_remainders_B).square() * OUT)


def share_of_b(kappa_BNH: Tensor, m: Tensor, first: Tensor, reach: Tensor) -> Tensor:
    """Return p, for e |A| = first."""
    return product(kappa_BNH, 0.5 * (first + reach)) + 0.5 * product(m.abs(), first.square())
