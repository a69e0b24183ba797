"""Bounds of one attention layer, and of a whole model, as the papers state them, for comparison only.

None of these enters a certificate, which is made of the rules in `zoo`. Each function takes an attention module and
clean tokens x (B, N, D) and returns a bound of the map with its residual,

    ||F(X') - F(X)||_F <= bound(r)  for ||X' - X||_F <= r,      F(X) = X + attention(X)      (H = I),

as a function r (..., B) -> (..., B). Where a paper's condition fails, the bound is NaN. A bound whose name ends in
`as_printed` is refuted (tests/certify/papers/test_analysis.py finds the instances); the others hold.

Letters: B images, N tokens, D width, H heads (l), O = D / H; s the scale of the scores; M_l = W_V^l W_O^l. Biases of Q
and K stay inside Q and K, that of V cancels.
"""

import math

import torch
from torch import Tensor, nn

from certify.shared.bake import bake
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.l2 import L2Attention, distance_bound
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.lofast import zeta
from zoo.attention.scsa import ScaledCosineAttention
from zoo.bounds.contracts import Bound
from zoo.bounds.first_order import classifier_of
from zoo.layers.norms import LayerProject, SmoothProject
from zoo.spectral import sigma_upper

SMALL = 2.0**-100  # a radius whose products with the norms stay within the range of the rules

# dot-product attention: LoFAST ----------------------------------------------------------------------------------------


class Heads:
    """The matrices of Theorem 1 of LoFAST for one layer at clean tokens."""

    def __init__(self, module: DotProductAttention, x_BND: Tensor) -> None:
        self.module, self.x_BND, self.scale = module, x_BND, abs(module.scale)
        self.w_q, self.w_k, w_v = (w.double() for w in module.head_weights_3HOD().detach())
        w_o_HOD = module.proj.weight.detach().double().unflatten(1, (module.num_heads, -1)).permute(1, 2, 0)
        self.m_HDD = w_v.mT @ w_o_HOD
        self.norm_m_H = sigma_upper(self.m_HDD)
        self.q, self.k, _ = module.projections(x_BND)
        self.p_BHNN = self.attend(x_BND)

    def attend(self, x_BND: Tensor) -> Tensor:
        """Return P_l, eq. 4: (B, H, N, N)."""
        q, k, _ = self.module.projections(x_BND)
        return (self.module.scale * q @ k.mT).softmax(-1)

    def first_naive(self) -> Tensor:
        """Return 1 + sum_l ||P_l|| ||M_l||, eq. 12: (B,)."""
        return 1 + sigma_upper(self.p_BHNN) @ self.norm_m_H

    def change_of_p(self, r: Tensor, slope_BH: Tensor) -> Tensor:
        """Return s r (slope + r ||W_Q W_K^T||), delta_21 of section 5.1: (..., B, H).

        The softmax counts as 1-Lipschitz, eq. 20. It is 1/2-Lipschitz, so this is sound and twice too large.
        """
        r_1 = r.unsqueeze(-1)
        return self.scale * r_1 * (slope_BH + sigma_upper(self.w_q.mT @ self.w_k) * r_1)

    def xi(self) -> Tensor:
        """Return ||W_Q K^T|| + ||Q W_K^T||, eq. 26: (B, H)."""
        return sigma_upper(self.k @ self.w_q) + sigma_upper(self.q @ self.w_k)

    def values(self, r: Tensor) -> Tensor:
        """Return ||X M_l|| + ||M_l|| r, eq. 18: (..., B, H)."""
        return sigma_upper(self.x_BND.unsqueeze(1) @ self.m_HDD) + self.norm_m_H * r.unsqueeze(-1)

    def second(self, r: Tensor) -> Tensor:
        """Return delta_2^(2), eq. 28."""
        return (self.change_of_p(r, self.xi()) * self.values(r)).sum(-1)


def naive(module: DotProductAttention, x_BND: Tensor) -> Bound:
    """Return (1 + sum_l ||P_l|| ||M_l||) r + delta_2^(2)(r): LoFAST, eq. 12 in place of zeta, with eq. 28."""
    heads = Heads(module, x_BND)
    return lambda r: heads.first_naive() * r + heads.second(r)


def naive_eq_12_as_printed(module: DotProductAttention, x_BND: Tensor) -> Bound:
    """Return (1 + sum_l ||P_l|| ||M_l||) r: LoFAST, eq. 12, which Figure 1 shows beside whole bounds.

    Error: it bounds only the first part, Delta_1 of eq. 10, and omits the effect of the change of P (eq. 11). See
    docs/references.md#erratum-lofast-eq12.
    """
    heads = Heads(module, x_BND)
    return lambda r: heads.first_naive() * r


