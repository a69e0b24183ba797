"""LoFAST's rule for dot-product attention (Havens et al. 2024, Theorem 1), also with mixing around its softmax.

    F(X) = sum_l P_l X M_l,   P_l = softmax(s Q_l K_l^T),   M_l = W_V^l W_O^l

Letters: B images, N tokens, D width, H heads (l), O = D / H (dh).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT, U, gamma
from zoo.attention.softmax.module import QKVAttention
from zoo.bounds.contracts import Bound, Layer
from zoo.bounds.first_order import added
from zoo.bounds.rule_table import expect
from zoo.spectral import absolute_norm, product_rounding, product_upper, sigma_upper

DENSE_LIMIT = 4096  # N D up to which zeta is the norm of the dense (N D, N D) matrix
DENSE_BYTES = 2**28  # memory for the matrices of one chunk
SOFTMAX: Callable[[Tensor], Tensor] = partial(torch.softmax, dim=-1)


def zeta(p_BHNN: Tensor, m_HDD: Tensor, norm_m_H: Tensor, residual: bool, off_m_H: Tensor | float) -> Tensor:
    """Return zeta = || (I (x) I_d) + sum_l P_l (x) M_l^T || (B,), without the identity for a branch alone.

    I_d: docs/references.md#erratum-lofast-identity. The norm is exact (verified) where the matrix is small, and sum_l
    ||P_l|| ||M_l|| (+ 1) (eq. 12) where it is not. `off_m_H` bounds the distance of the computed M_l from the exact
    one. The sum over heads may cancel, and rounds too; ||P_l|| <= sqrt(N), as its rows are not negative and sum to 1.
    """
    n, d = p_BHNN.shape[-1], m_HDD.shape[-1]
    if n * d > DENSE_LIMIT:
        return sigma_upper(p_BHNN) @ norm_m_H + float(residual)
    chunk = max(1, DENSE_BYTES // (8 * (n * d) ** 2))
    heads = len(m_HDD)
    off = (n**0.5 * (off_m_H + gamma(heads + 3) * absolute_norm(m_HDD)).sum() + 2 * U) * OUT
    norms = []
    for p in p_BHNN.split(chunk):
        matrix = torch.einsum("blij,lde->biejd", p, m_HDD).reshape(len(p), n * d, n * d)
        if residual:
            matrix.diagonal(dim1=-2, dim2=-1).add_(1)
        norms.append(sigma_upper(matrix))
    return torch.cat(norms) + off


def lofast(
    module: Callable[[Tensor], Tensor],
    content: QKVAttention,
    residual: bool,
    attend: Callable[[Tensor], Tensor] = SOFTMAX,
    gain_H: Tensor | float = 1.0,
) -> Layer:
    """Return the rule of LoFAST's Theorem 1 with its errata corrected (docs/references.md#errata).

        ||F(X') - F(X)|| <= zeta r + sum_l D_l(r) / 2 ( ||X M_l|| + ||M_l|| r ),    D_l = xi_l r + a_l r^2,
        xi_l = s ( ||W_Q K^T|| + ||Q W_K^T|| ),   a_l = s ||W_Q W_K^T||.

    Proof: P' X' - P X = P (X' - X) + (P' - P) X'; the softmax is 1/2-Lipschitz (docs/proofs.md#softmax-first-order);
    the logits move by s (Gamma_Q K^T + Q Gamma_K^T + Gamma_Q Gamma_K^T) with ||Gamma_Q K^T||_F <= ||W_Q K^T|| r. Biases
    of Q and K stay inside Q and K; that of V is added to every token alike because rows of P sum to 1.

    `module` is `content` itself, or attention around it whose P is attend(S), with rows that sum to 1. attend(S) is the
    softmax of S plus constants (window.py), or for each head an affine map of it with the linear part `gain_H`
    (gpsa.py).

    Proof: docs/proofs.md#lofast.
    """
    expect(content.qkv, nn.Linear)
    expect(content.proj, nn.Linear)
    w_q, w_k, w_v = (w.double() for w in content.head_weights_3HOD().detach())
    w_o_HOD = content.proj.weight.detach().double().unflatten(1, (content.num_heads, -1)).permute(1, 2, 0)
    m_HDD = w_v.mT @ w_o_HOD
    off_m_H = product_rounding(w_v.mT, w_o_HOD)
    norm_m_H = sigma_upper(m_HDD) + off_m_H
    a_H = abs(content.scale) * product_upper(w_q.mT, w_k)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        q, k, _ = content.projections(x_BND)
        p_BHNN = attend(content.scale * q @ k.mT)
        xi_BH = abs(content.scale) * (product_upper(k, w_q) + product_upper(q, w_k))
        x_B1ND = x_BND.unsqueeze(1)
        norm_xm_BH = product_upper(x_B1ND, m_HDD) + absolute_norm(x_B1ND) * off_m_H
        zeta_B = zeta(p_BHNN, m_HDD, norm_m_H, residual, off_m_H)

        def bound(r: Tensor) -> Tensor:
            r_1 = r.unsqueeze(-1)
            change_H = 0.5 * gain_H * r_1 * (xi_BH + a_H * r_1)  # bounds the change of P_l
            return zeta_B * r + (change_H * (norm_xm_BH + norm_m_H * r_1)).sum(-1)

        y = module(x_BND)
        return (added(x_BND, y) if residual else y), bound

    return layer
