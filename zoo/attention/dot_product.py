"""Dot-product self-attention (Vaswani et al. 2017), its LoFAST rule (Havens et al. 2024, Theorem 1), and the local
rules that follow from theory/joint.py.

    F(X) = sum_l P_l X M_l,   P_l = softmax(s Q_l K_l^T),   M_l = W_V^l W_O^l,   s = 1 / sqrt(D / H)

Letters: B images, C classes, N tokens, D width, H heads, O = D / H (dh).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.attention.qkv import Split, qkv_split, split
from zoo.attention.softmax import QKVAttention
from zoo.attention.theory.joint import Heads, JointCore, measure, same
from zoo.attention.theory.softmax_row import nan_to_inf
from zoo.bounds.curvature import Expand, Expansion, curvature
from zoo.bounds.rules import Bound, Layer, expect, local_residual_rule, local_rule, residual_rule, rule
from zoo.spectral import sigma_upper

DENSE_LIMIT = 4096  # N D up to which zeta is the norm of the dense (N D, N D) matrix
DENSE_BYTES = 2**28  # memory for those matrices at a time
SOFTMAX: Callable[[Tensor], Tensor] = partial(torch.softmax, dim=-1)


class DotProductAttention(QKVAttention):
    """x (B, N, D) -> (B, N, D). `scale` is the factor s, default 1 / sqrt(D / H); the other options are those of
    `QKVAttention`."""

    def __init__(self, dim: int, num_heads: int, scale: float | None = None, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        self.scale = (dim // num_heads) ** -0.5 if scale is None else scale

    def scores(self, q_BHNO: Tensor, k_BHNO: Tensor, v_BHNO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q_BHNO, k_BHNO, v_BHNO


VARIANTS = {"dp": DotProductAttention}


def zeta(p_BHNN: Tensor, m_HDD: Tensor, norm_m_H: Tensor, residual: bool) -> Tensor:
    """zeta = || (I (x) I_d) + sum_l P_l (x) M_l^T ||, without the identity for a branch alone. Errata D7: I_d.

    Exact (verified) where the matrix is small, sum_l ||P_l|| ||M_l|| (+ 1) (eq. 12) where it is not. -> (B,)
    """
    n, d = p_BHNN.shape[-1], m_HDD.shape[-1]
    if n * d > DENSE_LIMIT:
        return sigma_upper(p_BHNN) @ norm_m_H + float(residual)
    chunk = max(1, DENSE_BYTES // (8 * (n * d) ** 2))
    norms = []
    for p in p_BHNN.split(chunk):
        matrix = torch.einsum("blij,lde->biejd", p, m_HDD).reshape(len(p), n * d, n * d)
        if residual:
            matrix.diagonal(dim1=-2, dim2=-1).add_(1)
        norms.append(sigma_upper(matrix))
    return torch.cat(norms)


def lofast(
    module: Callable[[Tensor], Tensor],
    content: DotProductAttention,
    residual: bool,
    attend: Callable[[Tensor], Tensor] = SOFTMAX,
    gain_H: Tensor | float = 1.0,
) -> Layer:
    """Theorem 1 of paper 004 with the errata D5, D7, D8:

        ||F(X') - F(X)|| <= zeta r + sum_l D_l(r) / 2 ( ||X M_l|| + ||M_l|| r ),    D_l = xi_l r + a_l r^2,
        xi_l = s ( ||W_Q K^T|| + ||Q W_K^T|| ),   a_l = s ||W_Q W_K^T||.

    Proof: P' X' - P X = P (X' - X) + (P' - P) X'; the softmax is 1/2-Lipschitz in l2 (D5); the logits move by
    s (Gamma_Q K^T + Q Gamma_K^T + Gamma_Q Gamma_K^T) with ||Gamma_Q K^T||_F <= ||W_Q K^T|| r. Biases of Q and K stay
    inside Q and K, that of V is added to every token alike because rows of P sum to 1.

    `module` is `content` itself, or attention around it whose P is attend(S), with rows that sum to 1: the softmax of S
    plus constants (window.py), or of each head an affine map of it with the linear part `gain_H` (gpsa.py).
    """
    expect(content.qkv, nn.Linear)
    expect(content.proj, nn.Linear)
    w_q, w_k, w_v = (w.double() for w in content.head_weights_3HOD().detach())
    w_o_HOD = content.proj.weight.detach().double().unflatten(1, (content.num_heads, -1)).permute(1, 2, 0)
    m_HDD = w_v.mT @ w_o_HOD
    norm_m_H = sigma_upper(m_HDD)
    a_H = abs(content.scale) * sigma_upper(w_q.mT @ w_k)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        q, k, _ = content.projections(x_BND)
        p_BHNN = attend(content.scale * q @ k.mT)
        xi_BH = abs(content.scale) * (sigma_upper(k @ w_q) + sigma_upper(q @ w_k))
        norm_xm_BH = sigma_upper(x_BND.unsqueeze(1) @ m_HDD)
        zeta_B = zeta(p_BHNN, m_HDD, norm_m_H, residual)

        def bound(r: Tensor) -> Tensor:
            r_1 = r.unsqueeze(-1)
            change_H = 0.5 * gain_H * r_1 * (xi_BH + a_H * r_1)  # of P_l
            return zeta_B * r + (change_H * (norm_xm_BH + norm_m_H * r_1)).sum(-1)

        y = module(x_BND)
        return (x_BND + y if residual else y), bound

    return layer


@rule(DotProductAttention)
def attention(module: DotProductAttention) -> Layer:
    """The branch alone (H = 0)."""
    return lofast(module, module, residual=False)


@residual_rule(DotProductAttention)
def residual_attention(module: DotProductAttention) -> Layer:
    """X + F(X) in one norm (H = I), never ||I|| + ||.||."""
    return lofast(module, module, residual=True)


# local rules, and second order ----------------------------------------------------------------------------------------


@split(DotProductAttention)
def dot_product_split(module: DotProductAttention) -> Split:
    """For windows around it that are joined; elsewhere it has the sharper rules below."""
    return qkv_split(module)


def heads_of(content: QKVAttention, gain_H: Tensor | float = 1.0) -> Heads:
    """The weights of `content`, whose scores are s q k^T plus constants."""
    expect(content.qkv, nn.Linear)
    expect(content.proj, nn.Linear)
    qkv_3HOD = content.head_weights_3HOD().detach().double()
    o_HOD = content.proj.weight.detach().double().unflatten(1, (content.num_heads, -1)).permute(1, 2, 0).contiguous()
    gain_H = torch.as_tensor(gain_H, dtype=o_HOD.dtype, device=o_HOD.device).expand(len(o_HOD))
    return measure(content.scale, qkv_3HOD, o_HOD, gain_H)


def lofast_local(
    module: Callable[[Tensor], Tensor],
    content: DotProductAttention,
    residual: bool,
    attend: Callable[[Tensor], Tensor] = SOFTMAX,
    mix: Callable[[Tensor], Tensor] = lambda p_BHNN: p_BHNN,
    gain_H: Tensor | float = 1.0,
) -> Layer:
    """||F(X') - F(X)|| <= zeta r + delta_2, with delta_2 >= ||(P' - P) X'||: the least of

        ||W_O|| E1(tau) [ r U_n + r^2 T_n + ||W_V|| r (r U_p + r^2 T_p) ],
        ||W_O|| sqrt( sum_l (lam_l |dS_l| (||V_c,l|| + ||W_V,l|| r))^2 ),
        sum_l lam_l |dS_l| (||V_c,l W_O,l|| + ||M_l|| r)

    where (U, T)_n and (U, T)_p are the seminorm bounds for the weights nu_il^2 p_ilk and max_k(p_ilk) p_ilk, lam the
    slope of the softmax on the box that the scores can reach, V_c = V - its mean. Proof of the first: a row of
    (P' - P) V is the integral of Cov_t(delta, v), at most E1(tau) sd(delta) nu. MATH-PROOFS.md section 2.9.

    `module` is `content` or attention around it with P = mix(attend(S)): attend(S) the softmax of S plus constants,
    `mix` an affine map of each head with the linear part `gain_H`.
    """
    heads = heads_of(content, gain_H)
    m_HDD = content.head_weights_3HOD()[2].detach().double().mT @ heads.o_HOD
    norm_m_H = sigma_upper(m_HDD)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        q, k, v = content.projections(x_BND)
        p_BHNN = attend(content.scale * q @ k.mT)
        mixed = mix(p_BHNN)
        core, zeta_B = JointCore(heads, q, k, v, p_BHNN, mixed), zeta(mixed, m_HDD, norm_m_H, residual)
        y = module(x_BND)
        return (x_BND + y if residual else y), lambda r: nan_to_inf(zeta_B * r + core.moved(same(r)))

    return layer


@local_rule(DotProductAttention)
def local_attention(module: DotProductAttention) -> Layer:
    """The branch alone."""
    return lofast_local(module, module, residual=False)


@local_residual_rule(DotProductAttention)
def local_residual_attention(module: DotProductAttention) -> Layer:
    """X + F(X) in one norm."""
    return lofast_local(module, module, residual=True)


def expand_attention(
    module: Callable[[Tensor], Tensor],
    content: DotProductAttention,
    attend: Callable[[Tensor], Tensor] = SOFTMAX,
    mix: Callable[[Tensor], Tensor] = lambda p_BHNN: p_BHNN,
    gain_H: Tensor | float = 1.0,
) -> Expand:
    """The expansion of `content`, or of attention around it; arguments as in `lofast_local`. Where P = mix of a
    softmax, the remainder sees the values `gain_H`-fold, and J the mixed P."""
    heads, plain = heads_of(content, gain_H), heads_of(content)
    qkv_HOD = torch.cat([heads.q_HOD, heads.k_HOD, plain.v_HOD])  # 3 H heads: one product instead of three

    def expand(x_BND: Tensor) -> Expansion:
        q, k, v = content.projections(x_BND)
        p_BHNN = attend(content.scale * q @ k.mT)
        mixed = mix(p_BHNN)
        core, norm_p_BH = JointCore(heads, q, k, v, p_BHNN, mixed), sigma_upper(mixed)
        through_values = torch.minimum(norm_p_BH.amax(-1) * plain.norm_v * plain.norm_o, norm_p_BH @ plain.norm_m_H)
        through_scores = core.linear(same(torch.ones_like(through_values)))

        def remainder(g_CBND: Tensor) -> Bound:
            of_core = core.remainder(split_heads(g_CBND, heads.o_HOD))
            return lambda r: of_core(same(r))

        def pull(g_CBND: Tensor) -> Tensor:
            """J^T g."""
            return join_heads(torch.cat(core.pull(split_heads(g_CBND, heads.o_HOD)), dim=-3), qkv_HOD)

        def push(v_CBND: Tensor) -> Tensor:
            """J v: what the scores do to the values, and the values themselves."""
            dq, dk, dv = split_heads(v_CBND, qkv_HOD).chunk(3, dim=-3)
            dp = heads.s * p_BHNN * (dq @ k.mT + q @ dk.mT)
            dp = dp - p_BHNN * dp.sum(-1, keepdim=True)
            return join_heads(dp @ core.values + mixed @ dv, heads.o_HOD)

        gain_B = through_values + through_scores
        return Expansion(module(x_BND), gain_B, lambda r: core.beta(same(r)), remainder, pull, push)

    return expand


@curvature(DotProductAttention)
def expand_dot_product(module: DotProductAttention) -> Expand:
    """The branch alone."""
    return expand_attention(module, module)


def split_heads(x: Tensor, w_HOD: Tensor) -> Tensor:
    """x W_l^T of every head in one product: (..., N, D) -> (..., H, N, O)."""
    return (x @ w_HOD.flatten(0, 1).mT).unflatten(-1, w_HOD.shape[:2]).transpose(-3, -2)


def join_heads(z: Tensor, w_HOD: Tensor) -> Tensor:
    """sum_l z_l W_l: (..., H, N, O) -> (..., N, D)."""
    return z.transpose(-3, -2).flatten(-2) @ w_HOD.flatten(0, 1)
