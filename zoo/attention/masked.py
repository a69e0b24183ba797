"""Attention with a constant mask: numbers that are added to the scores, and keys that are left out.

    F(X) = merge( softmax(s q k^T + M) v ),    M_ij = bias_ij where keep_ij, else -inf

M is a constant in S, like the position bias of windows (docs/proofs.md#window-attention); where it is -inf, P is 0 at
every input. Causal attention keeps j <= i.

Letters: B images, N tokens, D width, H heads.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from certizoo import UserError
from zoo.attention.softmax.module import SoftmaxAttention
from zoo.attention.softmax.qkv import Mixing, MixingError
from zoo.attention.softmax.rounding import attention_rounding
from zoo.attention.softmax.rules import AttentionRules, attention_rules, rules_with_mixing
from zoo.bounds.contracts import Precision, Rounding
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.rule_table import NoRule, register


class MaskedAttention(nn.Module):
    """`content` with M (1 or H, N, N) in its scores: x (B, N, D) -> (B, N, D). -inf in M leaves a key out."""

    keep: Tensor
    bias: Tensor

    def __init__(self, content: nn.Module, mask_HNN: Tensor) -> None:
        super().__init__()
        if not isinstance(content, SoftmaxAttention):
            raise UserError(f"{type(content).__name__} has no scores to add a mask to; choose a softmax attention")
        self.content, self.shape = content, tuple(mask_HNN.shape)
        self.register_buffer("keep", mask_HNN != -torch.inf)
        self.register_buffer("bias", torch.where(self.keep, mask_HNN, torch.zeros_like(mask_HNN)))

    def mask(self) -> Tensor:
        """Return M (1 or H, N, N)."""
        return torch.where(self.keep, self.bias, torch.full_like(self.bias, -torch.inf))

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.content(x_BND, self.mask()[None])


def _mixing(module: MaskedAttention) -> Mixing:
    if not bool(module.keep.any(-1).all()):
        raise NoRule(module, "a token of its mask has no key; keep at least one, such as its own")
    most = float(module.bias.abs().max())
    return Mixing(bias=lambda images: module.mask()[None], rounding=lambda precision, tokens: MixingError(bias=most))


def _rules(module: MaskedAttention) -> AttentionRules:
    return rules_with_mixing(module, module.content, _mixing(module))


def masked_rounding(module: MaskedAttention, precision: Precision) -> Rounding:
    """Bound the rounding with M in the scores; -inf is exact."""
    return attention_rounding(module.content, _mixing(module), precision)


def masked_shapes(module: MaskedAttention) -> Shapes:
    """Return one number for every pair of tokens, of all heads or of each."""
    return dict.fromkeys(("keep", "bias"), module.shape)


register(MaskedAttention, replace(attention_rules(_rules, masked_shapes), rounding=masked_rounding))
