"""L2 self-attention (Kim, Papamakarios, Mnih 2021): Lipschitz, because W_K = W_Q and because of A_h.

    F(X) = sum_h P_h X A_h W_V^h W_O^h,     A_h = W_Q^h W_Q^hT / sqrt(D / H),
    P_h = softmax_j( -||q_i - k_j||^2 / sqrt(D / H) ),     q_i = x_i W_Q^h,  k_j = x_j W_K^h,  W_K = W_Q

Without A_h (as in CertViT's code, docs/references.md#erratum-certvit-values), or with a separate W_K, there is no
Lipschitz constant. The values X A_h W_V^h are Q_h M_h with M_h = W_Q^hT W_V^h / sqrt(D / H), a (dh, dh) matrix: they
need no projection from width D.

Letters: B images, N tokens, D width, H heads, O = D / H (dh), E width of q, k and v on the kernel.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certizoo import UserError
from zoo.arithmetic import OUT, gamma
from zoo.attention.lipschitz import SMALLEST
from zoo.attention.softmax.module import SoftmaxAttention, check_heads
from zoo.attention.softmax.qkv import AttentionBounds, Split, least
from zoo.attention.softmax.rows import RoundedRows, Rows, in_heads
from zoo.attention.softmax.rules import softmax_rules
from zoo.attention.theory.core import Score
from zoo.bounds.contracts import Bound, Layer, Precision, Rounded
from zoo.bounds.hypotheses import Shapes, power_vectors
from zoo.bounds.primitives import Map, matrix_product, product
from zoo.bounds.rounding import ROOT, TINY, composed, in_range, longest, size
from zoo.bounds.rule_table import NoRule, expect, register
from zoo.layers.cap import cap_
from zoo.spectral import absolute_norm, product_upper, sigma_upper, start_vectors


class L2Attention(SoftmaxAttention):
    """L2 attention, x (B, N, D) -> (B, N, D). W_Q, W_K, W_V have no bias: if tied, it would cancel in the distance.

    Args:
        dim: width of the tokens.
        num_heads: number of heads.
        tied: W_K = W_Q; otherwise W_K is a separate matrix, which is NOT Lipschitz and has no global rule.
        proj_bias: whether W_O has a bias.
        q_cap: cap on the spectral norm of the whole W_Q (None: free).
        k_cap: the same for W_K.
        v_cap: the same for W_V.
        o_cap: the same for W_O.
    """

    power_o_1D: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        tied: bool = True,
        proj_bias: bool = True,
        q_cap: float | None = None,
        k_cap: float | None = None,
        v_cap: float | None = None,
        o_cap: float | None = None,
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        if tied and k_cap is not None:
            raise UserError("k_cap is set, but tied L2 attention has no W_K; set q_cap, or tied=false")
        self.num_heads = num_heads
        # The score is q . k - ||k||^2 / 2; the factor stays out of q and k, so that both are rounded alike.
        self.scale = 2 * (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = None if tied else nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        # The vectors of MSVP's power iteration (zoo.penalty), kept with the weights they belong to.
        for name in self._projections():
            self.register_buffer(f"power_{name}_HD", start_vectors(num_heads, dim))
        self.register_buffer("power_o_1D", start_vectors(1, dim))
        self._caps = {"q": q_cap, "k": k_cap, "v": v_cap, "o": o_cap}

    def heads(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v for the fused kernel, of width E.

        -||q_i - k_j||^2 is 2 (q_i . k_j - ||k_j||^2 / 2) up to a constant of the row: ||k||^2 goes into extra columns
        of k, against ones in q. v has the same width E, as the fused kernels require, with zeros that `merge` drops.
        """
        q = self._split(self.q(x_BND))
        k = q if self.k is None else self._split(self.k(x_BND))
        width = -(-(q.shape[-1] + 2) // 8) * 8  # E: fused kernels want a multiple of 8
        m_HOE = F.pad(self.values_HOO(), (0, width - q.shape[-1]))
        v = torch.einsum("bhno,hoe->bhne", q, m_HOE)
        # The mean key is subtracted from both q and k: no distance changes, and ||k||^2 becomes as small as it can be.
        mean = k.detach().mean(-2, keepdim=True)
        return F.pad(q - mean, (0, width - q.shape[-1]), value=1.0), _with_squares(k - mean, width), v

    def merge(self, y_BHNE: Tensor) -> Tensor:
        return self.proj(y_BHNE[..., : self.proj.in_features // self.num_heads].transpose(1, 2).flatten(2))

    def finish_init(self) -> None:
        """Put the caps on. The model calls this once its weights have their initial values."""
        for name, part in self._projections().items():
            cap_(part, (self._caps[name],))
        cap_(self.proj, (self._caps["o"],))

    def spectral_terms(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the terms for `zoo.penalty`."""
        for name, part in self._projections().items():
            yield name, part.weight.unflatten(0, (self.num_heads, -1)), self.get_buffer(f"power_{name}_HD")
        yield "o", self.proj.weight[None], self.power_o_1D

    def _projections(self) -> dict[str, nn.Linear]:
        return {"q": self.q, "v": self.v} | ({} if self.k is None else {"k": self.k})

    def _split(self, y_BND: Tensor) -> Tensor:
        return y_BND.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def values_HOO(self) -> Tensor:
        """Return M_h = W_Q^hT W_V^h / sqrt(dh) (the stored weights are the transposes)."""
        w_q, w_v = (part.weight.unflatten(0, (self.num_heads, -1)) for part in (self.q, self.v))
        return w_q @ w_v.mT * (self.scale / 2)


def _with_squares(k: Tensor, width: int) -> Tensor:
    """Return (k, -||k||^2 / 2, 0 ...), the square as the sum of two columns.

    They are its rounded value and the rest, so that it has 16 bits in bf16: the distance is a small difference of large
    squares.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    square = -0.5 * k.to(wide).square().sum(-1, keepdim=True)
    high = square.to(k.dtype)
    low = (square - high).to(k.dtype)
    return F.pad(torch.cat((k, high, low), -1), (0, width - k.shape[-1] - 2))


VARIANTS = {"l2": L2Attention}


def distance_bound(n: int) -> float:
    """Return Phi(N), the root of x exp(x + 1) = N - 1, rounded upwards.

    With N tokens no row of P has sum_j P_ij ||y_i - y_j||^2 above it, for logits -||y_i - y_j||^2 (Kim et al., proof of
    Theorem 3.2).
    """
    x = math.log(n)
    for _ in range(20 if n > 1 else 0):  # Newton for x + log x = log(N - 1) - 1
        x *= (math.log(n - 1) - math.log(x)) / (1 + x)
    while x * math.exp(x + 1) < (n - 1) * (1 + 1e-14):
        x *= 1 + 1e-13
    return x


def _refuse_scale(module: L2Attention) -> None:
    if not module.scale > 0:
        raise NoRule(module, f"its scale is {module.scale}; distances need a scale above 0")


def l2(module: L2Attention) -> Layer:
    """Return the global rule (docs/proofs.md#l2-attention, with M_h kept whole and the heads sharing one budget).

        Lip <= [ sqrt(N) (1 + 2 Phi) + 2 Phi ] ||W_O||
               min( sqrt( sum_h ||W_Q^h||^2 ||M_h||^2 ), ||W_Q|| max_h ||M_h|| ).

    Proof for one head, y = X W_Q^h / dh^(1/4) and m_i = sum_j P_ij y_j; so f = m M_h dh^(1/4):

        dm_i = sum_j P_ij dy_j + 2 Cov_i dy_i + 2 sum_j P_ij (y_j - m_i) (y_i - y_j)^T dy_j.

    ||P|| <= sqrt(N). ||Cov_i|| <= sum_j P_ij ||y_j - m_i||^2 <= sum_j P_ij ||y_j - y_i||^2 <= Phi, block by block. The
    last term is at most 2 Phi max_j ||dy_j|| by Cauchy-Schwarz, in each of N rows. Together ||dm|| <= [...] ||dy||.
    Then ||dF||^2 <= ||W_O||^2 sum_h ||M_h||^2 [...]^2 ||dX W_Q^h||^2, where sum_h ||dX W_Q^h||^2 = ||dX W_Q||^2.

    SpecFormer, eq. 40, has ||W_Q^h||^2 ||W_V^h||^2 under the root and omits A_h; gradient ascent violates it
    (docs/references.md#erratum-l2-power).
    """
    if module.k is not None:
        raise NoRule(module, "L2 attention with a separate W_K (tied=false) is not Lipschitz; set tied=true")
    _refuse_scale(module)
    for part in (module.q, module.v, module.proj):
        expect(part, nn.Linear)
    w_q_HOD, w_v_HOD = (w.weight.detach().double().unflatten(0, (module.num_heads, -1)) for w in (module.q, module.v))
    norm_m_H = product_upper(w_q_HOD, w_v_HOD.mT) * module.scale / 2
    apart = (sigma_upper(w_q_HOD) * norm_m_H).norm()
    shared = sigma_upper(module.q.weight) * norm_m_H.amax()
    weights = torch.minimum(apart, shared) * sigma_upper(module.proj.weight)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        n = x_BND.shape[-2]
        phi = distance_bound(n)
        lipschitz = (math.sqrt(n) * (1 + 2 * phi) + 2 * phi) * weights
        return module(x_BND), lambda r: lipschitz.clamp_min(SMALLEST) * r

    return layer


# local rules, and second order ----------------------------------------------------------------------------------------


def l2_split(module: L2Attention) -> Split:
    """Return the steps: scores -|q - k|^2 s / 2 = s (q . k - |k|^2 / 2) up to a constant of the row, values Q_h M_h."""
    _refuse_scale(module)
    for part in module.children():
        expect(part, nn.Linear)
    w_q, w_k = (
        part.weight.detach().double().unflatten(0, (module.num_heads, -1)) for part in (module.q, module.k or module.q)
    )
    w_v = module.v.weight.detach().double().unflatten(0, (module.num_heads, -1))
    w_3HOD = torch.stack([w_q, w_k, module.values_HOO().detach().double().mT @ w_q])
    # M_h and M_h^T W_Q^h are sums that may cancel: float64 holds them up to an error relative to their terms.
    terms = gamma(module.q.in_features + 4) + gamma(w_q.shape[1] + 2)
    off_H = terms * module.scale / 2 * absolute_norm(w_v) * absolute_norm(w_q).square() * OUT

    def project(x_BND: Tensor) -> Tensor:
        """Project as the module does, the rounding of M_h included."""
        q, k = (torch.einsum("bnd,hod->bhno", x_BND, w) for w in (w_q, w_k))
        return torch.stack([q, k, q @ module.values_HOO().detach().double()])

    score = Score(module.scale, kappa=1.0, tied=module.k is None)
    rounded = partial(_rounded, module)
    return Split(score, project, w_3HOD, module.proj, rounded=rounded, off_values=off_H.norm() * OUT)


def _rounded(module: L2Attention, precision: Precision) -> RoundedRows:
    """Bound queries and keys minus the mean key, and values q M_h.

    Subtracting the same number from q and k changes no distance, for any number. M_h is itself a product, whose
    moduli are used for those of M_h.
    """
    heads, terms = module.num_heads, module.q.in_features
    weights = {name: part.weight.detach().double() for name, part in module._projections().items()}
    w_q, w_v = (weights[name].unflatten(0, (heads, -1)) for name in ("q", "v"))
    m_HOO, moduli_HOO = module.scale / 2 * w_q @ w_v.mT, module.scale / 2 * w_q.abs() @ w_v.abs().mT
    norms = sigma_upper(m_HOO).amax(), sigma_upper(moduli_HOO).amax()
    more = precision.gamma(terms + 4) + 4 * precision.u
    split = partial(in_heads, heads=heads)
    queries, keys = (
        matrix_product(weights.get(name, weights["q"]), None, precision, shaped=split) for name in ("q", "k")
    )
    values = product(lambda q: q @ m_HOO, lambda q: q @ moduli_HOO, lambda y: norms, m_HOO.shape[1], precision, more)

    def around(x_BWND: Tensor) -> Rows:
        k = keys(x_BWND)
        q = k if module.k is None else queries(x_BWND)
        return Rows(_less_mean(q, k, precision), _less_mean(k, k, precision), composed([queries, values])(x_BWND))

    return around


def _less_mean(rows: Rounded, keys: Rounded, precision: Precision) -> Rounded:
    """Bound rows minus the mean of the keys of their head.

    The mean moves by no more than the keys do, over all rows together. Its error is at most theirs, plus gamma_{N+2} +
    u of theirs.
    """
    y, u = rows.y - keys.y.mean(-2, keepdim=True), precision.u
    share = (precision.gamma(y.shape[-2] + 4) + u) * (1 + u)

    def radius(r: Tensor) -> Tensor:
        return rows.radius(r) if rows is keys else rows.radius(r) + keys.radius(r)

    def error(length: Map, of: str, r: Tensor, e: Tensor) -> Tensor:
        e_q, e_k = (getattr(one, of)(r, e) for one in (rows, keys))
        keys_B, y_B = length(keys.y) + keys.radius(r) + e_k, length(y) + radius(r)
        into_B = e_k + (e_q if rows is not keys or length is longest else 0.0) + share * keys_B
        return in_range(keys_B + y_B, (into_B + u * (y_B + into_B)) * OUT + TINY, ROOT)

    return Rounded(y, radius, partial(error, size, "error"), partial(error, longest, "row_error"))


def local_l2(module: L2Attention) -> Layer:
    """Return the lesser of the global rule and the one with the softmax at the clean point.

    Around a point there is also a bound for a separate W_K.
    """
    local = AttentionBounds(module, module).layer
    return least(l2(module), local) if module.k is None else local


def l2_shapes(module: L2Attention) -> Shapes:
    """Return the shapes: every projection maps width D to width D."""
    dim = module.q.in_features
    weights = dict.fromkeys(("q.weight", "k.weight", "v.weight", "proj.weight"), (dim, dim))
    return {**weights, **power_vectors("power_q_HD", "power_k_HD", "power_v_HD", "power_o_1D")}


register(L2Attention, softmax_rules(l2, l2_split, local_l2, l2_shapes))  # second order: docs/proofs.md#l2-attention
