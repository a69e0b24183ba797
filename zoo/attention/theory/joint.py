"""The core where q, k and v are linear in the same tokens X: dot-product attention. All three radii are that of the
tokens, ||eta||_F <= r, and the norms of the weights stand inside the bounds. eta^q_l = eta W_Ql and so on:

    out_i = sum_l (sum_k P_ilk v_lk) W_Ol,    delta_ilk = s (k_lk . eta^q_il + q_il . eta^k_lk + eta^q_il . eta^k_lk)

beta_il = s W_Kl q_il, A_l = s W_Ql W_Kl^T. With W_Q = [W_Q1 .. W_QH] all heads share one budget,
sum_l |eta W_Ql|^2 <= ||W_Q||^2 r^2. That each head's own norms are known makes it sharper than separate.py: box bounds
add up head by head, and tau is the exact norm of one functional of eta.

Letters: as in core.py, and D width; O = D / H.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.attention.theory.core import Core, QKVRadii, Score, SeminormBound
from zoo.attention.theory.softmax_row import ROUND, norm_upper
from zoo.spectral import product_upper, sigma_upper


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


def measure(s: float, qkv_3HOD: Tensor, o_HOD: Tensor, gain_H: Tensor) -> Heads:
    """The norms of these weights; scores are s q k^T plus constants."""
    q, k, v = qkv_3HOD
    gained = gain_H[:, None, None] * v
    return Heads(
        s=s,
        gain_H=gain_H,
        q_HOD=q,
        k_HOD=k,
        v_HOD=gained,
        o_HOD=o_HOD,
        norm_q=sigma_upper(q.flatten(0, 1)),
        norm_k=sigma_upper(k.flatten(0, 1)),
        norm_v=sigma_upper(gained.flatten(0, 1)),
        norm_o=sigma_upper(o_HOD.flatten(0, 1)),
        norm_q_H=sigma_upper(q),
        norm_v_H=sigma_upper(gained),
        norm_m_H=product_upper(gained.mT, o_HOD),
        a_H=abs(s) * product_upper(q.mT, k),
    )


def same(r: Tensor) -> QKVRadii:
    """Queries, keys and values of the same tokens."""
    return QKVRadii(r, r, r)


class JointCore(Core):
    """Final; see `Core`. Its output is that of W_O. Proof: docs/proofs.md#joint-core."""

    together = False

    def __init__(self, heads: Heads, q: Tensor, k: Tensor, v: Tensor, p: Tensor, mixed: Tensor) -> None:
        super().__init__(Score(heads.s), q, k, v, p, mixed, heads.gain_H)
        self.heads = heads
        self.norm_o, self.norm_v, self.norm_v_max = heads.norm_o, heads.norm_v, heads.norm_v_H.amax()
        self.p_change_max = math.sqrt(2 * p.shape[-1]) * ROUND  # rows of P' - P are not longer than sqrt(2)
        q_k_weights = zip(q.unbind(1), heads.k_HOD, strict=True)
        self.beta_BHND = self.s * torch.stack([q_l @ k_l for q_l, k_l in q_k_weights], 1)
        self.beta_BHN = self.beta_BHND.norm(dim=-1)
        self.values_BH = norm_upper(self.values)  # ||V_l||
        self.outputs_BH = norm_upper(self.values @ heads.o_HOD)  # ||V_l W_Ol||
        own_BH, a_H1 = self.s * norm_upper(self.keys @ heads.q_HOD), heads.a_H[:, None]
        self.matrix = SeminormBound(own_BH, norm_upper(self.beta_BHND), heads.a_H)
        self.row = SeminormBound(own_BH.unsqueeze(-1), self.beta_BHN, a_H1)
        self.tau = self._tau()
        cross, root = self.softmax.slope_BHN.sqrt() * self.beta_BHN * ROUND, self.softmax.max_BHN.sqrt() * ROUND
        self.deviation = SeminormBound(self._own(self.own_BHN), cross, a_H1 * root)

    # seminorms --------------------------------------------------------------------------------------------------------

    def _tau(self) -> SeminormBound:
        """tau <= r t1 + r^2 t2. t1 is the exact norm of the linear functional, with the blocks of token i
        (a = s W_Q k~ and beta) and of the others (beta) combined: with c = e_k - p,

            t1^2 = |c|^2 |beta|^2 + 2 c_i beta.a + |a|^2,        t2 = (|c_i| + |c|) / 2 ||A||.

        Proof: docs/proofs.md#score-change.
        """
        heads, keys = self.heads, self.softmax.centred(self.keys)
        q_HOD = heads.s * heads.q_HOD
        a2 = ((keys @ (q_HOD @ q_HOD.mT)[:, None]) * keys).sum(-1)
        inner = heads.s * (self.q @ heads.k_HOD @ q_HOD.mT)
        cross = (inner.unsqueeze(-2) * keys).sum(-1)
        c2 = (1 - self.p).square() + self.softmax.square_BHN.unsqueeze(-1) - self.p.square()
        eye = torch.eye(self.p.shape[-1], dtype=self.p.dtype, device=self.p.device)
        c_own = eye - self.p.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        t1_2 = c2 * self.beta_BHN.unsqueeze(-1).square() + 2 * c_own * cross + a2
        t2 = (c_own.abs() + c2.clamp_min(0).sqrt()) / 2 * heads.a_H[:, None, None]
        t1 = t1_2.clamp_min(0).amax((-3, -2, -1)).sqrt() * ROUND
        return SeminormBound(t1, 0.0, t2.amax((-3, -2, -1)) * ROUND)

    def _own(self, own_BHN: Tensor) -> Tensor:
        """What eta_i does to its own row through its queries, by the norm of each head (..., B, H, N)."""
        return self.heads.norm_q_H[:, None] * own_BHN

    def _across(self, w_HN: Tensor) -> Tensor:
        """sqrt lambda_max(sum_il w_il beta_il beta_il^T): (..., B, H, N) -> (..., B)."""
        return norm_upper((w_HN.sqrt().unsqueeze(-1) * self.beta_BHND).flatten(-3, -2))

    def _moments(self, w_HN: Tensor) -> Tensor:
        """T for weights w_il p_ilk: from |Q_ilk| <= ||A_l|| |eta_i| |eta_k|, or the shared budget of the heads."""
        heads, wp = self.heads, w_HN.unsqueeze(-1) * self.p
        paired = (wp * heads.a_H.square()[:, None, None]).sum(-3).amax((-2, -1)).sqrt()
        return torch.minimum(paired, self.s * heads.norm_q * heads.norm_k * wp.amax((-3, -2, -1)).sqrt())

    def row_seminorm(self, w: Tensor) -> SeminormBound:
        own = (w.sqrt() * self.own_BHN).amax((-2, -1)) * self.heads.norm_q
        return SeminormBound(own, self._across(w * self.softmax.slope_BHN), self._moments(w))

    def entry_seminorms(self, z: Tensor) -> tuple[SeminormBound, SeminormBound]:
        w, most = self.p * z, z.amax(-1)
        own = self.s * norm_upper(w.sqrt().unsqueeze(-1) * self.softmax.centred(self.keys))
        nu, root = self.softmax.centring(w), (most * self.softmax.max_BHN).sqrt()
        whole = SeminormBound(own.amax((-2, -1)) * self.heads.norm_q, self._across(nu), self._moments(most))
        return whole, SeminormBound(self._own(own), nu.sqrt() * self.beta_BHN, self.heads.a_H[:, None] * root)

    def quadratic(self, g: Tensor) -> tuple[Tensor, float]:
        """min( sum_l ||G_l|| ||A_l||, s ||[sqrt(||G_l||) W_Ql]|| ||[sqrt(||G_l||) W_Kl]|| )."""
        heads, norm_g_CBH = self.heads, norm_upper(g)
        root = norm_g_CBH.sqrt()[..., None, None]
        by_q, by_k = (norm_upper((root * w_HOD).flatten(-3, -2)) for w_HOD in (heads.q_HOD, heads.k_HOD))
        return torch.minimum(norm_g_CBH @ heads.a_H, self.s * by_q * by_k), 0.0

    # values, and what is made of them ---------------------------------------------------------------------------------

    def combined(self, p_BG: Tensor, inputs_BG: Tensor) -> Tensor:
        """All heads in one norm, or one after the other."""
        heads = self.heads
        joined = (p_BG * self.values_BH + inputs_BG * heads.norm_v_H).square().sum(-1).sqrt()
        apart = (p_BG * self.outputs_BH + inputs_BG * heads.norm_m_H).sum(-1)
        return torch.minimum(heads.norm_o * joined, apart)

    def value_gradients(self, o: Tensor) -> tuple[Tensor, Tensor]:
        """||W_Vl o_l^T||; the gain is in the norms of W_V."""
        return norm_upper(o @ self.heads.v_HOD), o
