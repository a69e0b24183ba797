"""The third order of the core in sums of squares of eta, given how far scores may move.

Along x + t eta the scores of a row are s + t delta^1 + t^2 Q and its values v + t eta^v. With c = o . v, y = o . eta^v,
a = delta^1 + 2 t Q and joint cumulants under the softmax P_t, the remainder behind the second order is exactly

    <o, R_3> = int_0^1 (1 - t)^2 / 2 ( kappa_4(c, a, a, a) + 6 kappa_3(c, a, Q) ) dt
             + int_0^1 (1 - t) ( kappa_3(y, a, a) + 2 Cov(y, Q) ) dt.

One factor of each term is bounded by its reach, and p_k(t) <= e^{t D_k} p_k; what is left is a sum of squares of
delta^1~, y~ and Q~.

Proofs: docs/proofs.md#attention-third-order. Letters: as in core.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.attention.theory.forms import CoreForms
from zoo.attention.theory.score_range import TINY, ScoreRange, ratio
from zoo.attention.theory.softmax_row import ROUND, e2, e3
from zoo.attention.theory.squares import QKV, AlongSquares, Scores, ScoreSquares, Squares


class ThirdRows:
    """The rows of a core within a reach: integrals of E_t w (z - E_t z)^2 for weights w_0 + t w_1 >= 0 and any z.

    mu >= sd(a) for all t, and |E_t z~| <= t shift sd(z). The chord of e^{t x} bounds its integrals with powers of t.
    """

    def __init__(self, reach: ScoreRange) -> None:
        self.p, self.d, self.tau = reach.core.p, reach.exponent, reach.exponent_most.unsqueeze(-1)
        self.mu = self.deviation(reach.linear + 2 * reach.quadratic)
        self.shift = self.tau.exp() * self.mu
        self.e2, self.e3 = self.p * e2(self.d), self.p * e3(self.d)
        self.a = reach.linear, 2 * reach.quadratic + self.shift * self.mu  # |a - E_t a| at most, as a weight

    def deviation(self, z: Tensor) -> Tensor:
        """Return (sum_k p_k z_k^2)^(1/2) of each row (..., 1)."""
        return (self.p * z.square()).sum(-1, keepdim=True).sqrt()

    def square(self, w_0: Tensor, w_1: Tensor) -> Tensor:
        """Return b with int (1 - t)^2 / 2 E_t (w_0 + t w_1) (z - E_t z)^2 dt <= sum_k b_k z~_k^2."""
        by_t, by_3t = 1 / 40 + self.d.exp() / 60, (3 * self.tau).exp()
        mean = self._mean(w_0 + w_1)
        shifted = self.mu * (1 / 40 + by_3t / 60) + self.mu.square() * (1 + by_3t) / 120
        return self.e3 * w_0 + self.p * (by_t * (w_1 + self.mu * (w_0 + w_1)) + shifted * mean)

    def line(self, w_0: Tensor, w_1: Tensor) -> Tensor:
        """Return the same for int (1 - t) E_t (w_0 + t w_1) (z - E_t z)^2 dt."""
        by_t, by_3t = 1 / 12 + self.d.exp() / 12, (3 * self.tau).exp()
        mean = self._mean(w_0 + w_1)
        shifted = self.mu * (1 + by_3t) / 12 + self.mu.square() * (1 / 30 + by_3t / 20)
        return self.e2 * w_0 + self.p * (by_t * (w_1 + self.mu * (w_0 + w_1)) + shifted * mean)

    def values(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return c_0, c_1 with |c - E_t c| <= c_0 + t c_1, for c less its mean."""
        return c.abs(), self.shift * self.deviation(c)

    def fourth(self, c: Tensor) -> Tensor:
        """Return b with |int (1 - t)^2 / 2 kappa_4(c, a, a, a) dt| <= sum_k b_k max_t a~_k^2."""
        (c_0, c_1), (a_0, a_1) = self.values(c), self.a
        joint = self.square(c_0 * a_0, c_0 * a_1 + c_1 * (a_0 + a_1))
        return joint + 3 * self.deviation(c) * self.mu * self.p * e3(self.d + self.tau)

    def _mean(self, w: Tensor) -> Tensor:
        return (self.p * w).sum(-1, keepdim=True)


