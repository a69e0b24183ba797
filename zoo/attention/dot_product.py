"""Dot-product self-attention (Vaswani et al. 2017), with the rules of LoFAST and our tighter ones.

    F(X) = sum_l P_l X M_l,   P_l = softmax(s Q_l K_l^T),   M_l = W_V^l W_O^l,   s = 1 / sqrt(D / H)

Letters: B images, N tokens, D width, H heads, O = D / H (dh).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from zoo.attention.local import expand_attention, lofast_local
from zoo.attention.lofast import lofast
from zoo.attention.softmax.module import QKVAttention
from zoo.attention.softmax.qkv import PLAIN, Mixing, qkv_shapes, qkv_split
from zoo.attention.softmax.rounding import plain_rounding
from zoo.attention.softmax.rules import AttentionRules, attention_rules
from zoo.bounds.rule_table import register


class DotProductAttention(QKVAttention):
    """Dot-product attention, x (B, N, D) -> (B, N, D).

    `scale` is the factor s, default 1 / sqrt(D / H); the other options are those of `QKVAttention`.
    """

    def __init__(self, dim: int, num_heads: int, scale: float | None = None, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        self.scale = (dim // num_heads) ** -0.5 if scale is None else scale

    def scores(self, q_BHNO: Tensor, k_BHNO: Tensor, v_BHNO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q_BHNO, k_BHNO, v_BHNO


VARIANTS = {"dp": DotProductAttention}


def sharper(module: Callable[[Tensor], Tensor], content: DotProductAttention, mixing: Mixing) -> AttentionRules:
    """Return Theorem 1 of LoFAST and our local and second-order rules.

    They are tighter than those of the split, because q, k and v move together. `module` is `content` with something
    around its softmax.
    """

    def attend(s_BHNN: Tensor) -> Tensor:
        return (s_BHNN + mixing.bias(len(s_BHNN))).softmax(-1)

    return AttentionRules(
        lambda residual: lofast(module, content, residual, lambda s_BHNN: mixing.mix(attend(s_BHNN)), mixing.gain_H),
        lambda residual: lofast_local(module, content, residual, attend, mixing.mix, mixing.gain_H),
        lambda: expand_attention(module, content, attend, mixing.mix, mixing.gain_H),
    )


def _rules(module: DotProductAttention) -> AttentionRules:
    return sharper(module, module, PLAIN)


register(
    DotProductAttention,
    replace(attention_rules(_rules, qkv_shapes), rounding=plain_rounding, split=qkv_split, mixing=sharper),
)
