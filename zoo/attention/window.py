"""Window attention of Swin (Liu et al. 2021, eq. 4), around any variant of softmax.py.

    F(X) = merge( softmax(s q k^T + T + M) v )        in every window of h x w tokens by itself

T_ij = table[offset of j from i] is the relative position bias, one number per head and offset; M keeps tokens of a
shifted window apart that are no neighbours in the image. With distances for scores, T + M is added to those.
Which tokens form a window, and M, are the block's business (timm's SwinTransformerBlock).

Letters: B images, W windows of an image, N = h w tokens of a window, D width, H heads.
"""

from collections.abc import Callable

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from certizoo import UserError
from zoo.attention.dot_product import DotProductAttention, expand_attention, lofast, lofast_local
from zoo.attention.qkv import AttentionBounds, Mixing, bounded, least
from zoo.attention.softmax import SoftmaxAttention
from zoo.bounds.curvature import Expand, curvature
from zoo.bounds.rules import Layer, local_rule, rule


class WindowAttention(nn.Module):
    """Windows x (B W, N, D), the windows of one image side by side, -> (B W, N, D).

    Args: content: the attention whose scores get the bias. window_size: (h, w).
    """

    relative_position_index: Tensor

    def __init__(self, content: nn.Module, window_size: tuple[int, int]) -> None:
        super().__init__()
        if not isinstance(content, SoftmaxAttention):
            raise UserError(f"{type(content).__name__} has no scores to add a bias to; choose a softmax attention")
        self.content = content
        height, width = window_size
        offsets = (2 * height - 1) * (2 * width - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(offsets, content.num_heads))
        trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.register_buffer("relative_position_index", _offset_index(height, width), persistent=False)

    def forward(self, x_BND: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` (W, N, N) is added to the scores: 0, or a large negative number."""
        return self.content(x_BND, self.bias(x_BND.shape[0], mask))

    def bias(self, windows: int, mask: Tensor | None = None) -> Tensor:
        """T + M for that many windows, in all images together: (1 or B W, H, N, N)."""
        bias_HNN = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        if mask is None:
            return bias_HNN[None]
        return (bias_HNN + mask[:, None]).repeat(windows // mask.shape[0], 1, 1, 1)


def _offset_index(height: int, width: int) -> Tensor:
    """Row of the table for each pair (i, j): (y_i - y_j + h - 1) (2 w - 1) + x_i - x_j + w - 1, as in timm. (N, N)."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    y_N, x_N = y.flatten(), x.flatten()
    dy, dx = y_N[:, None] - y_N, x_N[:, None] - x_N
    return (dy + height - 1) * (2 * width - 1) + dx + width - 1


def masked(module: WindowAttention, mask: Tensor | None) -> Layer:
    """Theorem 1 of paper 004 for each window, which stands in the place of an image: T + M are constants in S. Around
    other attention than dot products, of which nothing is published, the local rule of qkv.py."""
    if type(module.content) is not DotProductAttention:
        return window_bounds(module, mask).layer
    return lofast(lambda x_BND: module(x_BND, mask), module.content, residual=False, attend=_attend(module, mask))


def _attend(module: WindowAttention, mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The softmax of S + T + M."""
    return lambda s_BHNN: (s_BHNN + module.bias(len(s_BHNN), mask)).softmax(-1)


def window_bounds(module: WindowAttention, mask: Tensor | None) -> AttentionBounds:
    """Each window by itself, around any content: all bounds superhomogeneous, so that windows can be joined."""
    mixing = Mixing(bias=lambda windows: module.bias(windows, mask))
    return AttentionBounds(lambda x_BND: module(x_BND, mask), module.content, mixing)


def masked_local(module: WindowAttention, mask: Tensor | None) -> Layer:
    """The same with local constants; superhomogeneous."""
    return least(masked(module, mask), window_bounds(module, mask).layer)


@rule(WindowAttention)
def window_attention(module: WindowAttention) -> Layer:
    """Windows without a mask."""
    return masked(module, None)


@local_rule(WindowAttention)
def local_window_attention(module: WindowAttention) -> Layer:
    """The same with local constants: around dot products the sharper ones of their own."""
    if type(module.content) is not DotProductAttention:
        return masked(module, None)
    return lofast_local(module, module.content, residual=False, attend=_attend(module, None))


@curvature(WindowAttention)
def expand_window_attention(module: WindowAttention) -> Expand:
    """Each window is expanded by itself."""
    if type(module.content) is not DotProductAttention:
        return bounded(window_bounds(module, None).expand, masked(module, None))
    return expand_attention(module, module.content, _attend(module, None))
