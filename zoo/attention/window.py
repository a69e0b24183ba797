"""Window attention of Swin (Liu et al. 2021, eq. 4), around any variant of softmax/module.py.

    F(X) = merge( softmax(s q k^T + T + M) v )        in every window of h x w tokens by itself

T_ij = table[offset of j from i] is the relative position bias, one number per head and offset; M separates tokens of a
shifted window that are not neighbours in the image. Where scores are distances, T + M is added to those. The block
(timm's SwinTransformerBlock) decides which tokens form a window, and M.

Letters: B images, W windows of an image, N = h w tokens of a window, D width, H heads.
"""

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from certizoo import UserError
from zoo.attention.softmax.module import SoftmaxAttention
from zoo.attention.softmax.qkv import AttentionBounds, Mixing, MixingError, least
from zoo.attention.softmax.rounding import attention_rounding
from zoo.attention.softmax.rules import AttentionRules, rules_with_mixing
from zoo.bounds.contracts import Layer
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.rule_table import ModuleRules, register


class WindowAttention(nn.Module):
    """Attention in windows: x (B W, N, D), the windows of one image next to each other, -> (B W, N, D).

    `content` is the attention whose scores get the bias, `window_size` is (h, w).
    """

    relative_position_index: Tensor

    def __init__(self, content: nn.Module, window_size: tuple[int, int]) -> None:
        super().__init__()
        if not isinstance(content, SoftmaxAttention):
            raise UserError(f"{type(content).__name__} has no scores to add a bias to; choose a softmax attention")
        self.content, self.window_size = content, tuple(window_size)
        height, width = window_size
        offsets = (2 * height - 1) * (2 * width - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(offsets, content.num_heads))
        trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.register_buffer("relative_position_index", _offset_index(height, width), persistent=False)

    def forward(self, x_BND: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend in each window. `mask` (W, N, N) is added to the scores: 0, or a large negative number."""
        return self.content(x_BND, self.bias(x_BND.shape[0], mask))

    def bias(self, windows: int, mask: Tensor | None = None) -> Tensor:
        """Return T + M for that many windows, over all images: (1 or B W, H, N, N)."""
        bias_HNN = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        if mask is None:
            return bias_HNN[None]
        return (bias_HNN + mask[:, None]).repeat(windows // mask.shape[0], 1, 1, 1)


def _offset_index(height: int, width: int) -> Tensor:
    """Return the row of the table for each pair (i, j), as in timm: (N, N).

    It is (y_i - y_j + h - 1) (2 w - 1) + x_i - x_j + w - 1.
    """
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    y_N, x_N = y.flatten(), x.flatten()
    dy, dx = y_N[:, None] - y_N, x_N[:, None] - x_N
    return (dy + height - 1) * (2 * width - 1) + dx + width - 1


def window_rules(module: WindowAttention, mask: Tensor | None = None) -> AttentionRules:
    """Return the rules; each window takes the place of an image, and T + M are constants in S."""
    return rules_with_mixing(lambda x_BND: module(x_BND, mask), module.content, mixing(module, mask))


def mixing(module: WindowAttention, mask: Tensor | None) -> Mixing:
    return Mixing(
        bias=lambda windows: module.bias(windows, mask), rounding=lambda precision, tokens: _bias_error(module, mask)
    )


def _bias_error(module: WindowAttention, mask: Tensor | None) -> MixingError:
    """Return the error of T + M, which is a sum of its own."""
    most = 0.0 if mask is None else float(mask.abs().max())
    return MixingError(bias=float(module.relative_position_bias_table.detach().abs().max()) + most)


def window_bounds(module: WindowAttention, mask: Tensor | None) -> AttentionBounds:
    """Return the bounds of each window by itself, by the split of its content.

    They are superhomogeneous, so that windows join. Proof: docs/proofs.md#window-attention.
    """
    return AttentionBounds(lambda x_BND: module(x_BND, mask), module.content, mixing(module, mask))


def window_shapes(module: WindowAttention) -> Shapes:
    """Return a number of the table for every offset and head, and the row of every pair of tokens."""
    height, width = module.window_size
    offsets, tokens = (2 * height - 1) * (2 * width - 1), height * width
    table = (offsets, module.content.num_heads)
    return {"relative_position_bias_table": table, "relative_position_index": (tokens, tokens)}


def masked(module: WindowAttention, mask: Tensor | None, local: bool = False) -> Layer:
    """Return the rule of windows with a mask; superhomogeneous, also with local constants."""
    published = window_rules(module, mask).published(False)
    return least(published, window_bounds(module, mask).layer) if local else published


register(
    WindowAttention,
    ModuleRules(
        rule=lambda module: window_rules(module).published(False),
        local=lambda module: window_rules(module).local(False),
        expansion=lambda module: window_rules(module).expand(),
        shapes=window_shapes,
        rounding=lambda module, precision: attention_rounding(module.content, mixing(module, None), precision),
    ),
)
