"""The core of softmax attention, as a function of its queries, keys and values: how far it moves, and how far it leaves
its linearisation.

    out_il = sum_k P_ilk v_lk,     P_il = softmax_k( s (q_il . k_lk - kappa |k_lk|^2 / 2) + constants )

kappa is 0, or 1 where scores are distances: -|q - k|^2 is 2 (q . k - |k|^2 / 2) up to a constant of the row, which the
softmax drops. For changes eta of q, k, v the scores change, up to such constants, by

    delta_ilk = s k_lk . eta^q_il + beta_ilk . eta^k_lk + Q_ilk,
    beta_ilk = s (q_il - kappa k_lk),     Q_ilk = s (eta^q_il . eta^k_lk - kappa |eta^k_lk|^2 / 2).

All heads together share three budgets, ||eta^q||_F <= r_q, ||eta^k||_F <= r_k, ||eta^v||_F <= r_v: maxima over heads
stand where the general proofs (MATH-PROOFS sections 2.8 and 2.9) speak of one head. z~ is z minus its mean under the
row p_il. A *level* (U_q, U_k, T_q, T_k) of weights w_ilk >= 0 is the bound

    sqrt( sum_ilk w_ilk delta~_ilk^2 ) <= r_q U_q + r_k U_k + r_q r_k T_q + r_k^2 T_k          (Minkowski).

Every bound psi here is *steep*: for radii (t r_q, t r_k, t r_v) those of first order have psi / t nondecreasing, those
of the remainder psi / t^2, so that they may be joined over windows (MATH-PROOFS section 1, tokenwise lemma). Hence no
cap of ||P' - P||, and no min with a bound that grows linearly. `spread.py` is the same for dot-product attention on
one X, where q, k and v move together: tighter, for that case alone.

Letters: B images (or windows), C classes, H heads (l), N tokens (i row, k column), O width of a head; "..." is C or
nothing, and whatever the radii have in front of B.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.arithmetic import known
from zoo.attention.spread import K2_MAX, LOGIT_MAX, ROUND, e1, e2, exponential, norm, third_cumulant
from zoo.spectral import sigma_upper


class Radii(NamedTuple):
    """(..., B) each."""

    q: Tensor
    k: Tensor
    v: Tensor

    def of(self, dims: int) -> "Radii":
        """With so many dimensions more behind B."""
        return Radii(*(r.view(*r.shape, *(1,) * dims) for r in self))


class Level(NamedTuple):
    """U_q, U_k, T_q, T_k; see above."""

    q: Tensor
    k: Tensor
    qk: Tensor
    kk: Tensor | float

    def at(self, r: Radii) -> Tensor:
        return r.q * self.q + r.k * self.k + r.q * r.k * self.qk + r.k.square() * self.kk


@dataclass(frozen=True)
class Score:
    """s, kappa, and whether q and k are one and move together."""

    s: float
    kappa: float = 0.0
    tied: bool = False


class Core:
    """One clean batch. q, k, v (B, H, N, O), P (B, H, N, N) the softmax and `mixed` the matrix in front of V: an affine
    map of P per head, with the linear part `gain_H` (gpsa.py). Values carry that gain where they meet P' - P."""

    def __init__(self, score: Score, q: Tensor, k: Tensor, v: Tensor, p: Tensor, mixed: Tensor, gain_H: Tensor) -> None:
        self.score, self.s, self.p, self.mixed, self.gain_H = score, abs(score.s), p, mixed, gain_H
        self.q, self.k = q, k
        keys, values = (z - z.mean(-2, keepdim=True) for z in (k, v))
        values = gain_H[:, None, None] * values
        self.keys_BHNNO = keys.unsqueeze(-3) - (p @ keys).unsqueeze(-2)  # k~
        self.values_BHNNO = values.unsqueeze(-3) - (p @ values).unsqueeze(-2)  # v~
        self.beta_BHNNO = self.s * (q.unsqueeze(-2) - score.kappa * k.unsqueeze(-3))
        self.length_BHNN = self.beta_BHNNO.norm(dim=-1)
        self.gain = gain_H.max()
        self.p_max_BHN = p.amax(-1)
        self.keys_BH, self.norm_v_B = self.s * norm(keys), norm(values).amax(-1)
        self.own_BHN = self.s * norm(p.sqrt().unsqueeze(-1) * self.keys_BHNNO)  # sd of s k~, largest direction
        self.nu_BHN = norm(p.sqrt().unsqueeze(-1) * self.values_BHNNO)  # the same of v~
        self._logits()
        self.sharp_B = self.slope(torch.zeros_like(self.own_BHN)).amax((-2, -1))
        self._scores()
        self._tau()
        self.by_values, self.by_inputs = self.rows(self.nu_BHN.square()), self.rows(self.p_max_BHN)

    # the softmax of a row ---------------------------------------------------------------------------------------------

    def _logits(self) -> None:
        """Of each row the largest logit log(p / (1 - p)) and the one closest to 0; 1 - p without cancellation."""
        largest = torch.zeros_like(self.p, dtype=torch.bool).scatter_(-1, self.p.argmax(-1, keepdim=True), True)
        others = self.p.masked_fill(largest, 0).sum(-1, keepdim=True)
        logit = self.p.log() - torch.where(largest, others, 1 - self.p).log()
        self.logit_max_BHN, self.logit_near_BHN = logit.amax(-1), logit.abs().amin(-1).clamp_max(LOGIT_MAX)

    def slope(self, change_BHN: Tensor) -> Tensor:
        """||D softmax|| <= min(1/2, max p, max 2 p (1 - p)), while the row of scores moves by at most `change`: each
        logit of p moves by at most sqrt(2) times that."""
        step = math.sqrt(2) * ROUND * change_BHN
        near = (self.logit_near_BHN - step).clamp_min(0)
        peak = (self.logit_max_BHN + step).sigmoid()
        return torch.minimum(2 * near.sigmoid() * (-near).sigmoid(), peak).mul(ROUND).clamp_max(0.5)

    def curvature(self, change_BHN: Tensor) -> Tensor:
        """||D^2 softmax|| <= min(sqrt(6) / 9, slope sqrt(1 + max p)) on the same box."""
        peak = (self.logit_max_BHN + math.sqrt(2) * ROUND * change_BHN).sigmoid()
        return (self.slope(change_BHN) * (1 + peak * ROUND).sqrt()).clamp_max(K2_MAX)

    def _scores(self) -> None:
        """Levels of ||S' - S||_F, all heads together, and of one of its rows: constant weights, and k less its mean, as
        constants of the rows of S do nothing."""
        s, half, tokens = self.s, self.score.kappa * self.s / 2, self.p.shape[-1]
        keys_BH1, across = self.keys_BH.unsqueeze(-1), self.columns(torch.ones_like(self.p))
        self.matrix = Level(self.keys_BH.amax(-1), across, across.new_tensor(s), half * math.sqrt(tokens))
        self.row = Level(keys_BH1, self.length_BHNN.amax(-1), across.new_tensor(s), half)

    def change(self, r: Radii) -> tuple[Tensor, Tensor]:
        """||S' - S||_F (..., B), and of each row (..., B, H, N)."""
        matrix = self.matrix.at(r)
        return matrix, torch.minimum(self.row.at(r.of(2)), matrix[..., None, None])

    def weights(self, r: Radii) -> Tensor:
        """||P' - P||_F (..., B)."""
        matrix, row = self.change(r)
        return self.slope(row).amax((-2, -1)) * matrix

    def _tau(self) -> None:
        """Level of tau = max_ilk |delta_ilk - mean|, and of m = max_il sd(delta_il). With c = e_k - p,

        mean-free part of beta:  (sum_j c_j^2 |beta_ij|^2)^(1/2),    of Q:  s |c|,  kappa s / 2 (1 - p_k)
        """
        length2, p2 = self.length_BHNN.square(), self.p.square()
        cross = (length2 * (1 - 2 * self.p) + (p2 * length2).sum(-1, keepdim=True)).clamp_min(0).sqrt()
        apart = (1 - 2 * self.p + p2.sum(-1, keepdim=True)).clamp_min(0).sqrt()
        s, half = self.s * ROUND, self.score.kappa * self.s / 2 * ROUND
        keys = self.keys_BHNNO.norm(dim=-1)
        parts = ((s, keys), (ROUND, cross), (s, apart), (half, 1 - self.p))
        self.tau = Level(*(factor * z.amax((-3, -2, -1)) for factor, z in parts))
        root = self.p_max_BHN.sqrt()
        self.deviation = Level(
            self.own_BHN, (self.p.sqrt() * self.length_BHNN).amax(-1) * ROUND, s * root, half * root
        )  # of each row (B, H, N)

    # levels -----------------------------------------------------------------------------------------------------------

    def columns(self, w: Tensor) -> Tensor:
        """sqrt max_lk lambda_max(sum_i w_ilk beta_ilk beta_ilk^T): (..., B, H, N, N) -> (..., B)."""
        return norm((w.sqrt().unsqueeze(-1) * self.beta_BHNNO).transpose(-3, -2)).amax((-2, -1))

    def quadratic(self, wp: Tensor) -> tuple[Tensor, Tensor]:
        """T_q, T_k of the weights wp: |Q| <= s |eta_i| |eta_k|, kappa s / 2 |eta_k|^2, variances by moments."""
        half = self.score.kappa * self.s / 2
        return self.s * wp.amax((-3, -2, -1)).sqrt(), half * wp.sum(-2).amax((-2, -1)).sqrt()

    def rows(self, w: Tensor) -> Level:
        """Of the weights w_il p_ilk: sqrt(sum_il w_il Var_il(delta)). w (..., B, H, N)."""
        wp = w.unsqueeze(-1) * self.p
        return Level((w.sqrt() * self.own_BHN).amax((-2, -1)), self.columns(wp), *self.quadratic(wp))

    def entries(self, z: Tensor) -> tuple[Level, Level]:
        """Of the weights p_ilk z_ilk, z >= 0 (..., B, H, N, N); and of one row of them (..., B, H, N)."""
        w, most = self.p * z, z.amax(-1)
        mean = w.sum(-1, keepdim=True)
        own = self.s * norm(w.sqrt().unsqueeze(-1) * self.keys_BHNNO)
        cross = self.columns(w) + self.columns(mean * self.p)
        whole = Level(own.amax((-2, -1)), cross, *self.quadratic(most.unsqueeze(-1) * self.p))
        length2, root = self.length_BHNN.square(), (most * self.p_max_BHN).sqrt()
        cross = (w * length2).amax(-1).sqrt() + (mean * self.p * length2).amax(-1).sqrt()
        return whole, Level(own, cross, self.s * root, self.score.kappa * self.s / 2 * root)

    # first order ------------------------------------------------------------------------------------------------------

    @cached_property
    def gains(self) -> Radii:
        """||J|| with respect to q, k and v alone (B,)."""
        by_box_q, by_box_k = (self.sharp_B * u * self.norm_v_B for u in (self.matrix.q, self.matrix.k))
        return Radii(
            torch.minimum(self.by_values.q, by_box_q),
            torch.minimum(self.by_values.k, by_box_k),
            sigma_upper(self.mixed).amax(-1),
        )

    def moved(self, r: Radii) -> Tensor:
        """||(P' - P) V'||_F: rows E1(tau) sd(delta) nu, and E1(tau) sd(delta) sqrt(max p) |eta^v|; or by the box."""
        spreads = self.by_values.at(r) + self.gain * r.v * self.by_inputs.at(r)
        smooth = exponential(lambda t: e1(t) * spreads, self.tau.at(r))
        return torch.minimum(known(smooth), known(self.weights(r) * (self.norm_v_B + self.gain * r.v)))

    def radius(self, r: Radii) -> Tensor:
        """P' V' - P V = P (V' - V) + (P' - P) V'."""
        return known(self.gains.v * r.v + self.moved(r))

    # second order -----------------------------------------------------------------------------------------------------

    def beta(self, r: Radii) -> Tensor:
        """||R||_F: (P' - P) V' less the part of first order, or the three terms of `remainder` with v~ for c~."""
        far = self.moved(r) + self.gains.q * r.q + self.gains.k * r.k
        matrix, row = self.change(r)
        quadratic = self.matrix.qk * r.q * r.k + self.matrix.kk * r.k.square()
        t12 = self.sharp_B * quadratic + 0.5 * (self.curvature(row) * row).amax((-2, -1)) * matrix
        simple = t12 * self.norm_v_B + self.slope(row).amax((-2, -1)) * matrix * self.gain * r.v
        smooth = exponential(lambda t: self._smooth_beta(t, r), self.tau.at(r))
        return torch.stack(torch.broadcast_tensors(known(far), known(simple), known(smooth))).amin(0)

    def _smooth_beta(self, t: Tensor, r: Radii) -> Tensor:
        """Rows z_il of T2 join by sqrt(sum z^2) <= sqrt(max z sum z)."""
        total, largest = self._joined(t, r)
        t1 = self.by_values.qk * r.q * r.k + self.by_values.kk * r.k.square()
        return t1 + e1(t) * self.gain * r.v * self.by_inputs.at(r) + (torch.minimum(largest, total) * total).sqrt()

    @cached_property
    def of_values(self) -> tuple[Level, Level, Level]:
        """Levels of the weights p |v~|, all of them and row by row, and nu p."""
        return *self.entries(self.values_BHNNO.norm(dim=-1)), self.rows(self.nu_BHN)

    def _joined(self, t: Tensor, r: Radii) -> tuple[Tensor, Tensor]:
        """sum z and max z."""
        whole, row, shifted = self.of_values
        deviation = self.deviation.at(r.of(2))
        h = third_cumulant(t, deviation.amax((-2, -1)))
        total = e2(t) * whole.at(r).square() + h * shifted.at(r).square()
        h_11, e2_11 = h[..., None, None], e2(t)[..., None, None]
        rows = e2_11 * row.at(r.of(2)).square() + h_11 * self.nu_BHN * deviation.square()
        return total, rows.amax((-2, -1))

    def remainder(self, o: Tensor) -> "CoreRemainder":
        return CoreRemainder(self, o)

    def pull(self, o: Tensor) -> Tensor:
        """J^T o, o (C, B, H, N, O) -> (3, C, B, H, N, O): G = P o c~ through the scores, and along the values."""
        g = self.p * self.directional(o)
        s, kappa = self.score.s, self.score.kappa
        to_keys = g.mT @ self.q - kappa * g.sum(-2).unsqueeze(-1) * self.k
        return torch.stack([s * (g @ self.k), s * to_keys, self.mixed.mT @ o])

    def directional(self, o: Tensor) -> Tensor:
        """c~_ilk = o_il . v~_lk."""
        return torch.einsum("cbhio,bhiko->cbhik", o, self.values_BHNNO)


