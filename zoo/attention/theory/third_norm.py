"""The second order of the core as a bilinear map, and the norm of what is left of third order.

With a unit vector e, c = e . v and y = e . eta^v, and a, Q as in third_forms.py, a row of R_3 along e is

    int_0^1 (1 - t)^2 / 2 E_t c_c a_c (a_c^2 - 3 Var_t a + 6 Q_c) dt  +  int_0^1 (1 - t) Cov_t(y, a_c^2 + 2 Q) dt,

z_c = z - E_t z. By Cauchy-Schwarz the first is at most sd_t(c) (E_t (h a_c)^2)^(1/2) under the integral, h the reach
of the bracket, and the second sd_t(y) times a number. All bounds grow with t, so sums over PANELS bound the integrals.

Proof: docs/proofs.md#attention-third-norm. Letters: as in core.py; M pairs of vectors.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.attention.theory.core import Core
from zoo.attention.theory.forms import CoreForms
from zoo.attention.theory.score_range import TINY, ScoreRange, ratio
from zoo.attention.theory.score_rounding import Moduli, terms_rounding
from zoo.attention.theory.softmax_row import ROUND
from zoo.attention.theory.squares import QKV, ScoreSquares, Squares, ValueSquares, value

PANELS = 8  # with 64, the bound is a twentieth less
NEAR = 4.0  # where scores move further, the third order is worth nothing


def bilinear(core: Core, one: QKV, other: QKV) -> Tensor:
    """Return D^2 f[eta, eta'] of the core: (M, B, H, N, O)."""
    a, b = core.turned(one.q, one.k), core.turned(other.q, other.k)
    w = core.p * (a * b + _products(core, one, other))
    w = w - core.p * w.sum(-1, keepdim=True)
    of_values = (core.p * a) @ other.v + (core.p * b) @ one.v
    return w @ core.values + core.gain_H[:, None, None] * of_values


def _products(core: Core, one: QKV, other: QKV) -> Tensor:
    """Return Q(eta + eta') - Q(eta) - Q(eta')."""
    found = one.q @ other.k.mT + other.q @ one.k.mT
    if core.score.kappa:
        found = found - core.score.kappa * (one.k * other.k).sum(-1).unsqueeze(-2)
    return core.score.s * found


def bilinear_rounding(core: Core, moduli: Moduli) -> Tensor:
    """Return a bound, never below |fl(D^2 f[eta, eta']) - D^2 f[eta, eta']| / (|eta| |eta'|): (B,).

    It is that of the moduli of all terms in the longest row, times the root of the number of rows.
    """
    heads, tokens = core.p.shape[1:3]
    change = 2 * moduli.scores
    row = 4 * moduli.values * (change.square() + core.s * (2 + core.score.kappa))
    row = row + 2 * core.gain_H.abs().amax() * change
    return 2 * terms_rounding(core) * (heads * tokens) ** 0.5 * row


def near(reach: ScoreRange) -> Tensor:
    """Return the images for which `third_norm` holds (B,)."""
    return (reach.tau <= NEAR).flatten(1).all(1) & reach.bounded


def third_norm(forms: CoreForms, reach: ScoreRange, deviation: Tensor) -> list[Squares]:
    """Return F with |R_3(eta)|^2 <= F(eta) for `near` images.

    `deviation` (B, H, N) bounds the sd of delta^1 under each row: no row has all its entries at their reach at once.
    """
    core, panels = forms.core, [_Moment(reach, deviation.unsqueeze(-1), (k + 1) / PANELS) for k in range(PANELS)]
    a, on_values = _of_scores(core, panels), _of_values(core, panels)
    theta = 2 * ratio(*((a * size.square()).sum(-1, keepdim=True).sqrt() for size in (reach.quadratic, reach.linear)))
    scores, products = (1 + theta) * a, reach.centred(4 * (1 + 1 / theta) * a)
    b = on_values.square() * core.p
    parts: list[list[Squares]] = [
        [ScoreSquares(forms.scores, scores), reach.products(products)],
        [ValueSquares(core, b)],
    ]
    sizes = torch.stack([value(sums, reach.linear, reach.tokens) for sums in parts]).sqrt() + TINY
    by_scores, by_values = (ROUND * sizes.sum(0) / size for size in sizes)  # (x + y)^2 <= x^2 / t + y^2 / (1 - t)
    by_scores, by_values = by_scores.view(-1, 1, 1, 1), by_values.view(-1, 1, 1, 1)
    return [
        ScoreSquares(forms.scores, by_scores * scores),
        reach.products(by_scores * products),
        ValueSquares(core, by_values * b),
    ]


class _Moment:
    """A row at the end t of a panel: bounds for every t before it, under the softmax there."""

    def __init__(self, reach: ScoreRange, deviation: Tensor, t: float) -> None:
        self.p, self.t, tau = reach.core.p, t, reach.exponent_most.unsqueeze(-1)
        self.grown, self.p_t = (t * tau).exp(), self.p * (t * reach.exponent).exp()
        a, self.sd_q = reach.linear + 2 * t * reach.quadratic, self._deviation(reach.quadratic)
        # of a, under the first softmax
        self.mu = torch.minimum(self._deviation(a), deviation + 2 * t * self.sd_q)
        moved = t * self.grown * self.mu  # E_t z~ in units of sd(z)
        self.a = a + moved * self.mu  # a_c at most
        self.q = reach.quadratic + moved * self.sd_q

    def _deviation(self, z: Tensor) -> Tensor:
        return (self.p * z.square()).sum(-1, keepdim=True).sqrt()

    def of_scores(self) -> Tensor:
        """Return b with E_t (h a_c)^2 <= sum_k b_k a~_k^2."""
        h = torch.maximum(self.a.square(), 3 * self.grown * self.mu.square()) + 6 * self.q
        w, far = self.p_t * h.square(), self.t * self.mu
        mean = w.sum(-1, keepdim=True)
        return (1 + far) * w + self.p * mean * (far + far.square()) * self.grown.square()

    def of_values(self) -> Tensor:
        """Bound (E_t (a_c^2 + 2 Q_c)^2)^(1/2): (B, H, N, 1)."""
        together = (self.p_t * (self.a.square() + 2 * self.q).square()).sum(-1, keepdim=True).sqrt()
        apart = self.grown.sqrt() * (self.a.amax(-1, keepdim=True) * self.mu + 2 * self.sd_q)
        return torch.minimum(together, apart)


def _shares(power: int) -> list[float]:
    """Return the shares of the panels in int_0^1 (1 - t)^(power - 1) dt."""
    left = [(1 - k / PANELS) ** power / power for k in range(PANELS + 1)]
    return [more - less for more, less in itertools.pairwise(left)]


def _of_scores(core: Core, panels: Sequence[_Moment]) -> Tensor:
    """Return A with (the part of a row with c)^2 <= sum_k A_k max_t a~_k^2."""
    parts = [0.5 * share * one.grown * one.of_scores() for one, share in zip(panels, _shares(3), strict=True)]
    # 1 / 6 is the sum of the halved shares
    return torch.stack(parts).sum(0) * core.nu_BHN.square().unsqueeze(-1) / 6


def _of_values(core: Core, panels: Sequence[_Moment]) -> Tensor:
    """Bound the part of a row with y, in units of the sd of eta^v: (B, H, N, 1)."""
    parts = [share * one.grown.sqrt() * one.of_values() for one, share in zip(panels, _shares(2), strict=True)]
    return core.gain_H[:, None, None].abs() * torch.stack(parts).sum(0)
