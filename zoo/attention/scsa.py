"""Scaled cosine similarity attention (LipsFormer, Qi et al. 2023, section 4.1.2).

    F(X) = sum_l nu softmax(tau Q^ K^^T) V^ W_O^l,     rows q^ = q / sqrt(||q||^2 + e), the same for k and v

This is the paper's form. The released code normalises q and k alone, by max(||.||, 1e-12), and has tau = 10, no nu.
Letters: B images, N tokens, D width, H heads, O = D / H.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.arithmetic import U, nan_to_inf
from zoo.attention.lipschitz import global_layer
from zoo.attention.softmax.module import QKVAttention
from zoo.attention.softmax.projected_forms import ProjectedForms, Projection, behind
from zoo.attention.softmax.qkv import QKVTransform, Split, qkv_split
from zoo.attention.softmax.rows import RoundedRows, Rows, normalised, projected
from zoo.attention.softmax.rules import softmax_rules
from zoo.attention.theory.core import QKVRadii
from zoo.bounds.contracts import Bound, Expansion, Layer, Precision, Rounded
from zoo.bounds.rule_table import NoRule, register
from zoo.layers.norm_forms import BoundedForms
from zoo.layers.norms import bounded_normalisation, normalisation_remainder, smooth_expansion


class ScaledCosineAttention(QKVAttention):
    """Scaled cosine similarity attention, x (B, N, D) -> (B, N, D).

    Args:
        dim: width of the tokens.
        num_heads: number of heads.
        tau: the temperature; the paper gives no value, 10 is that of the released code.
        nu: the size of v^.
        eps: the e under the root. The Lipschitz constant grows with e^-1/2 (1e6 for the code's 1e-12;
            docs/references.md#erratum-scsa-eps), while ||q||^2 is about 5 to 20 a head after a LayerNorm at the start
            (width 192 to 768): 0.1 hardly changes the cosine and costs a factor of 3.
        options: those of `QKVAttention`.
    """

    def __init__(
        self, dim: int, num_heads: int, tau: float = 10.0, nu: float = 1.0, eps: float = 0.1, **options: Any
    ) -> None:
        super().__init__(dim, num_heads, **options)
        self.scale, self.nu, self.eps = tau, nu, eps

    def scores(self, q_BHNO: Tensor, k_BHNO: Tensor, v_BHNO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._row(q_BHNO), self._row(k_BHNO), self._row(v_BHNO, self.nu)

    def _row(self, u: Tensor, size: float = 1.0) -> Tensor:
        return u * (torch.rsqrt(u.square().sum(-1, keepdim=True) + self.eps) * size)


VARIANTS = {"scsa": ScaledCosineAttention}


def scsa(module: ScaledCosineAttention) -> Layer:
    """Return the global rule.

    With pi = 1 / (1 + (N - 1) exp(-2 tau)), an upper bound of every p_ij,

        Lip <= nu e^-1/2 [ tau ||W_Q|| + tau sqrt(N min(pi, 1/2)) ||W_K|| + sqrt(N pi) ||W_V|| ] ||W_O||,

    for N = 1 only nu e^-1/2 ||W_V|| ||W_O||. Proof. u -> u / sqrt(||u||^2 + e) has Lipschitz constant e^-1/2 and maps
    into the unit ball. So |s_ij| <= tau, and p_ij = 1 / (1 + sum_{l != j} exp(s_il - s_ij)) <= pi. In one head, on
    normalised rows,

        dF_i = nu ( sum_j p_ij dv_j + Cov_{p_i}(ds_i, v) ),      ds_ij = tau (dq_i . k_j + q_i . dk_j).

    P has rows of sum 1 and columns of sum <= N pi: ||P dV|| <= sqrt(N pi) ||dV||. ||Cov_{p_i}(ds_i, v)|| <=
    sd_{p_i}(ds_i), because v lies in the unit ball. The first part of ds has sd <= tau ||dq_i||, because k does too.
    The second has Var_{p_i} <= ||diag(p_i) - p_i p_i^T|| ||ds_i||^2 <= min(pi, 1/2) tau^2 ||dK||^2 for each of N rows.

    SpecFormer, eq. 42, has 2 N (N - 1) tau for W_K, 2 (N - 1) tau for W_Q and 2 N for W_V.

    Proof: docs/proofs.md#scsa.
    """
    tau = abs(module.scale)
    size = abs(module.nu) / _root(module)

    def gains(n: int) -> tuple[float, float, float]:
        if n == 1:
            return 0.0, 0.0, size
        pi = 1 / (1 + (n - 1) * math.exp(-2 * tau))
        return size * tau, size * tau * math.sqrt(n * min(pi, 0.5)), size * math.sqrt(n * pi)

    return global_layer(module, gains)


def _root(module: ScaledCosineAttention) -> float:
    """Return eps^1/2. Raises NoRule without one: then a row near 0 has no Lipschitz constant."""
    if not module.eps > 0:
        raise NoRule(module, f"its eps is {module.eps}; set it above 0")
    return math.sqrt(module.eps)


# local rules, and second order ----------------------------------------------------------------------------------------


def scsa_split(module: ScaledCosineAttention) -> Split:
    """Return the steps: the bounded normalisation of radius sqrt(e) on every row, divided by sqrt(e), then the core.

    Rows join by their maxima, as in zoo/layers/norms.py. Proof: docs/proofs.md#scsa.
    """
    root = _root(module)
    sizes_3 = (1 / root, 1 / root, module.nu / root)

    def leaves(projected_3BHNO: Tensor, first: Projection, own: Expansion, core: Expansion) -> tuple[Expansion, ...]:
        u, off = projected_3BHNO.transpose(0, 1), 2 * U * max(map(abs, sizes_3))
        sized = u.new_tensor(sizes_3)[:, None, None, None]
        rows = BoundedForms(u, root, outer=lambda r: sized * r, outer_T=lambda g: sized * g, spread_rounding=off)
        axes, lines = first.rows_3HO.unsqueeze(2), first.heads_3H[..., None, None].expand(-1, -1, -1, 2)
        forms = ProjectedForms(rows, first.leaf, torch.cat([axes, lines], -1))
        return behind(first.leaf, own, forms), core

    def transform(projected_3BHNO: Tensor) -> QKVTransform:
        rows = [smooth_expansion(u, root) for u in projected_3BHNO]
        lips = [bounded_normalisation(u, root) for u in projected_3BHNO]
        lengths = [(u.square().sum(-1) + module.eps).sqrt().flatten(1) for u in projected_3BHNO]
        of_rows = [normalisation_remainder(length, root) for length in lengths]

        def each(bounds: list[Bound], r: QKVRadii) -> QKVRadii:
            return QKVRadii(*(abs(size) * bound(one) for size, bound, one in zip(sizes_3, bounds, r, strict=True)))

        def remainder(g_3CBHNO: Tensor) -> Callable[[QKVRadii], Tensor]:
            weights = [abs(size) * g.norm(dim=-1).flatten(2) for size, g in zip(sizes_3, g_3CBHNO, strict=True)]

            def bound(r: QKVRadii) -> Tensor:
                parts = [(w * of_row(one)).amax(-1) for w, of_row, one in zip(weights, of_rows, r, strict=True)]
                return nan_to_inf(parts[0] + parts[1] + parts[2])

            return bound

        return QKVTransform(
            torch.stack(module.scores(*projected_3BHNO)),
            lambda r: QKVRadii(*(abs(s) * row.gain_B * one for s, row, one in zip(sizes_3, rows, r, strict=True))),
            lambda r: each(lips, r),
            lambda r: each([row.beta for row in rows], r),
            remainder,
            lambda g_3: torch.stack([s * row.pull(g) for s, row, g in zip(sizes_3, rows, g_3, strict=True)]),
            partial(leaves, projected_3BHNO),
        )

    return qkv_split(module, transform, lambda precision: _rounded(module, precision))


def _rounded(module: ScaledCosineAttention, precision: Precision) -> RoundedRows:
    """Bound the projections, then every row by itself."""
    project, root = projected(module, precision), _root(module)

    def around(x_BWND: Tensor) -> Rows:
        def row(of: Rounded, size: float) -> Rounded:
            inner = bounded_normalisation(of.y, root)
            return normalised(of, module.eps, size, lambda r: inner(r) / root, precision)

        rows = project(x_BWND)
        return Rows(row(rows.q, 1.0), row(rows.k, 1.0), row(rows.v, module.nu))

    return around


register(ScaledCosineAttention, softmax_rules(scsa, scsa_split))