class CoreRemainder:
    """-<o, R> for gradients o (C, B, H, N, O) of the core's output. With c_ilk = o_il . v_lk, G = P o c~ exactly

        <o, R> = <G, Q> + sum_il [<p' - p, c> - Cov_p(delta, c)] + sum_il <p' - p, o_il . eta^v>  =  T1 + T2 + T3.

    T2 = int_0^1 (1 - t) kappa_3,t(c, delta, delta) dt, T3 = int_0^1 Cov_t(delta, o . eta^v) dt along S + t delta.
    """

    def __init__(self, core: Core, o: Tensor) -> None:
        self.core = core
        c = core.directional(o)
        size = c.abs()
        self.plain_CBHN = (c - c.mean(-1, keepdim=True)).norm(dim=-1)
        self.weighted, _ = core.entries(size)
        self.shifted = core.rows((core.p * c.square()).sum(-1).sqrt())
        length = o.norm(dim=-1)
        self.level = core.rows(length)
        o = core.gain_H[:, None, None] * o
        self.norm_o_CB = norm(o).amax(-1)
        rows = core.p.mT.sqrt().unsqueeze(-1) * (o / length.clamp_min(1e-300).sqrt().unsqueeze(-1)).unsqueeze(-3)
        self.inputs_CB = norm(rows).amax((-2, -1))
        self.t1_qk, self.t1_kk = self._t1(core.p * c)

    def _t1(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """-<G, Q> <= s max_l ||G_l|| r_q r_k + kappa s / 2 max (1^T G)^+ r_k^2; where q and k are one,

        -<G, Q> = s / 2 sum eta^T (diag(1^T G) - G - G^T) eta    for kappa = 1:  the largest eigenvalue."""
        core, zero = self.core, torch.zeros_like(self.norm_o_CB)
        half, sums = core.score.kappa * core.s / 2, g.sum(-2)
        if not core.score.tied:
            return core.s * norm(g).amax(-1), half * sums.amax((-2, -1)).clamp_min(0) * ROUND
        form = sums.diag_embed() * core.score.kappa - g - g.mT
        size = torch.linalg.matrix_norm(form)
        return zero, core.s / 2 * (torch.linalg.eigvalsh(form)[..., -1] + 1e-12 * size).amax(-1).clamp_min(0)

    def __call__(self, r: Radii) -> Tensor:
        """(..., C, B)."""
        core, tau = self.core, self.core.tau.at(r)
        t1 = known(self.t1_qk * r.q * r.k + self.t1_kk * r.k.square())
        matrix, row = core.change(r)
        t2_box = 0.5 * (core.curvature(row) * self.plain_CBHN).amax((-2, -1)) * matrix.square()
        t3_box = core.slope(row).amax((-2, -1)) * matrix * self.norm_o_CB * r.v

        def t2(t: Tensor) -> Tensor:
            h = third_cumulant(t, core.deviation.at(r.of(2)).amax((-2, -1)))
            return e2(t) * self.weighted.at(r).square() + h * self.shifted.at(r).square()

        def t3(t: Tensor) -> Tensor:
            return e1(t) * self.inputs_CB * r.v * self.level.at(r)

        forms = ((known(t2_box), t2), (known(t3_box), t3))
        return t1 + sum(torch.minimum(box, known(exponential(form, tau))) for box, form in forms)
