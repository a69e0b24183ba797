"""The core of softmax attention around a clean point: how far it moves, and how far it leaves its linearisation.

    out_il = sum_k P_ilk v_lk,     P_il = softmax_k(S_ilk + constants),     S_ilk = s (q_il . k_lk - kappa |k_lk|^2 / 2)

kappa is 0, or 1 where scores are distances: -|q - k|^2 is 2 (q . k - |k|^2 / 2) up to a constant of the row, which the
softmax drops. For changes eta of q, k, v the scores change, up to such constants, by

    delta_ilk = s k_lk . eta^q_il + beta_ilk . eta^k_lk + Q_ilk,
    beta_ilk = s (q_il - kappa k_lk),     Q_ilk = s (eta^q_il . eta^k_lk - kappa |eta^k_lk|^2 / 2).

With c_ilk = o_il . v_lk for a gradient o of `out`, and G = P o c~ that of the scores, the remainder R after the linear
part is exactly

    <o, R> = <G, Q> + sum_il [<p' - p, c> - Cov_p(delta, c)] + sum_il <p' - p, o_il . eta^v>  =  T1 + T2 + T3,
    T2 = int_0^1 (1 - t) kappa_3,t(c, delta, delta) dt,     T3 = int_0^1 Cov_t(delta, o . eta^v) dt    (on S + t delta)

and ||R|| is bounded by the same with v~ for c~. T2 and T3 have two bounds each, of which the least counts:

    box            by slope and curvature of the softmax on the box that the scores can reach, and by ||S' - S||_F
    exponential    by E1(tau), E2(tau) and seminorms of delta with P inside: tighter while tau is below 1, or about

These bounds depend on the scores only through how far they may move: `SeminormBound`s, which a subclass derives from
its knowledge of q, k and v. A correction of these proofs is needed here alone. Proofs: docs/proofs.md#attention-core.

Terms.
  radii             upper bounds r_q, r_k, r_v of the Frobenius norms of the changes (`QKVRadii`)
  seminorm bound    (U_q, U_k, T_q, T_k): a seminorm of delta is <= r_q U_q + r_k U_k + r_q r_k T_q + r_k^2 T_k. Those
                    with weights w_ilk >= 0 are sqrt( sum_ilk w_ilk delta~_ilk^2 ), by Minkowski
  tau, deviation    the seminorms max_ilk |delta~_ilk|, and sd_p(delta_il) of each row
  nu                sd of v under a row of P, in the direction where it is largest
  superhomogeneous  of degree p: psi(t r) >= t^p psi(r) for t >= 1, so psi(r) / r^p does not fall. Of degree 1 for
                    bounds of first order and of ||R||, of degree 2 for remainders, it allows windows to share one
                    radius: sum_w psi_w(r_w) <= max_w psi_w(r) (docs/proofs.md#tokenwise-lemma)
  group             the heads whose scores are measured in one number: each by itself, or all of them together

Letters: B images (or windows), C classes, H heads (l), G groups of heads, N tokens (i row, k column), O width of a
head; "..." is C or nothing, and all leading dimensions of the radii before B.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.arithmetic import nan_to_inf
from zoo.attention.theory.softmax_row import SoftmaxRows, e1, e2, exponential, norm_upper, third_cumulant


class QKVRadii(NamedTuple):
    """The radii of q, k and v, (..., B) each."""

    q: Tensor
    k: Tensor
    v: Tensor

    def of(self, dims: int) -> "QKVRadii":
        """Append `dims` dimensions after B."""
        return QKVRadii(*(r.view(*r.shape, *(1,) * dims) for r in self))


class SeminormBound(NamedTuple):
    """The coefficients U_q, U_k, T_q, T_k; see the head of this file."""

    q: Tensor
    k: Tensor | float
    qk: Tensor
    kk: Tensor | float = 0.0

    def first(self, r: QKVRadii) -> Tensor:
        """Return the first-order part."""
        return r.q * self.q + r.k * self.k

    def second(self, r: QKVRadii) -> Tensor:
        """Return the second-order part."""
        return r.q * r.k * self.qk + r.k.square() * self.kk

    def at(self, r: QKVRadii) -> Tensor:
        by_q, by_k = self.q + r.k * self.qk, self.k
        if not isinstance(self.kk, float) or self.kk:  # saves three products where it is 0
            by_k = by_k + r.k * self.kk
        return r.q * by_q + r.k * by_k


Forms = dict[str, Tensor]  # several bounds of the same thing


def least(forms: Forms) -> Tensor:
    """Return the least of several valid bounds."""
    return torch.stack(torch.broadcast_tensors(*forms.values())).amin(0)


@dataclass(frozen=True)
class Score:
    """The parameters s and kappa of the scores; `tied`: q and k are one and move together.

    Distances, and tied q and k, have s > 0.
    """

    s: float
    kappa: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        if (self.kappa or self.tied) and not (self.s > 0 and self.kappa >= 0):
            raise ValueError(f"scores have s = {self.s}, kappa = {self.kappa}; distances need s > 0 and kappa >= 0")


class Change(NamedTuple):
    """Bounds of the changes of scores and softmax."""

    matrix: Tensor  # ||S' - S||_F of each group (..., B, G)
    row: Tensor  # of each of their rows (..., B, H, N)
    p: Tensor  # ||P' - P||_F of each group (..., B, G)


class Core:
    """Abstract: one clean batch.

    q, k, v (B, H, N, O), P (B, H, N, N) the softmax, and `mixed` the matrix before V: an affine map of P per head,
    with the linear part `gain_H` (gpsa.py). `values` are centred, and carry that gain.

    A subclass states how far scores and values may move: the attributes declared here, and the methods without a body.
    """

    matrix: SeminormBound  # ||S' - S||_F of each group (B, G)
    row: SeminormBound  # of each row (B, H, N)
    tau: SeminormBound  # (B,)
    deviation: SeminormBound  # of each row (B, H, N)
    together: bool  # all heads are one group
    norm_o: Tensor | float = 1.0  # of the map after the heads
    norm_v: Tensor | float = 1.0  # of the map that makes all values, the gain included
    norm_v_max: Tensor | float = 1.0  # the largest of one head
    p_change_max: float = math.inf  # ||P' - P||_F of a head for any radii

    def __init__(self, score: Score, q: Tensor, k: Tensor, v: Tensor, p: Tensor, mixed: Tensor, gain_H: Tensor) -> None:
        self.score, self.s = score, abs(score.s)
        self.q, self.k, self.p, self.mixed, self.gain_H = q, k, p, mixed, gain_H
        self.softmax = SoftmaxRows(p)
        # An offset that all keys share moves whole rows of scores, and one of all values drops out of (P' - P) V.
        self.keys = k - k.mean(-2, keepdim=True)
        self.values = gain_H[:, None, None] * (v - v.mean(-2, keepdim=True))
        self.own_BHN = self.s * self.softmax.deviation(self.keys)  # sd of s k~: the effect of eta^q_il on its row
        self.nu_BHN = self.softmax.deviation(self.values)

    def row_seminorm(self, w: Tensor) -> SeminormBound:
        """Return the bound for the weights w_il p_ilk: sqrt( sum_il w_il Var_il(delta) ). w (..., B, H, N) -> (..., B).

        Proof: docs/proofs.md#seminorm-bounds.
        """
        raise NotImplementedError

    def entry_seminorms(self, z: Tensor) -> tuple[SeminormBound, SeminormBound]:
        """Return the bounds for the weights p_ilk z_ilk, z >= 0 (..., B, H, N, N).

        The first is for all rows (..., B), the second for each row (..., B, H, N).
        """
        raise NotImplementedError

    def quadratic(self, g: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return t, u with -<G, Q> <= t r_q r_k + u r_k^2, for G (C, B, H, N, N)."""
        raise NotImplementedError

    def combined(self, p_BG: Tensor, inputs_BG: Tensor) -> Tensor:
        """Bound ||sum_l (E_l V_l + F_l eta^v_l) W_Ol||_F (..., B) for ||E_l||_F <= p, ||F_l||_F r_v <= inputs."""
        raise NotImplementedError

    def value_gradients(self, o: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much o_l moves with eta^v at most, for each group (C, B, G).

        The second result is o with the gain that `norm_v` lacks.
        """
        raise NotImplementedError

    @cached_property
    def value_seminorm(self) -> SeminormBound:
        """The bound for the weights nu^2 p."""
        return self.row_seminorm(self.nu_BHN.square())

    @cached_property
    def input_seminorm(self) -> SeminormBound:
        """The bound for the weights max_k(p) p."""
        return self.row_seminorm(self.softmax.max_BHN)

    # first order ------------------------------------------------------------------------------------------------------

    def worst(self, x_BH: Tensor) -> Tensor:
        """Return the largest in each group.

        Sums are taken after it, as each summand may be largest in another head.
        """
        return x_BH.amax(-1, keepdim=True) if self.together else x_BH

    def change(self, r: QKVRadii) -> Change:
        matrix = self.matrix.at(r.of(1))
        row = torch.minimum(self.row.at(r.of(2)), matrix.unsqueeze(-1))
        p = self.worst(self.softmax.slope(row).amax(-1)) * matrix
        return Change(matrix, row, p.clamp_max(self.p_change_max))

    def moved(self, r: QKVRadii) -> Tensor:
        """Bound ||(P' - P) V'||_F with exponentials, or by the box.

        With exponentials, rows are at most E1(tau) sd(delta) nu, and E1(tau) sd(delta) sqrt(max p) |eta^v|.
        """
        return self._moved(r, self.change(r))

    def _moved(self, r: QKVRadii, change: Change) -> Tensor:
        total = self.value_seminorm.at(r) + self.norm_v_max * r.v * self.input_seminorm.at(r)
        smooth = self.norm_o * exponential(lambda t: e1(t) * total, self.tau.at(r))
        box = self.combined(change.p, change.p * r.v.unsqueeze(-1))
        return torch.minimum(nan_to_inf(smooth), nan_to_inf(box))

    def linear(self, r: QKVRadii) -> Tensor:
        """Bound how far the linear part of (P' - P) V moves: the share of the scores in ||J||."""
        p = self.worst(self.softmax.slope_BHN.amax(-1)) * self.matrix.first(r.of(1))
        box = self.combined(p, torch.zeros_like(p))
        return nan_to_inf(torch.minimum(self.norm_o * self.value_seminorm.first(r), box))

    def pull(self, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return J^T o along q, k and v, o (C, B, H, N, O): G through the scores, and P^T o."""
        s, kappa = self.score.s, self.score.kappa
        g = s * self.p * self.directional(o)
        to_keys = g.mT @ self.q
        if kappa:
            to_keys = to_keys - kappa * g.sum(-2).unsqueeze(-1) * self.k
        return g @ self.k, to_keys, self.mixed.mT @ o

    def push(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return J (q, k, v), each (C, B, H, N, O): the effect of the scores on the values, and the values."""
        weighted = self.p * self._rows(q, k)
        mean = weighted.sum(-1, keepdim=True)
        return self.score.s * (weighted @ self.values - mean * self._mean_value) + self.mixed @ v

    def turned(self, q: Tensor, k: Tensor) -> Tensor:
        """Return delta^1~, the linear change of the scores less its mean under each row of P (..., B, H, N, N)."""
        rows = self._rows(q, k)
        return self.score.s * (rows - (self.p * rows).sum(-1, keepdim=True))

    def _rows(self, q: Tensor, k: Tensor) -> Tensor:
        """Return delta^1 / s, the linear change of the scores, up to a constant in each row."""
        rows = q @ self.keys.mT + self.q @ k.mT
        return rows - self.score.kappa * (self.k * k).sum(-1).unsqueeze(-2) if self.score.kappa else rows

    @cached_property
    def _mean_value(self) -> Tensor:
        """P V, for the centred values."""
        return self.p @ self.values

    def directional(self, o: Tensor) -> Tensor:
        """Return c~_ilk = o_il . v~_lk."""
        return self.softmax.centred_along(o, self.values)

    # second order -----------------------------------------------------------------------------------------------------

    def beta(self, r: QKVRadii) -> Tensor:
        """Bound ||R||_F. Proof: docs/proofs.md#attention-beta."""
        return least(self.beta_forms(r))

    def beta_forms(self, r: QKVRadii) -> Forms:
        """Return several bounds of ||R||_F.

        The difference is (P' - P) V' less the part of first order: never more than both together.
        """
        change = self.change(r)
        return {
            "difference": nan_to_inf(self._moved(r, change) + self.linear(r)),
            "box": self._beta_box(r, change),
            "exponential": self._beta_exponential(r),
        }

    def _beta_box(self, r: QKVRadii, change: Change) -> Tensor:
        """Bound (lam |Q| + K2 / 2 |dS|^2) ||V|| + lam |dS| |eta^v|; over rows, max_i K2 |dS_i| |dS|."""
        second = self.worst(self.softmax.slope_BHN.amax(-1)) * self.matrix.second(r.of(1))
        curvature = self.worst((self.softmax.curvature(change.row) * change.row).amax(-1))
        p = second + 0.5 * curvature * change.matrix
        return nan_to_inf(self.combined(p, change.p * r.v.unsqueeze(-1)))

    @cached_property
    def _value_seminorms(self) -> tuple[SeminormBound, SeminormBound, SeminormBound]:
        """The bounds for the weights p |v~|, all of them and row by row, and nu p."""
        size = self.softmax.centred(self.values).norm(dim=-1)
        return *self.entry_seminorms(size), self.row_seminorm(self.nu_BHN)

    def _beta_exponential(self, r: QKVRadii) -> Tensor:
        """Bound T1 by Cauchy-Schwarz, T3 with weights max p, and T2 row by row.

        The rows z_il of T2 are joined by sqrt(sum z^2) <= sqrt(max z sum z), where |eta| <= r for one row.
        """
        all_rows, one_row, shifted = self._value_seminorms
        a, b, deviation = all_rows.at(r).square(), shifted.at(r).square(), self.deviation.at(r.of(2))
        a_row, b_row = one_row.at(r.of(2)).square(), self.nu_BHN * deviation.square()
        sd, t1 = deviation.amax((-2, -1)), self.value_seminorm.second(r)
        t3 = self.norm_v_max * r.v * self.input_seminorm.at(r)

        def form(t: Tensor) -> Tensor:
            h = third_cumulant(t, sd)
            total = e2(t) * a + h * b
            largest = (e2(t)[..., None, None] * a_row + h[..., None, None] * b_row).amax((-2, -1))
            return t1 + e1(t) * t3 + (torch.minimum(largest, total) * total).sqrt()

        return nan_to_inf(self.norm_o * exponential(form, self.tau.at(r)))

    def remainder(self, o: Tensor) -> "CoreRemainder":
        """Return the remainder for gradients o (C, B, H, N, O)."""
        return CoreRemainder(self, o)


class CoreRemainder:
    """The bound of -<o, R> for gradients o (C, B, H, N, O) of the core's output: T1 + T2 + T3.

    Proof: docs/proofs.md#attention-remainder.
    """

    def __init__(self, core: Core, o: Tensor) -> None:
        self.core = core
        c = core.directional(o)
        self.plain_CBHN = (c - c.mean(-1, keepdim=True)).norm(dim=-1)  # centred by its plain mean, |c_i| is least
        self.weighted, _ = core.entry_seminorms(c.abs())
        self.shifted = core.row_seminorm((core.p * c.square()).sum(-1).sqrt())  # sd_p(c)
        self.quadratic = core.quadratic(core.p * c)
        length = o.norm(dim=-1)
        self.length_seminorm = core.row_seminorm(length)
        self.outer_CBG, o = core.value_gradients(o)
        columns = core.p.mT.sqrt().unsqueeze(-1) * (o / length.clamp_min(1e-300).sqrt().unsqueeze(-1)).unsqueeze(-3)
        self.inputs_CB = norm_upper(columns).amax((-2, -1)) * core.norm_v

    def __call__(self, r: QKVRadii) -> Tensor:
        """Return the bound (..., C, B)."""
        t1, t2, t3 = self.terms(r)
        return t1 + least(t2) + least(t3)

    def terms(self, r: QKVRadii) -> tuple[Tensor, Forms, Forms]:
        """Return T1, and the bounds of T2 and of T3."""
        change, (by_both, by_keys) = self.core.change(r), self.quadratic
        t1 = nan_to_inf(by_both * r.q * r.k + by_keys * r.k.square())
        t2 = {"box": self._t2_box(change), "exponential": self._t2_exponential(r)}
        return t1, t2, {"box": self._t3_box(r, change), "exponential": self._t3_exponential(r)}

    def _t2_box(self, change: Change) -> Tensor:
        """Return the sum of K2 / 2 max_i |c~_i| |dS|^2."""
        core = self.core
        curvature = core.worst((core.softmax.curvature(change.row) * self.plain_CBHN).amax(-1))
        return nan_to_inf((0.5 * curvature * change.matrix.square()).sum(-1))

    def _t2_exponential(self, r: QKVRadii) -> Tensor:
        """Return E2(tau) |delta|^2 with weights p |c~|, and the third cumulant with weights sd_p(c) p."""
        a, b = self.weighted.at(r).square(), self.shifted.at(r).square()
        sd = self.core.deviation.at(r.of(2)).amax((-2, -1))
        return nan_to_inf(exponential(lambda t: e2(t) * a + third_cumulant(t, sd) * b, self.core.tau.at(r)))

    def _t3_box(self, r: QKVRadii, change: Change) -> Tensor:
        """Return the sum of lam |dS| ||o|| |eta^v|."""
        return nan_to_inf(r.v * (change.p * self.outer_CBG).sum(-1))

    def _t3_exponential(self, r: QKVRadii) -> Tensor:
        """Return E1(tau) |delta| with weights |o| p, times the largest effect of eta^v.

        The latter is |eta^v| sqrt( max_lk ||sum_i p_ilk o_il o_il^T / |o_il||| ).
        """
        total = self.inputs_CB * r.v * self.length_seminorm.at(r)
        return nan_to_inf(exponential(lambda t: e1(t) * total, self.core.tau.at(r)))
