"""How far dot-product attention is from its linearisation. With c_ilk = o_il . v_lk, o_il = W_Ol g_i, G = P o c~, and
y_ilk = o_il . eta^v_lk, exactly

    <g, R> = <G, Q> + sum_il [<p' - p, c> - Cov_p(delta, c)] + sum_il <p' - p, y>  =  T1 + T2 + T3,

Q the part of delta of second order. Each term is bounded in several ways, and the least counts:

    T1   nuclear norms:  ||G_l|| ||A_l|| r^2 head by head, or with heads sharing one budget
    T2   simple: K2 max_i |c~_i| |dS|^2 / 2;  weighted: E2(tau) N^2 + ..., N the spread of delta weighted by p |c~|
    T3   simple: lam |dS| ||W_V o|| r;  weighted: E1(tau) times the spread of delta times that of y

For beta the same holds with v~ for c~, rows of R being vectors. Along the scores S + t delta, 0 <= t <= 1,

    T2 = int_0^1 (1 - t) E_t (c - E_t c) (delta - E_t delta)^2 dt,     T3 = int_0^1 Cov_t(delta, y) dt.

Proofs: MATH-PROOFS.md section 2.9.

Letters: B images, C classes, H heads (l), N tokens (i row, k column), D width, O = D / H.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from zoo.arithmetic import known
from zoo.attention.local import changes
from zoo.attention.lofast import SOFTMAX
from zoo.attention.softmax import QKVAttention
from zoo.attention.spread import (
    Spread,
    e1,
    e2,
    exponential,
    grow,
    join_heads,
    measure,
    norm,
    split_heads,
    third_cumulant,
)
from zoo.bounds.curvature import Expand, Expansion
from zoo.bounds.rules import Bound
from zoo.spectral import sigma_upper

Forms = dict[str, Bound]  # several bounds of the same thing


def least(forms: Forms) -> Bound:
    """All of them hold."""
    return lambda r: torch.stack(torch.broadcast_tensors(*(form(r) for form in forms.values()))).amin(0)


class Remainder:
    """The terms of -<g, R> for gradients g (C, B, N, D) of the output."""

    def __init__(self, spread: Spread, g: Tensor) -> None:
        self.spread = spread
        self.o = split_heads(g, spread.heads.o_HOD)
        self.c = centred(spread, self.o)
        self.size = self.c.abs()

    def t1(self) -> Bound:
        """r^2 min( sum_l ||G_l|| ||A_l||, s ||[sqrt(||G_l||) W_Ql]|| ||[sqrt(||G_l||) W_Kl]|| )."""
        heads, norm_g_CBH = self.spread.heads, norm(self.spread.p * self.c)
        root = norm_g_CBH.sqrt()[..., None, None]
        shared = norm((root * heads.q_HOD).flatten(-3, -2)) * norm((root * heads.k_HOD).flatten(-3, -2))
        t1_CB = torch.minimum(norm_g_CBH @ heads.a_H, abs(heads.s) * shared)
        return lambda r: known(t1_CB * r.square())

    def t2(self) -> Forms:
        return {"simple": self._t2_simple(), "weighted": self._t2_weighted()}

    def _t2_simple(self) -> Bound:
        """sum_l K2 / 2 max_i |c~_i| |dS_l|^2; here c is centred by its plain mean, which makes |c~_i| least."""
        spread = self.spread
        plain_CBHN = (self.c - self.c.mean(-1, keepdim=True)).norm(dim=-1)

        def bound(r: Tensor) -> Tensor:
            matrix, row = spread.scores(r)
            return known((0.5 * (spread.curvature(row) * plain_CBHN).amax(-1) * matrix.square()).sum(-1))

        return bound

    def _t2_weighted(self) -> Bound:
        """E2(tau) (r U + r^2 T)^2 + h(tau, m) (r S + r^2 T_c)^2: weights p |c~|, then sd_p(c) p; m = max sd(delta)."""
        spread = self.spread
        w = spread.p * self.size
        weighted = spread.entries(self.size, spread.nu(w))
        shifted = spread.rows((w * self.size).sum(-1).sqrt())

        def bound(r: Tensor) -> Tensor:
            a, b = grow(weighted, r).square(), grow(shifted, r).square()
            sd = spread.deviation(r).amax((-2, -1))
            return known(exponential(lambda t: e2(t) * a + third_cumulant(t, sd) * b, spread.tau(r)))

        return bound

    def t3(self) -> Forms:
        return {"simple": self._t3_simple(), "weighted": self._t3_weighted()}

    def _t3_simple(self) -> Bound:
        """sum_l lam |dS_l| ||W_V o|| r."""
        outer_CBH = norm(self.o @ self.spread.heads.v_HOD)
        return lambda r: known(r * (self.spread.weights(r) * outer_CBH).sum(-1))

    def _t3_weighted(self) -> Bound:
        """E1(tau) V(|o|) ||W_V|| r sqrt(max_lk lambda_max(sum_i p_ilk o_il o_il^T / |o_il|))."""
        spread, heads = self.spread, self.spread.heads
        length = self.o.norm(dim=-1)
        level = spread.rows(length)
        o = self.o / length.clamp_min(1e-300).sqrt().unsqueeze(-1)
        columns = spread.p.mT.sqrt().unsqueeze(-1) * o.unsqueeze(-3)
        inputs = norm(columns).amax((-2, -1)) * heads.norm_v
        return lambda r: known(exponential(lambda t: e1(t) * inputs * r * grow(level, r), spread.tau(r)))

    def forms(self) -> Forms:
        """The whole bound in each version, for comparison, and the least of all term by term."""
        t1, t2, t3 = self.t1(), self.t2(), self.t3()
        whole: Forms = {name: lambda r, name=name: t1(r) + t2[name](r) + t3[name](r) for name in t2}  # type: ignore[misc]
        return whole | {"least": lambda r: t1(r) + least(t2)(r) + least(t3)(r)}


def centred(spread: Spread, o: Tensor) -> Tensor:
    """c~_ilk = o_il . v~_lk."""
    c = o @ spread.v.mT
    return c - (spread.p * c).sum(-1, keepdim=True)


class Beta:
    """The forms of ||R||_F: with v~ for c~, and per row of each head the norm of a vector of O numbers."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self.size = spread.values_BHNNO.norm(dim=-1)  # |v~|
        self.change = changes(spread)
        self.by_values, self.by_inputs = spread.by_values, spread.by_inputs

    def forms(self) -> Forms:
        return {"simple": self._simple(), "far": self._far(), "weighted": self._weighted()}

    def _simple(self) -> Bound:
        """(lam a r^2 + K2 / 2 |dS|^2) ||V_c|| + lam |dS| ||W_V|| r, heads combined; of rows, max_i K2 |dS_i| |dS|."""
        spread = self.spread

        def bound(r: Tensor) -> Tensor:
            matrix, row = spread.scores(r)
            second = spread.sharp_BHN.amax(-1) * spread.heads.a_H * r.square().unsqueeze(-1)
            second = second + 0.5 * (spread.curvature(row) * row).amax(-1) * matrix
            return known(spread.combined(second, spread.weights(r) * r.unsqueeze(-1)))

        return bound

    def _far(self) -> Bound:
        """R = (P' - P) X' M - DP[dS of first order] X M: never more than both together."""
        size_B = linear(self.spread)
        return lambda r: self.change(r) + known(r * size_B)

    def _inputs(self, t: Tensor, r: Tensor) -> Tensor:
        """T1 + T3: E1(tau) ||W_V|| r V(max_k p), and the row means of p v~ Q by Cauchy."""
        t3 = e1(t) * self.spread.heads.norm_v_H.amax() * r * grow(self.by_inputs, r)
        return self.by_values[1] * r.square() + t3

    def _weighted(self) -> Bound:
        """T2 as in the remainder, z_il per row: sqrt(sum z^2) <= sqrt(max z sum z), where |eta| <= r for one row."""
        spread, heads = self.spread, self.spread.heads
        w = spread.p * self.size
        nu = spread.nu(w)
        weighted, shifted = spread.entries(self.size, nu), spread.rows(spread.nu_BHN)
        row = heads.norm_q_H[:, None] * spread.own_row(w) + nu.sqrt() * spread.beta_BHN
        row_2 = heads.a_H[:, None] * (self.size.amax(-1) * spread.p_max_BHN).sqrt()

        def bound(r: Tensor) -> Tensor:
            deviation = spread.deviation(r)
            sd = deviation.amax((-2, -1))
            a, b = grow(weighted, r).square(), grow(shifted, r).square()
            a_row, b_row = grow((row, row_2), r[..., None, None]).square(), spread.nu_BHN * deviation.square()

            def form(t: Tensor) -> Tensor:
                h = third_cumulant(t, sd)
                total = e2(t) * a + h * b
                largest = (e2(t)[..., None, None] * a_row + h[..., None, None] * b_row).amax((-2, -1))
                return self._inputs(t, r) + (torch.minimum(largest, total) * total).sqrt()

            return self._times_output(form, r)

        return bound

    def _times_output(self, form: Callable[[Tensor], Tensor], r: Tensor) -> Tensor:
        return known(self.spread.heads.norm_o * exponential(form, self.spread.tau(r)))


