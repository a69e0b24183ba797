"""Attention computed step by step, so that its rounding can be followed, in this thread alone.

torch chooses a fused kernel for scaled_dot_product_attention, which a dispatch mode sees as one operation. torch's own
switch (`torch.nn.attention.sdpa_kernel`) belongs to the whole process: one thread would switch it off for another.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from certizoo import UserError


class StepwiseAttention(TorchFunctionMode):
    """While this mode is active, attention is products, a sum with the mask, and a softmax."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_attention if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    if attn_mask is not None and not attn_mask.is_floating_point():
        raise UserError(
            f"attention has a mask of {attn_mask.dtype}; give one of 0 and -inf that is added to the scores"
        )
    y: Tensor = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, attn_mask, *args, **kwargs)[0]
    return y