def third(forms: CoreForms, o: Tensor, reach: ScoreRange) -> list[Squares]:
    """Return F with -<o, R_3(eta)> <= F(eta) for gradients o (C, B, H, N, O), where no row is beyond TAU_MAX."""
    core, rows = forms.core, ThirdRows(reach)
    c, (length, u) = core.directional(o), _lengths(forms, o)
    a_reach, q_reach, y_reach = reach.sd.unsqueeze(-1), rows.deviation(reach.quadratic), _inputs(u, reach)
    w, m, w_y = ratio(q_reach, a_reach), ratio(y_reach, a_reach), ratio(q_reach, y_reach)
    by_values, by_inputs = rows.square(*rows.values(c)), length * rows.line(*rows.a)
    a = rows.fourth(c) + 3 * w * by_values + m / 2 * by_inputs
    y = by_inputs / (2 * m) + length * w_y * rows.e2
    q = 3 / w * by_values + length / w_y * rows.e2
    theta = ratio(*((a * size.square()).sum(-1, keepdim=True).sqrt() for size in (reach.quadratic, reach.linear)))
    q = ROUND * (q + 4 * (1 + 1 / theta) * a)
    return [
        ScoreSquares(forms.scores, ROUND * (1 + theta) * a),
        AlongSquares(core, ROUND * y, u),
        reach.products(reach.centred(q)),
    ]


@dataclass(frozen=True)
class SecondOrder:
    """F = <o, D^2[eta, eta]> / 2, which has either sign, at the clean point; o has the gain of the values.

    D^2 = kappa_3(c, delta^1, delta^1) + 2 Cov(c, Q) + 2 Cov(y, delta^1)
    """

    scores: Scores
    g: Tensor  # p c~
    o: Tensor

    def apply(self, eta: QKV) -> QKV:
        core, s = self.scores.core, self.scores.s
        change, along = self.scores.change(eta.q, eta.k), core.softmax.centred_along(self.o, eta.v)
        q, k = self.scores.transposed(self.g * change + core.p * along)
        by_q, by_k = self._products(eta)
        return QKV(*(one / 2 for one in (q + s * by_q, k + s * by_k, (core.p * change).mT @ self.o)))

    def _products(self, eta: QKV) -> tuple[Tensor, Tensor]:
        """Return the part of Cov(c, Q) / s. Where q and k are one, all of it is in k, as in the form of T1."""
        squares = self.scores.kappa * self.g.sum(-2).unsqueeze(-1) * eta.k
        if self.scores.core.score.tied:
            return torch.zeros_like(eta.q), self.g @ eta.k + self.g.mT @ eta.k - squares
        return self.g @ eta.k, self.g.mT @ eta.q - squares


def second_order(forms: CoreForms, o: Tensor) -> SecondOrder:
    core = forms.core
    return SecondOrder(forms.scores, core.p * core.directional(o), core.gain_H[:, None, None] * o)


def most_second(forms: CoreForms, o: Tensor, reach: ScoreRange) -> list[Squares]:
    """Return squares that are never below |<o, D^2[eta, eta]>| / 2; the reach chooses a weight."""
    core = forms.core
    c, (length, u) = core.directional(o), _lengths(forms, o)
    m = ratio(_inputs(u, reach), reach.sd.unsqueeze(-1))
    a, y, g = core.p * (c.abs() + m * length) / 2, core.p * length / (2 * m), core.p * c
    scores = ScoreSquares(forms.scores, ROUND * a)
    return [scores, AlongSquares(core, ROUND * y, u), *forms.t1(g, reach), *forms.t1(-g, reach)]


def _lengths(forms: CoreForms, o: Tensor) -> tuple[Tensor, Tensor]:
    """Return |o| with the gain of the values (..., 1), and the direction of o."""
    length = o.norm(dim=-1, keepdim=True)
    return forms.core.gain_H[:, None, None].abs() * length, o / length.clamp_min(TINY)


def _inputs(u: Tensor, reach: ScoreRange) -> Tensor:
    """Return about the sd of u . eta^v within the reach."""
    return (u.square() * (reach.core.p @ reach.v.square())).sum(-1, keepdim=True).sqrt()
