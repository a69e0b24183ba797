"""Dot-product self-attention (Vaswani et al. 2017), with the rules of LoFAST and our sharper ones.

    F(X) = sum_l P_l X M_l,   P_l = softmax(s Q_l K_l^T),   M_l = W_V^l W_O^l,   s = 1 / sqrt(D / H)

Letters: B images, N tokens, D width, H heads, O = D / H (dh).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zoo.attention.facts import AttentionRules, attention_facts
from zoo.attention.local import expand_attention, lofast_local
from zoo.attention.lofast import lofast
from zoo.attention.qkv import PLAIN, Mixing, qkv_shapes, qkv_split
from zoo.attention.softmax import QKVAttention
from zoo.bounds.contracts import Precision, Rounded, Rounding
from zoo.bounds.facts import register
from zoo.bounds.rounding import matrix_product, size
from zoo.bounds.rules import layer_of


class DotProductAttention(QKVAttention):
    """x (B, N, D) -> (B, N, D). `scale` is the factor s, default 1 / sqrt(D / H); the other options are those of
    `QKVAttention`."""

    def __init__(self, dim: int, num_heads: int, scale: float | None = None, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        self.scale = (dim // num_heads) ** -0.5 if scale is None else scale

    def scores(self, q_BHNO: Tensor, k_BHNO: Tensor, v_BHNO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q_BHNO, k_BHNO, v_BHNO


VARIANTS = {"dp": DotProductAttention}


def sharper(module: Callable[[Tensor], Tensor], content: DotProductAttention, mixing: Mixing) -> AttentionRules:
    """Theorem 1 of LoFAST and our local and second-order rules: sharper than those of the split, as q, k and v move
    together. `module` is `content` with something around its softmax."""

    def attend(s_BHNN: Tensor) -> Tensor:
        return (s_BHNN + mixing.bias(len(s_BHNN))).softmax(-1)

    return AttentionRules(
        lambda residual: lofast(module, content, residual, lambda s_BHNN: mixing.mix(attend(s_BHNN)), mixing.gain_H),
        lambda residual: lofast_local(module, content, residual, attend, mixing.mix, mixing.gain_H),
        lambda: expand_attention(module, content, attend, mixing.mix, mixing.gain_H),
    )


def _rules(module: DotProductAttention) -> AttentionRules:
    return sharper(module, module, PLAIN)


def rounding(module: DotProductAttention, precision: Precision) -> Rounding:
    """Scores are off by tau, so that P is within the factor exp(2 tau) (1 + gamma); a row of P times V is then off by

        sum_j P_ij |v^_j - v_j| + omega max_j |v^_j|,        omega = exp(2 tau) (1 + gamma_{3N+200} + 4 u) - 1,

    and ||P (v^ - v)||_F <= sqrt(N) ||v^ - v||_F, as rows of P sum to 1.
    """
    layer, heads, u, gamma = layer_of(module, local=True), module.num_heads, precision.u, precision.gamma
    width = module.qkv.in_features // heads
    weights = module.qkv.weight.chunk(3)
    biases = (None,) * 3 if module.qkv.bias is None else module.qkv.bias.chunk(3)
    q, k, v = (matrix_product(w, b, precision) for w, b in zip(weights, biases, strict=True))
    out = matrix_product(module.proj.weight, module.proj.bias, precision)
    scale = abs(module.scale)

    def around(x_BND: Tensor) -> Rounded:
        y, radius = layer(x_BND)
        q_B, k_B, v_B = (_longest(t) for t in module.projections(x_BND))
        x_B, tokens = size(x_BND), x_BND.shape[1]
        rows = math.sqrt(tokens * heads)

        def error(r: Tensor, e: Tensor) -> Tensor:
            e_q, e_k, e_v = (one.error(x_B + r, e, tokens) for one in (q, k, v))
            long_q, long_k, long_v = q_B + q.norm * r, k_B + k.norm * r, v_B + v.norm * r
            product = (long_q + e_q) * (long_k + e_k)
            tau = scale * (e_q * long_k + (long_q + e_q) * e_k + (gamma(width + 4) + 2 * u) * product)
            omega = torch.expm1(2 * tau) + torch.exp(2 * tau) * (gamma(3 * tokens + 200) + 4 * u)
            e_o = math.sqrt(tokens) * e_v + rows * (long_v + e_v) * (omega + gamma(tokens + 4) + 2 * u)
            return out.error(rows * long_v, e_o, tokens)

        return Rounded(y, radius, error)

    return around


def _longest(x: Tensor) -> Tensor:
    """The longest row of every image, (B, ..., D) -> (B,)."""
    return torch.linalg.vector_norm(x, dim=-1).flatten(1).amax(1)


register(
    DotProductAttention,
    replace(attention_facts(_rules, qkv_shapes), rounding=rounding, split=qkv_split, mixing=sharper),
)
