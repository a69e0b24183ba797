"""What moves in softmax attention when its tokens move: the facts behind its local rules, of first and second order.

    out_i = sum_l (sum_k P_ilk v_lk) W_Ol,    delta_ilk = s (k_lk . eta^q_il + q_il . eta^k_lk + eta^q_il . eta^k_lk)

is the change of the scores for a change eta of the tokens, ||eta||_F <= r, with eta^q_l = eta W_Ql and so on. z~ is z
minus its mean under the row p_il of P; a common offset of a row of scores, and of all values, changes nothing.
beta_il = s W_Kl q_il, A_l = s W_Ql W_Kl^T. With W_Q = [W_Q1 .. W_QH] all heads share one budget,
sum_l |eta W_Ql|^2 <= ||W_Q||^2 r^2.

A *level* (U, T) of non-negative weights w_ilk is a bound of the weighted spread of the scores,

    sqrt( sum_ilk w_ilk delta~_ilk^2 ) <= r U + r^2 T.

The relative error of matrix products and sums is covered by ROUND and the certificate's slack.
Source: MATH-PROOFS.md sections 2.8 and 2.9, with the proofs.

Letters: B images, C classes, H heads (l), N tokens (i row, k column), D width, O = D / H; "..." is C or nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from zoo.attention.softmax import QKVAttention
from zoo.bounds.facts import expect
from zoo.spectral import sigma_upper

ROUND = 1 + 1e-11
TINY = 1e-280  # the trace of a matrix that is as good as zero
TAU_MAX = 50.0  # beyond it the forms with exponentials are given up
LOGIT_MAX = 700.0  # the logit of a probability that underflows, or nearly
K2_MAX = 0.2721655271  # sqrt(6) / 9, rounded up: sup |D^2 softmax[v, v]| / |v|^2
Pair = tuple[Tensor, Tensor]


def top(a: Tensor) -> Tensor:
    """lambda_max <= (tr A^32)^(1/32) of symmetric positive matrices (..., n, n), at most n^(1/32) too large; matrix
    products only, which a GPU does in batches. Scaled by the trace, so that nothing overflows."""
    trace = a.diagonal(dim1=-2, dim2=-1).sum(-1)
    power = a / trace.clamp_min(TINY)[..., None, None]
    for _ in range(4):
        power = power @ power
    root = power.square().sum((-2, -1)) ** (1 / 32)
    return torch.where(trace > TINY, root * trace, trace).clamp_min(0) * ROUND


def norm(a: Tensor) -> Tensor:
    """Spectral norm (..., m, n) -> (...)."""
    return top(a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a).sqrt()


def split_heads(x: Tensor, w_HOD: Tensor) -> Tensor:
    """x W_l^T of every head in one product: (..., N, D) -> (..., H, N, O)."""
    return (x @ w_HOD.flatten(0, 1).mT).unflatten(-1, w_HOD.shape[:2]).transpose(-3, -2)


def join_heads(z: Tensor, w_HOD: Tensor) -> Tensor:
    """sum_l z_l W_l: (..., H, N, O) -> (..., N, D)."""
    return z.transpose(-3, -2).flatten(-2) @ w_HOD.flatten(0, 1)


def e1(t: Tensor) -> Tensor:
    """(e^t - 1) / t, 1 at 0."""
    return torch.where(t > 0, torch.expm1(t) / t, 1.0) * ROUND


def e2(t: Tensor) -> Tensor:
    """(e^t - 1 - t) / t^2, 1/2 at 0; the series sum_j t^j / (j + 2)! below 1/2, whose rest after j = 12 is < 1e-15."""
    series = torch.zeros_like(t)
    for j in range(12, -1, -1):
        series = series * t + 1 / math.factorial(j + 2)
    return torch.where(t < 0.5, series, (torch.expm1(t) - t) / t.square()) * ROUND


def third_cumulant(t: Tensor, sd: Tensor) -> Tensor:
    """h = (e^{2 tau} / 2 + e^{3 tau} sd^2 / 10) sd: kappa_3 is at most e^{t tau} sum p |c~| delta~^2, plus, from moving
    the centres from t = 0, 3 t e^{2 t tau} sd(c) sd^3 + 2 t^3 e^{3 t tau} sd(c) sd^5; the integral with 1 - t."""
    return sd * (torch.exp(2 * t) / 2 + torch.exp(3 * t) * sd.square() / 10)


def grow(level: Pair, r: Tensor) -> Tensor:
    """r U + r^2 T."""
    return r * (level[0] + r * level[1])


@dataclass(frozen=True)
class Heads:
    """The weights, measured once. Everything of values carries `gain_H`, the share of the softmax in P (gpsa.py)."""

    s: float
    gain_H: Tensor
    q_HOD: Tensor
    k_HOD: Tensor
    v_HOD: Tensor
    o_HOD: Tensor
    norm_q: Tensor  # of the concatenated matrices
    norm_k: Tensor
    norm_v: Tensor
    norm_o: Tensor
    norm_q_H: Tensor
    norm_v_H: Tensor
    norm_m_H: Tensor  # ||W_Vl W_Ol||
    a_H: Tensor  # ||A_l||


def measure(content: QKVAttention, gain_H: Tensor | float = 1.0) -> Heads:
    """The norms of the heads of `content`, whose scores are s q k^T plus constants."""
    expect(content.qkv, nn.Linear)
    expect(content.proj, nn.Linear)
    q, k, v = content.head_weights_3HOD().detach().double()
    o = content.proj.weight.detach().double().unflatten(1, (content.num_heads, -1)).permute(1, 2, 0).contiguous()
    gain_H = torch.as_tensor(gain_H, dtype=q.dtype, device=q.device).expand(len(q))
    gained = gain_H[:, None, None] * v
    return Heads(
        s=content.scale,
        gain_H=gain_H,
        q_HOD=q,
        k_HOD=k,
        v_HOD=gained,
        o_HOD=o,
        norm_q=sigma_upper(q.flatten(0, 1)),
        norm_k=sigma_upper(k.flatten(0, 1)),
        norm_v=sigma_upper(gained.flatten(0, 1)),
        norm_o=sigma_upper(o.flatten(0, 1)),
        norm_q_H=sigma_upper(q),
        norm_v_H=sigma_upper(gained),
        norm_m_H=sigma_upper(gained.mT @ o),
        a_H=abs(content.scale) * sigma_upper(q.mT @ k),
    )


class Spread:
    """One clean batch. q, k, v (B, H, N, O) and P (B, H, N, N), the softmax part of the attention."""

    def __init__(self, heads: Heads, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> None:
        self.heads, self.q, self.p = heads, q, p
        s = abs(heads.s)
        self.k = k = k - k.mean(-2, keepdim=True)
        self.v = heads.gain_H[:, None, None] * (v - v.mean(-2, keepdim=True))
        self.beta_BHND = s * torch.stack([q_l @ k_l for q_l, k_l in zip(q.unbind(1), heads.k_HOD, strict=True)], 1)
        self.beta_BHN = self.beta_BHND.norm(dim=-1)
        self.p_max_BHN, self.p2_BHN = p.amax(-1), p.square().sum(-1)
        self._logits()
        # ||S' - S||_F of head l <= xi_l r + a_l r^2, of one of its rows the same with its own |beta_il|.
        own_BH = s * norm(k @ heads.q_HOD)
        self.xi_BH = own_BH + norm(self.beta_BHND)
        self.xi_BHN = own_BH.unsqueeze(-1) + self.beta_BHN
        self.values_BH = norm(self.v)  # ||V_c||
        self.outputs_BH = norm(self.v @ heads.o_HOD)  # ||V_c W_O||
        self.sharp_BHN = self.slope(torch.zeros_like(self.beta_BHN))
        self.sd_BHN = heads.norm_q_H[:, None] * self.own_row(p) + self.sharp_BHN.sqrt() * self.beta_BHN
        self.nu_BHN = norm(p.unsqueeze(-1).sqrt() * self.values_BHNNO)  # sd of v, largest direction
        self.tau1_B, self.tau2_B = self._tau()

    @property
    def keys_BHNNO(self) -> Tensor:
        """k~, too large to be kept."""
        return self.k.unsqueeze(-3) - (self.p @ self.k).unsqueeze(-2)

    @property
    def values_BHNNO(self) -> Tensor:
        """v~."""
        return self.v.unsqueeze(-3) - (self.p @ self.v).unsqueeze(-2)

    # the softmax of a row ---------------------------------------------------------------------------------------------

    def _logits(self) -> None:
        """Largest logit log(p / (1 - p)) of each row, and the one closest to 0; 1 - p without cancellation."""
        largest = torch.zeros_like(self.p, dtype=torch.bool).scatter_(-1, self.p.argmax(-1, keepdim=True), True)
        others = self.p.masked_fill(largest, 0).sum(-1, keepdim=True)
        logit = self.p.log() - torch.where(largest, others, 1 - self.p).log()
        self.logit_max_BHN = logit.amax(-1)
        self.logit_near_BHN = logit.abs().amin(-1).clamp_max(LOGIT_MAX)

    def slope(self, change_BHN: Tensor) -> Tensor:
        """||D softmax|| <= min(1/2, max p, max 2 p (1 - p)), while the row of scores moves by at most `change`: each
        logit of p moves by at most sqrt(2) times that."""
        step = math.sqrt(2) * ROUND * change_BHN
        near = (self.logit_near_BHN - step).clamp_min(0)
        mixed = 2 * near.sigmoid() * (-near).sigmoid() * ROUND
        return torch.minimum(mixed, self.peak(step)).clamp_max(0.5)

    def peak(self, step_BHN: Tensor) -> Tensor:
        """max p while logits move by `step`."""
        return (self.logit_max_BHN + step_BHN).sigmoid() * ROUND

    def curvature(self, change_BHN: Tensor) -> Tensor:
        """||D^2 softmax|| <= min(sqrt(6) / 9, slope sqrt(1 + max p)) on the same box."""
        peak = self.peak(math.sqrt(2) * ROUND * change_BHN)
        return (self.slope(change_BHN) * (1 + peak).sqrt()).clamp_max(K2_MAX)

    def scores(self, r: Tensor) -> Pair:
        """||S' - S||_F (..., H) and, of its rows, (..., H, N); r (...)."""
        r_1 = r.unsqueeze(-1)
        matrix = r_1 * (self.xi_BH + r_1 * self.heads.a_H)
        row = r_1[..., None] * (self.xi_BHN + r_1[..., None] * self.heads.a_H[:, None])
        return matrix, torch.minimum(row, matrix.unsqueeze(-1))

    def weights(self, r: Tensor) -> Tensor:
        """||P' - P||_F (..., H); rows of P' - P are not longer than sqrt(2)."""
        matrix, row = self.scores(r)
        return (self.slope(row).amax(-1) * matrix).clamp_max(math.sqrt(2 * self.p.shape[-1]) * ROUND)

    def deviation(self, r: Tensor) -> Tensor:
        """sd_p(delta) of each row (..., H, N), with |eta_i|, |eta| <= r."""
        second = self.heads.a_H[:, None] * self.p_max_BHN.sqrt()
        return grow((self.sd_BHN, second), r[..., None, None])

    def combined(self, values_H: Tensor, inputs_H: Tensor) -> Tensor:
        """||sum_l (E_l V_c,l + F_l W_Vl) W_Ol||_F for ||E_l||_F <= values, ||F_l||_F <= inputs: all heads in one norm,
        or one after the other."""
        heads = self.heads
        together = heads.norm_o * (values_H * self.values_BH + inputs_H * heads.norm_v_H).square().sum(-1).sqrt()
        apart = (values_H * self.outputs_BH + inputs_H * heads.norm_m_H).sum(-1)
        return torch.minimum(together, apart)

    def _tau(self) -> Pair:
        """tau = max_ilk |delta_ilk - mean| <= r t1 + r^2 t2. t1 is the exact norm of the linear functional, with the
        blocks of token i (a = s W_Q k~ and beta) and of the others (beta) combined: with c = e_k - p,

            t1^2 = |c|^2 |beta|^2 + 2 c_i beta.a + |a|^2,        t2 = (|c_i| + |c|) / 2 ||A||.
        """
        heads, keys = self.heads, self.keys_BHNNO
        q_HOD = heads.s * heads.q_HOD
        a2 = ((keys @ (q_HOD @ q_HOD.mT)[:, None]) * keys).sum(-1)
        inner = heads.s * (self.q @ heads.k_HOD @ q_HOD.mT)
        cross = (inner.unsqueeze(-2) * keys).sum(-1)
        c2 = (1 - self.p).square() + self.p2_BHN.unsqueeze(-1) - self.p.square()
        eye = torch.eye(self.p.shape[-1], dtype=self.p.dtype, device=self.p.device)
        c_own = eye - self.p.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        square = c2 * self.beta_BHN.unsqueeze(-1).square() + 2 * c_own * cross + a2
        t2 = (c_own.abs() + c2.clamp_min(0).sqrt()) / 2 * heads.a_H[:, None, None]
        return square.clamp_min(0).amax((-3, -2, -1)).sqrt() * ROUND, t2.amax((-3, -2, -1)) * ROUND

    def tau(self, r: Tensor) -> Tensor:
        return grow((self.tau1_B, self.tau2_B), r)

    # levels -----------------------------------------------------------------------------------------------------------

    def own_row(self, w: Tensor) -> Tensor:
        """|| [s sqrt(w_ilk) k~_ilk]_k ||, what eta^q_il does to the weighted delta_il (..., H, N)."""
        return abs(self.heads.s) * norm(w.sqrt().unsqueeze(-1) * self.keys_BHNNO)

    def own_norm(self, w: Tensor) -> Tensor:
        """max_i of what eta_i does to all delta_ilk through its queries, by ||W_Q|| (...)."""
        return self.own_row(w).amax((-2, -1)) * self.heads.norm_q

    def nu(self, w: Tensor) -> Tensor:
        """lambda_max of the form sum_k w_k z~_k^2 in z, that is of (I - p 1^T) diag(w) (I - 1 p^T): rows (..., H, N).
        It is diag(w) plus a matrix of rank two with trace t and determinant -(|p|^2 |w|^2 - (p.w)^2)."""
        total, inner = w.sum(-1), (w * self.p).sum(-1)
        t = self.p2_BHN * total - 2 * inner
        area = (self.p2_BHN * w.square().sum(-1) - inner.square()).clamp_min(0)
        return w.amax(-1) + 0.5 * (t + (t.square() + 4 * area).sqrt()).clamp_min(0)

    def cross_rows(self, w_HN: Tensor) -> Tensor:
        """sqrt lambda_max(sum_il w_il beta_il beta_il^T) (...)."""
        return norm((w_HN.sqrt().unsqueeze(-1) * self.beta_BHND).flatten(-3, -2))

    def quadratic(self, w_HN: Tensor) -> Tensor:
        """T for weights w_il p_ilk: from |Q_ilk| <= ||A_l|| |eta_i| |eta_k|, or the shared budget of the heads."""
        wp = w_HN.unsqueeze(-1) * self.p
        heads = self.heads
        paired = (wp * heads.a_H.square()[:, None, None]).sum(-3).amax((-2, -1)).sqrt()
        return torch.minimum(paired, abs(heads.s) * heads.norm_q * heads.norm_k * wp.amax((-3, -2, -1)).sqrt())

    def rows(self, w_HN: Tensor) -> Pair:
        """Level of the weights w_il p_ilk: sqrt(sum_il w_il Var_il(delta))."""
        own = self.own_norm(w_HN.unsqueeze(-1) * self.p)
        return own + self.cross_rows(w_HN * self.sharp_BHN), self.quadratic(w_HN)

    @cached_property
    def by_values(self) -> Pair:
        """Level of the weights nu^2 p."""
        return self.rows(self.nu_BHN.square())

    @cached_property
    def by_inputs(self) -> Pair:
        """Level of the weights max_k(p) p."""
        return self.rows(self.p_max_BHN)

    def entries(self, z: Tensor, nu: Tensor) -> Pair:
        """Level of the weights p_ilk z_ilk, z >= 0, with their `nu`."""
        return self.own_norm(self.p * z) + self.cross_rows(nu), self.quadratic(z.amax(-1))


def exponential(form: Callable[[Tensor], Tensor], tau: Tensor) -> Tensor:
    """form(tau), and infinity where tau is too large for it."""
    return torch.where(tau <= TAU_MAX, form(tau.clamp(max=TAU_MAX)), math.inf)
