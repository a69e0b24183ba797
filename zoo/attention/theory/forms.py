"""The remainder of the core in quadratic forms of the changes eta of q, k and v, given how far scores may move.

    -<o, R(eta)> <= F(eta),    |R(eta)|^2 <= F'(eta),         F and F' sums of squares (squares.py)

hold while |delta^1~_ilk| stays within its own reach for every entry of the scores, and every coordinate of eta within
its own. So eta may move far in directions that do not change the scores. With core.py's T1, T2, T3:

    T1    is bilinear, -<G, Q> = -s <eta^q, G eta^k>: by the singular vectors of G, as -ab <= (a - b)^2 / 4
    T2    is at most sum_k p_k c~^-_k delta~_k^2 / 2 and a part of third order: the entries with c~ > 0 only help
    T3    is an integral of -Cov_t(delta, y) <= Var_t(m^(1/2) delta - m^(-1/2) y) / 4
    delta is delta^1 + Q, and |Q_ilk| <= s |eta^k_lk| |eta^q_il - kappa eta^k_lk / 2| with the reach of the first

Where tau is so large that exponentials are worse, slope and curvature of the softmax on the box replace them, row by
row. Where that is worse than the forms that hold everywhere (everywhere.py), those replace all. The weights (m, theta,
shares) are free, chosen by the reaches. Proofs: docs/proofs.md#attention-forms.

Letters: as in core.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from zoo.arithmetic import at_least_near
from zoo.attention.theory.core import Core
from zoo.attention.theory.everywhere import gradient_everywhere, rest_everywhere
from zoo.attention.theory.score_range import REACH_MAX, TINY, WEIGHTS, ScoreRange, ratio
from zoo.attention.theory.softmax_row import ROUND, e1, e2, norm_upper
from zoo.attention.theory.squares import (
    QKV,
    Chosen,
    ProductSquares,
    Scores,
    ScoreSquares,
    ScoreValueSquares,
    Squares,
    TokenSquares,
    ValueSquares,
    value,
)
from zoo.spectral import sigma_upper

# The form within the reach is dropped if it exceeds the one that holds everywhere by this factor: both are estimates,
# and the former overestimates by more.
RUN_AWAY = 10


@dataclass(frozen=True)
class Weights:
    """The choices and weights of the remainder's form.

    `local`: images that use the reach (B,). `by_values`, `by_inputs`: rows that use exponentials, for P' V and for P'
    eta^v (B, H, N). `shares`: of the three terms in the whole (3, B). `both`: w for the two terms that involve Q (B, H,
    N).
    """

    local: Tensor
    by_values: Tensor
    by_inputs: Tensor
    shares: Tensor
    both: Tensor


class CoreForms:
    """The forms of one core, around its clean batch."""

    def __init__(self, core: Core) -> None:
        self.core, self.scores = core, Scores(core)

    # functionals ------------------------------------------------------------------------------------------------------

    def functionals(self, eta: QKV) -> Tensor:
        """Return delta^1~ and all coordinates: (..., B, F)."""
        return torch.cat([part.flatten(-3) for part in (self.scores.change(eta.q, eta.k), *eta)], -1)

    @cached_property
    def sizes(self) -> Tensor:
        """The lengths of the functionals (B, F).

        That of delta^1~_ilk has the square s^2 |k~_ilk|^2 + sum_j c_j^2 |beta_ilj|^2, c = e_k - p.
        """
        core, length2 = self.core, self.scores.lengths2()
        others = (core.p.square() * length2).sum(-1, keepdim=True)
        keys2 = core.s**2 * core.softmax.centred(core.keys).square().sum(-1)
        scores = (keys2 + (1 - 2 * core.p) * length2 + others * (1 + 1e-14)).clamp_min(0).sqrt() * ROUND
        return torch.cat([scores.flatten(1), torch.ones_like(core.q).repeat(1, 3, 1, 1).flatten(1)], -1)

    def reach(self, of_functionals: Tensor) -> ScoreRange:
        core, scores = self.core, self.core.p[0].numel()
        found = at_least_near(of_functionals).clamp_max(REACH_MAX)
        linear, eta = found[:, :scores].view(core.p.shape), found[:, scores:].unflatten(-1, (3, *core.q.shape[1:]))
        return ScoreRange(core, linear, eta)

    # the one-sided remainder ------------------------------------------------------------------------------------------

    def gradient(self, o: Tensor, reach: ScoreRange) -> list[Squares]:
        """Return F for gradients o (C, B, H, N, O)."""
        local, everywhere = self.local_gradient(o, reach), gradient_everywhere(self.scores, o, reach)
        by_reach, by_none = (value(sums, reach.linear, reach.tokens) for sums in (local, everywhere))
        return _chosen(reach.bounded & (by_reach <= RUN_AWAY * by_none), local, everywhere)

    def local_gradient(self, o: Tensor, reach: ScoreRange) -> list[Squares]:
        """Return the F that holds within the reach."""
        core, c = self.core, self.core.directional(o)
        a = self._t2(c, reach)
        o = core.gain_H[:, None, None] * o
        length = o.norm(dim=-1)
        u = o / length.clamp_min(TINY).unsqueeze(-1)
        b = 0.25 * length.unsqueeze(-1) * self._t3(reach)
        inputs = (u.square() * (core.p @ reach.v.square())).sum(-1)  # about Var(u . eta^v)
        m = ratio(inputs.sqrt(), reach.sd)
        both = a + m.unsqueeze(-1) * b
        theta = ratio(*((both * size.square()).sum(-1).sqrt() for size in (reach.quadratic, reach.linear)))
        theta = theta.unsqueeze(-1)
        first = ScoreValueSquares(self.scores, (1 + theta) * a, (1 + theta) * b, m, u)
        return [first, reach.products(reach.centred((1 + 1 / theta) * both)), *self.t1(core.p * c, reach)]

    def t1(self, g: Tensor, reach: ScoreRange) -> list[Squares]:
        """Bound -<G, Q>. The singular vectors need not be exact: the part of G that they miss is measured."""
        core, kappa = self.core, self.core.score.kappa
        if core.score.tied:  # eta^q equals eta^k
            form = kappa * g.sum(-2).diag_embed() - g - g.mT
            values, vectors = torch.linalg.eigh(form)
            left = self._left(form, vectors * values.unsqueeze(-2) @ vectors.mT)
            rest = (core.s / 2 * left).unsqueeze(-1).expand(g.shape[:-1])
            zero = torch.zeros_like(vectors)
            return [
                ProductSquares(core.s / 2 * values.clamp_min(0), zero, vectors),
                TokenSquares(QKV(0 * rest, rest, 0 * rest)),
            ]
        u, sigma, x_T = torch.linalg.svd(g)
        x, sign = x_T.mT, -1.0 if core.score.s < 0 else 1.0
        by_q, by_k = ((one.square() * sigma.unsqueeze(-2)).sum(-1) for one in (u, x))
        m = ratio(*(((d * r.square()).sum(-1)).sqrt() for d, r in ((by_k, reach.k), (by_q, reach.q)))).unsqueeze(-1)
        left = (core.s / 2 * self._left(g, u * sigma.unsqueeze(-2) @ x_T)).unsqueeze(-1)
        keys = kappa * core.s / 2 * g.sum(-2).clamp_min(0)
        root = m.unsqueeze(-1).sqrt()
        return [
            ProductSquares(core.s / 4 * sigma, root * u, -sign * x / root),
            TokenSquares(QKV((left * m).expand(keys.shape), left / m + keys, torch.zeros_like(keys))),
        ]

    @staticmethod
    def _left(matrix: Tensor, product: Tensor) -> Tensor:
        """Return the norm of the residual of a factorisation, rounding included (..., H)."""
        return (matrix - product).norm(dim=(-2, -1)) + 1e-12 * matrix.norm(dim=(-2, -1))

    def _t2(self, c: Tensor, reach: ScoreRange) -> Tensor:
        """Return a >= 0 with T2 <= sum_k a_k delta~_k^2 in each row, for c less its mean under P (C, B, H, N, N)."""
        core, p = self.core, self.core.p
        second, third = reach.third
        against = (-c).clamp_min(0)
        sd_c, mean = (p * c.square()).sum(-1).sqrt(), (p * against).sum(-1)
        moved = second * reach.sd * sd_c + third * (reach.variance + 2 * reach.sd) * mean
        exponential = p * (e2(reach.exponent) * (1 + reach.sd / 2).unsqueeze(-1) * against + moved.unsqueeze(-1))
        curvature = core.softmax.curvature(reach.change) * (c - c.mean(-1, keepdim=True)).norm(dim=-1)
        box = (0.5 * curvature.unsqueeze(-1)).expand(exponential.shape)
        return torch.where(reach.gentler(exponential, box).unsqueeze(-1), exponential, box)

    def _t3(self, reach: ScoreRange) -> Tensor:
        """Return b with int Var_t(z) dt <= sum_k b_k z~_k^2 in each row (B, H, N, N)."""
        exponential = self.core.p * e1(reach.exponent)
        box = self.core.softmax.slope(reach.change).unsqueeze(-1).expand(exponential.shape)
        return torch.where(reach.gentler(exponential, box).unsqueeze(-1), exponential, box)

    # the norm of the remainder ----------------------------------------------------------------------------------------

    def weights(self, reach: ScoreRange) -> Weights:
        """Return good weights for this reach."""
        by_values = reach.gentler(*self._nonlinear(reach))
        turned = [w * d for w, d in zip(self._turned(reach), (self.core.p, torch.ones_like(self.core.p)), strict=True)]
        v2 = reach.v.square().sum(-1).unsqueeze(-2)
        by_inputs = reach.gentle & ((turned[0] * v2).sum(-1) <= (turned[1] * v2).sum(-1))
        everywhere_B = torch.zeros_like(reach.bounded)
        k2, nonlinear = reach.k.square().unsqueeze(-2), reach.centred(self._chosen_nonlinear(reach, by_values))
        both = ratio(*((one * k2).sum(-1).sqrt() for one in (nonlinear, self.covariance)))
        even = Weights(everywhere_B, by_values, by_inputs, torch.ones_like(reach.tau[:, 0, 0]).expand(3, -1), both)
        sizes = [one.at(reach.linear, reach.tokens) for one in self.local_rest(reach, even)]
        share = (torch.stack(sizes).sqrt() + TINY).clamp_max(1 / TINY)
        share = (share / share.amax(0)).clamp_min(WEIGHTS[0])
        weights = replace(even, shares=share / share.sum(0))
        by_reach = value(self.local_rest(reach, weights), reach.linear, reach.tokens)
        by_none = value(rest_everywhere(self.scores, reach), reach.linear, reach.tokens)
        return replace(weights, local=reach.bounded & (by_reach <= RUN_AWAY * by_none))

    def rest(self, reach: ScoreRange, weights: Weights) -> list[Squares]:
        """Return F'."""
        return _chosen(weights.local, self.local_rest(reach, weights), rest_everywhere(self.scores, reach))

    def local_rest(self, reach: ScoreRange, weights: Weights) -> tuple[ScoreSquares, TokenSquares, ValueSquares]:
        """Return the F' that holds within the reach.

        Row by row (A + B + C)^2 <= A^2 / t_A + B^2 / t_B + C^2 / t_C for shares with the sum 1.
        """
        core = self.core
        for_scores, for_products, for_values = (1 / t.view(-1, 1, 1, 1) for t in weights.shares)
        a = self._chosen_nonlinear(reach, weights.by_values)
        both = self.joined(reach.centred(a), weights)
        exponential, box = self._turned(reach)
        b = torch.where(weights.by_inputs.unsqueeze(-1), core.p * exponential, box.expand(core.p.shape))
        return (
            ScoreSquares(self.scores, for_scores * a),
            reach.products(for_products * both),
            ValueSquares(core, for_values * b),
        )

    def joined(self, nonlinear: Tensor, weights: Weights) -> Tensor:
        """Return b with (x + y)^2 <= sum_k b_k Q_k^2 in each row, for x = |Cov(Q, v)| and any y^2 <= sum_k n_k Q_k^2.

        It is (1 + w) x^2 + (1 + 1 / w) y^2 for every w > 0; n is `nonlinear`.
        """
        w = weights.both.unsqueeze(-1)
        return (1 + w) * self.covariance + (1 + 1 / w) * nonlinear

    @property
    def covariance(self) -> Tensor:
        """Coefficients b with |Cov(Q, v)|^2 <= sum_k b_k Q_k^2 in each row."""
        return self.core.nu_BHN.square().unsqueeze(-1) * self.core.p

    def _chosen_nonlinear(self, reach: ScoreRange, by_values: Tensor) -> Tensor:
        return torch.where(by_values.unsqueeze(-1), *self._nonlinear(reach))

    def shrink(self, small: ScoreRange, large: ScoreRange) -> Tensor:
        """Return t (B,) <= 1 with |R|^2 <= t F'(eta) within the small reach, for the F' made for the large one.

        Forms that hold everywhere do not shrink.
        """
        weights = self.weights(large)
        less, more = (self.local_rest(reach, weights) for reach in (small, large))
        pairs = [(less[0].a, more[0].a), (less[2].b, more[2].b), *zip(less[1].d, more[1].d, strict=True)]
        shares = [torch.where(one > 0, one / most, 0.0).flatten(1).amax(1) for one, most in pairs]
        return torch.where(weights.local, torch.stack(shares).amax(0).clamp_max(1), 1.0)

    def _nonlinear(self, reach: ScoreRange) -> tuple[Tensor, Tensor]:
        """Return a with |(p' - p) v - Cov(delta, v)|^2 <= sum_k a_k delta~_k^2: with exponentials, and by the box."""
        core, p, t = self.core, self.core.p, reach.exponent_most
        far2 = (reach.delta + (t.exp() * reach.variance).unsqueeze(-1)).square()
        mean = (2 * t).exp() * (reach.variance + 2 * reach.sd) * (p * far2).sum(-1)
        size = (e2(t) * core.nu_BHN).square().unsqueeze(-1)
        exponential = size * p * ((1 + reach.sd / 2).unsqueeze(-1) * far2 + mean.unsqueeze(-1)) * ROUND
        values_BH1 = norm_upper(core.values).unsqueeze(-1)
        box = (0.5 * core.softmax.curvature(reach.change) * values_BH1 * reach.change).square()
        return exponential, box.unsqueeze(-1).expand(exponential.shape)

    def _turned(self, reach: ScoreRange) -> tuple[Tensor, Tensor]:
        """Bound |(p' - p) eta^v|^2 by w sum_k p_k |eta^v~_k|^2 with exponentials, or w sum_k |eta^v~_k|^2 (the box)."""
        gain = self.core.gain_H[:, None]
        exponential = (gain * e1(reach.exponent_most) * reach.sd).square()
        box = (gain * (self.core.softmax.slope(reach.change) * reach.change).clamp_max(2**0.5 * ROUND)).square()
        return exponential.unsqueeze(-1), box.unsqueeze(-1)

    # first order ------------------------------------------------------------------------------------------------------

    @cached_property
    def gain(self) -> Tensor:
        """||J|| with respect to (q, k, v) (B,)."""
        core, most = self.core, norm_upper(self.core.values).amax(-1)
        scores = core.s * norm_upper(core.keys).amax(-1) + self.scores.lengths2().sum(-2).amax((-2, -1)).sqrt()
        return core.softmax.slope_BHN.amax((-2, -1)) * scores * most * ROUND + sigma_upper(core.mixed).amax(-1)


def _chosen(local: Tensor, by_reach: Sequence[Squares], everywhere: Sequence[Squares]) -> list[Squares]:
    """Choose the reach where `local` (..., B) is True, else the forms of everywhere. Unused forms are dropped."""
    kinds = [(local, by_reach), (~local, everywhere)]
    return [Chosen(where, sums) for where, sums in kinds if bool(where.any())]