def lofast_theorem_1(module: DotProductAttention, x_BND: Tensor) -> Bound:
    """Return zeta r + delta_2^(2)(r): LoFAST, Theorem 1 with eq. 28.

    zeta, eq. 15, has I_d where the paper prints I_n (otherwise the sizes do not fit). The rule of
    `zoo.attention.dot_product` has half of delta_2: see `change_of_p`. Proof: docs/proofs.md#paper-lofast.
    """
    heads = Heads(module, x_BND)
    zeta_B = zeta(heads.p_BHNN, heads.m_HDD, heads.norm_m_H, residual=True, off_m_H=0.0)  # as the paper: no rounding
    return lambda r: zeta_B * r + heads.second(r)


def score_norm(heads: Heads) -> Tensor:
    """Return ||M_l(X)|| of Lemma 2 of LoFAST, in the form of its appendix B.4: (B, H).

    It is the norm of Gamma -> Gamma W_Q K^T + Q W_K^T Gamma^T, dense with (N^2, N D) entries for each head.
    """
    return _score_norm(heads, heads.q @ heads.w_k)


def score_norm_eq_25_as_printed(heads: Heads) -> Tensor:
    """Return the same with eq. 25's K W_Q^T in the second term. Error: it is the transpose of the correct matrix.

    See docs/references.md#erratum-lofast-eq25.
    """
    return _score_norm(heads, heads.k @ heads.w_q)


def _score_norm(heads: Heads, second_BHND: Tensor) -> Tensor:
    first_BHND = heads.k @ heads.w_q
    n, d = first_BHND.shape[-2:]
    eye = torch.eye(n, dtype=first_BHND.dtype, device=first_BHND.device)
    by_row = torch.einsum("im,bhjc->bhijmc", eye, first_BHND)
    by_column = torch.einsum("jm,bhic->bhijmc", eye, second_BHND)
    return sigma_upper((by_row + by_column).reshape(*first_BHND.shape[:2], n * n, n * d))


# dot-product attention: SpecFormer ------------------------------------------------------------------------------------


def specformer(module: DotProductAttention, x_BND: Tensor) -> Bound:
    """Return 1 + Lip with Theorem 4.3 of SpecFormer (eq. 9) for every head, over the ball of radius r.

        Lip_l = N (N + 1) (||X||_F + r)^2 [ ||W_V|| ||W_Q|| ||W_K|| + ||W_V|| ],   Lip = ||W_O|| sqrt( sum_l Lip_l^2 ).

    Condition: ||X||_F + r >= 1, else the bound is NaN. From eq. 36 to 37 the P_ij ||W_V|| that stands alone is also
    multiplied by (B + r)^2, which makes it smaller without this condition. The theorem is for one head without W_O, and
    omits the scale, so that it holds for |s| <= 1 (a larger one is restored here). A bias of Q is a row of W_Q for a
    further entry of every token, which is 1: ||X||_F^2 grows by N.

    Proof: docs/proofs.md#paper-specformer.
    """
    w_q, w_k, w_v = (w.double() for w in module.head_weights_3HOD().detach())
    n = x_BND.shape[-2]
    square_B = x_BND.square().sum((-2, -1))
    if module.qkv.bias is not None:
        b_q = module.qkv.bias.detach().double().unflatten(0, (3, module.num_heads, -1))[0]
        w_q = torch.cat([w_q, b_q.unsqueeze(-1)], -1)
        square_B = square_B + n
    product_H = max(1.0, abs(module.scale)) * sigma_upper(w_q) * sigma_upper(w_k)
    heads = (sigma_upper(w_v) * (product_H + 1)).norm() * sigma_upper(module.proj.weight)

    def bound(r: Tensor) -> Tensor:
        reach = square_B.sqrt() + r
        return torch.where(reach >= 1, (1 + n * (n + 1) * reach.square() * heads) * r, torch.nan)

    return bound


# Lipschitz attention: SpecFormer, Theorem D.1 -------------------------------------------------------------------------


def _slope(lipschitz: Tensor) -> Bound:
    """Return the bound (1 + Lip) r."""
    return lambda r: (1 + lipschitz) * r


def _l2(module: L2Attention, x_BND: Tensor, power: int) -> Bound:
    n = x_BND.shape[-2]
    w_q, w_v = (w.weight.detach().double().unflatten(0, (module.num_heads, -1)) for w in (module.q, module.v))
    weights = (sigma_upper(w_q) ** power * sigma_upper(w_v).square()).sum().sqrt() * sigma_upper(module.proj.weight)
    return _slope(math.sqrt(n / w_q.shape[1]) * (4 * distance_bound(n) + 1) * weights)