def linear(spread: Spread) -> Tensor:
    """How much of ||J|| comes from the change of P: (B,)."""
    by_box = spread.combined(spread.sharp_BHN.amax(-1) * spread.xi_BH, torch.zeros_like(spread.xi_BH))
    return torch.minimum(spread.heads.norm_o * spread.by_values[0], by_box)


def expand_attention(
    module: Callable[[Tensor], Tensor],
    content: QKVAttention,
    attend: Callable[[Tensor], Tensor] = SOFTMAX,
    mix: Callable[[Tensor], Tensor] = lambda p_BHNN: p_BHNN,
    gain_H: Tensor | float = 1.0,
) -> Expand:
    """The expansion of `content`, or of attention around it; arguments as in `lofast_local`. Where P = mix of a
    softmax, the remainder sees the values `gain_H`-fold, and J the mixed P."""
    heads, plain = measure(content, gain_H), measure(content)
    qkv_HOD = torch.cat([heads.q_HOD, heads.k_HOD, plain.v_HOD])  # 3 H heads: one product instead of three

    def expand(x_BND: Tensor) -> Expansion:
        q, k, v = content.projections(x_BND)
        p_BHNN = attend(content.scale * q @ k.mT)
        spread, mixed = Spread(heads, q, k, v, p_BHNN), mix(p_BHNN)
        norm_p_BH = sigma_upper(mixed)
        carried_B = torch.minimum(norm_p_BH.amax(-1) * plain.norm_v * plain.norm_o, norm_p_BH @ plain.norm_m_H)

        @cache
        def of_norm() -> Bound:
            """Dear, and not always asked for."""
            return least(Beta(spread).forms())

        def remainder(g_CBND: Tensor) -> Bound:
            return Remainder(spread, g_CBND).forms()["least"]

        def pull(g_CBND: Tensor) -> Tensor:
            """J^T g = G k W_Q + G^T q W_K + P^T o W_V: through the scores, and along the values."""
            o = split_heads(g_CBND, heads.o_HOD)
            pull_s = heads.s * spread.p * centred(spread, o)
            return join_heads(torch.cat([pull_s @ k, pull_s.mT @ q, mixed.mT @ o], dim=-3), qkv_HOD)

        def push(v_CBND: Tensor) -> Tensor:
            """J v: what the scores do to the values, and the values themselves."""
            dq, dk, dv = split_heads(v_CBND, qkv_HOD).chunk(3, dim=-3)
            dp = heads.s * spread.p * (dq @ k.mT + q @ dk.mT)
            dp = dp - spread.p * dp.sum(-1, keepdim=True)
            return join_heads(dp @ spread.v + mixed @ dv, heads.o_HOD)

        return Expansion(module(x_BND), carried_B + linear(spread), lambda r: of_norm()(r), remainder, pull, push)

    return expand