def l2_eq_40(module: L2Attention, x_BND: Tensor) -> Bound:
    """Return 1 + Lip with eq. 40 of SpecFormer (Kim et al. 2021), corrected.

        Lip = sqrt(N) / sqrt(D / H) (4 phi^-1(N - 1) + 1) sqrt( sum_h ||W_Q^h||^4 ||W_V^h||^2 ) ||W_O||

    with the power that A_h = W_Q^h W_Q^hT / sqrt(D / H) brings (docs/proofs.md#l2-attention). phi(x) = x exp(x + 1).
    """
    return _l2(module, x_BND, 4)


def l2_eq_40_as_printed(module: L2Attention, x_BND: Tensor) -> Bound:
    """Return the same with ||W_Q^h||^2 under the root. Error: A_h is omitted, so that a large W_Q violates it.

    See docs/references.md#erratum-l2-power.
    """
    return _l2(module, x_BND, 2)


def ln_eq_41_as_printed(module: LipschitzNormAttention, x_BND: Tensor) -> Bound:
    """Return 1 + Lip with Lip = 11 ||W_O|| sqrt( sum_h ||W_Q^h||^2 ||W_K^h||^2 ): SpecFormer, eq. 41.

    Error: it contains no W_V, and with one token the layer is x W_V W_O. See docs/references.md#erratum-ln-values.
    """
    w_q, w_k, _ = module.head_weights_3HOD().detach().double()
    return _slope(11 * sigma_upper(module.proj.weight) * (sigma_upper(w_q) * sigma_upper(w_k)).norm())


def scsa_eq_42(module: ScaledCosineAttention, x_BND: Tensor) -> Bound:
    """Return 1 + Lip with eq. 42 of SpecFormer.

        Lip = 2 nu e^-1/2 [ N (N - 1) tau ||W_K|| + (N - 1) tau ||W_Q|| + N ||W_V|| ] ||W_O||

    The equation is for one head without W_O; the heads share one budget, so the norms of the whole matrices replace
    theirs. Loose. Proof: docs/proofs.md#paper-scsa.
    """
    n, tau = x_BND.shape[-2], abs(module.scale)
    norm_q, norm_k, norm_v = sigma_upper(module.qkv.weight.detach().unflatten(0, (3, -1)))
    sum_ = n * (n - 1) * tau * norm_k + (n - 1) * tau * norm_q + n * norm_v
    return _slope(2 * abs(module.nu) / math.sqrt(module.eps) * sum_ * sigma_upper(module.proj.weight))


# whole models: CertViT ------------------------------------------------------------------------------------------------


def product(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    """Return the product of the layers' Lipschitz constants, from pixels to logits: a scalar.

    This is CertViT, eq. 2 and section 3.6. Residual branches count as 1 + Lip, GELU as 1.12890... (the paper's 1.12 is
    below its largest slope), L2 attention with the corrected constant. Normalisations and the patch embedding, which
    the paper's code omits, are included: a norm is replaced by c I with c its global constant, max|gamma| / sqrt(eps)
    for a LayerNorm. Every rule is then proportional to r, and the chain of rules is the product. Infinite for
    dot-product attention.

    Proof: docs/proofs.md#paper-product.
    """
    stand_in = bake(model)
    if any(isinstance(module, DotProductAttention) for module in stand_in.modules()):
        return torch.tensor(math.inf, dtype=torch.float64)
    for name, module in list(stand_in.named_modules()):
        if isinstance(module, nn.LayerNorm):
            stand_in.set_submodule(name, _constant(module))
        elif isinstance(module, LayerProject | SmoothProject):
            stand_in.set_submodule(name, nn.Identity())
    trunk, head = classifier_of(stand_in)
    _, bound = trunk(images_BCHW[:1].double())
    r = torch.full((1,), SMALL, dtype=torch.float64)
    return bound(r).squeeze() / SMALL * sigma_upper(head.weight)


def _constant(norm: nn.LayerNorm) -> nn.Linear:
    gamma = 1.0 if norm.weight is None else float(norm.weight.abs().max())
    (dim,) = norm.normalized_shape
    stand_in = nn.Linear(dim, dim, bias=False, dtype=torch.float64).requires_grad_(False)
    stand_in.weight.copy_(gamma / math.sqrt(norm.eps) * torch.eye(dim))
    return stand_in
