"""Convolutions by products, and the rules of convolutions: their norms as maps of whole images, and their rounding.

Letters: B images, C channels in, O out, k kernel size, s stride; Y x X windows of n x n cells, s x s pixels each.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from zoo.arithmetic import U
from zoo.bounds.contracts import Bound, Layer, Precision, Rounding
from zoo.bounds.curvature import affine
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.primitives import product
from zoo.bounds.rule_table import ModuleRules, NoRule, register
from zoo.spectral import sigma_upper


@register_notrace_module  # the size of the image decides its operations
class CellConv2d(nn.Conv2d):
    """A convolution whose kernel is a multiple of its stride, as one product with its windows. Weights as in nn.Conv2d.

    Square kernels, zero padding, k = n s: a window is n x n cells of s x s pixels, each cell whole. On a CPU this is
    1.2 to 1.6 times as fast for stems, which have few input channels, above all in the pass back to the image
    (benchmarks/bench_layers.py).

    Raises ValueError if the kernel is not a multiple of the stride.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int, padding: int = 0, *, bias: bool = True
    ) -> None:
        if kernel_size % stride:
            raise ValueError(
                f"a kernel of {kernel_size} pixels is not a multiple of the stride {stride}; change one of them"
            )
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        s, k, pad = self.stride[0], self.kernel_size[0], int(self.padding[0])
        n = k // s
        if pad:
            x_BCHW = F.pad(x_BCHW, (pad, pad, pad, pad))
        height, width = ((side - k) // s + 1 for side in x_BCHW.shape[2:])
        cells_BYXI = _cells(x_BCHW[:, :, : (height + n - 1) * s, : (width + n - 1) * s], s)
        if n > 1:
            shifts = [(i, j) for i in range(n) for j in range(n)]
            cells_BYXI = torch.cat([cells_BYXI[:, i : i + height, j : j + width] for i, j in shifts], dim=3)
        # The kernel's cells come in the same order as the window's.
        weight_OI = _cells(self.weight, s).flatten(1)
        return F.linear(cells_BYXI, weight_OI, self.bias).permute(0, 3, 1, 2)


class CircularConv2d(nn.Conv2d):
    """A convolution around the image, whose output has the image's size. Weights as in nn.Conv2d.

    Raises ValueError for a kernel without a middle.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int],
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
        *,
        bias: bool = True,
    ) -> None:
        if margins_of(kernel_size, dilation) is None:
            raise ValueError(f"a kernel of {kernel_size} pixels has no middle; use odd sides")
        super().__init__(in_channels, out_channels, kernel_size, dilation=dilation, groups=groups, bias=bias)

    @property
    def margins(self) -> tuple[int, int]:
        """The rows and columns that are repeated on either side."""
        margins = margins_of(self.kernel_size, self.dilation)
        assert margins is not None
        return margins

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.conv2d(
            wrapped(x_BCHW, self.margins), self.weight, self.bias, dilation=self.dilation, groups=self.groups
        )


def margins_of(kernel_size: Sequence[int], dilation: Sequence[int]) -> tuple[int, int] | None:
    """Return the rows and columns on either side that a kernel reaches, or None if it has no middle."""
    rows, columns = (d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True))
    return None if rows % 2 or columns % 2 else (rows // 2, columns // 2)


def wrapped(x_BCHW: Tensor, margins: tuple[int, int]) -> Tensor:
    """Return the image with so many rows and columns of the opposite side repeated on either side."""
    for axis, margin in zip((2, 3), margins, strict=True):
        last = x_BCHW.narrow(axis, x_BCHW.shape[axis] - margin, margin)
        x_BCHW = torch.cat([last, x_BCHW, x_BCHW.narrow(axis, 0, margin)], axis)
    return x_BCHW


def _cells(x_BCHW: Tensor, s: int) -> Tensor:
    """Return the pixels of every cell: (B, H / s, W / s, s s C).

    Channels come last, as a CellConv2d leaves them, forward and backward.
    """
    x_BHWC = x_BCHW.permute(0, 2, 3, 1)
    return x_BHWC.unflatten(2, (-1, s)).unflatten(1, (-1, s)).permute(0, 1, 3, 2, 4, 5).flatten(3)


def conv_norm(
    weight: Tensor, stride: tuple[int, int], out_size: tuple[int, int], groups: int = 1, *, circular: bool = False
) -> Tensor:
    """Return a number never below the norm of a convolution with zero padding, as a map of whole images.

    weight (O, C, k, k), its stride, the height and width of its output, its groups -> scalar in float64. Groups read
    and write different channels: the norm is the largest of theirs.

    Write a = s b + t for the offsets a of the kernel, 0 <= t < s. The values x[c, s m + t] of the padded image, read as
    channels (c, t) at m (a permutation), go through a convolution with stride 1 and K = ceil(k / s) offsets b:

        y[o, i] = sum_{c, t, b} W[o, c, s b + t] x_(c,t)[i + b].

    With outputs i < n it is a submatrix of the circulant of any size L >= n + K - 1, whose norm is the largest of its
    symbols W^(w) = sum_b W_b e^(2 pi i w b / L) (docs/proofs.md#convolution). One around the image (`circular`, stride
    1) is itself the circulant of size L = n. W is real: W^(-w) = conj W^(w), so half of the grid is enough. Complex
    matrices are measured as [[Re, -Im], [Im, Re]], which has the same norm.

    Rounding: a computed phase is off by less than 64 u in each part (two angles below 2 pi by 3 u of themselves, their
    sum, the cosine's ulp), a sum of J products by gamma_(J+2): W^ is off by at most 4 (J + 40) u || sum_b |W_b| ||_F.
    """
    w = _polyphase(weight.detach().double(), stride)
    *_, k_h, k_w = w.shape
    # With one offset the symbol is the same everywhere.
    l_h, l_w = (n + (0 if circular else k - 1) if k > 1 else 1 for n, k in zip(out_size, (k_h, k_w), strict=True))
    v = torch.arange(l_h, device=w.device).repeat_interleave(l_w // 2 + 1)
    u = torch.arange(l_w // 2 + 1, device=w.device).repeat(l_h)
    phase_FK = (_angle(v, k_h, l_h)[:, :, None] + _angle(u, k_w, l_w)[:, None, :]).flatten(1)
    w_KGOC = w.unflatten(0, (groups, -1)).flatten(3).movedim(3, 0)
    norm = w.new_zeros(())
    for chunk_FK in phase_FK.split(max(1, 2**22 // (4 * w_KGOC[0].numel()))):
        re = torch.einsum("fk,kgoc->fgoc", chunk_FK.cos(), w_KGOC)
        im = torch.einsum("fk,kgoc->fgoc", chunk_FK.sin(), w_KGOC)
        real = torch.cat([torch.cat([re, -im], 3), torch.cat([im, re], 3)], 2)
        norm = torch.maximum(norm, sigma_upper(real).max())
    rounding = 4 * (len(w_KGOC) + 40) * U * w_KGOC.abs().sum(0).square().sum().sqrt()
    return norm + rounding


def _dilated(weight: Tensor, dilation: tuple[int, ...]) -> Tensor:
    """Return the kernel with the zeros that a dilation stands for."""
    *outer, k_h, k_w = weight.shape
    d_h, d_w = dilation
    wide = weight.new_zeros(*outer, (k_h - 1) * d_h + 1, (k_w - 1) * d_w + 1)
    wide[..., ::d_h, ::d_w] = weight.detach()
    return wide


def _polyphase(w: Tensor, stride: tuple[int, int]) -> Tensor:
    """Return the kernel on the image read at every s-th pixel: (O, C, k, k) -> (O, C s s, K, K)."""
    s_h, s_w = stride
    w = F.pad(w, (0, -w.shape[3] % s_w, 0, -w.shape[2] % s_h))
    return w.unflatten(3, (-1, s_w)).unflatten(2, (-1, s_h)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def _angle(frequency_F: Tensor, offsets: int, length: int) -> Tensor:
    """Return 2 pi w b / L in [0, 2 pi), the integer w b reduced exactly: (F, K)."""
    turns = frequency_F[:, None] * torch.arange(offsets, device=frequency_F.device) % length
    return 2 * math.pi * turns.double() / length


def conv2d(module: nn.Conv2d) -> Layer:
    """Return the rule of an affine map: its norm times r."""
    norm_of = norm_on(module, module.weight)

    def layer(x_BCHW: Tensor) -> tuple[Tensor, Bound]:
        y_BOHW = module(x_BCHW)
        norm = norm_of(y_BOHW)
        return y_BOHW, lambda r: norm * r

    return layer


def conv2d_rounding(module: nn.Conv2d, precision: Precision) -> Rounding:
    """Bound a product of matrices, of which |W| is the convolution with |weight|."""
    weight, bias = (None if w is None else w.detach().double().abs() for w in (module.weight, module.bias))
    assert weight is not None
    norm_of, absolute_of = norm_on(module, module.weight), norm_on(module, weight)

    def moduli(x_BCHW: Tensor) -> Tensor:
        x_BCHW = wrapped(x_BCHW, module.margins) if isinstance(module, CircularConv2d) else x_BCHW
        return F.conv2d(x_BCHW, weight, bias, module.stride, module.padding, module.dilation, module.groups)

    return product(module, moduli, lambda y: (norm_of(y), absolute_of(y)), weight[0].numel(), precision)


def conv_shapes(module: nn.Conv1d | nn.Conv2d) -> Shapes:
    """Return the shapes of the kernel (O, C, k, ...) and b."""
    out = module.out_channels
    return {"weight": (out, module.in_channels // module.groups, *module.kernel_size), "bias": (out,)}


def norm_on(module: nn.Conv2d, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the norm of the convolution with this weight, as a function of its output.

    The norm depends on the size of the image and is measured once per size.
    """
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        raise NoRule(module, "its rule covers zero padding given as a number only")
    stride = (module.stride[0], module.stride[1])
    kernel = _dilated(weight, module.dilation)
    norms: dict[tuple[int, int], Tensor] = {}

    def norm_of(y_BOHW: Tensor) -> Tensor:
        out_size = (y_BOHW.shape[2], y_BOHW.shape[3])
        if out_size not in norms:
            around = isinstance(module, CircularConv2d)
            norms[out_size] = conv_norm(kernel, stride, out_size, module.groups, circular=around)
        return norms[out_size]

    return norm_of


register(nn.Conv2d, ModuleRules(rule=conv2d, expansion=affine, rounding=conv2d_rounding, shapes=conv_shapes))
register(CellConv2d, ModuleRules(rule=conv2d, expansion=affine, rounding=conv2d_rounding, shapes=conv_shapes))
register(CircularConv2d, ModuleRules(rule=conv2d, expansion=affine, rounding=conv2d_rounding, shapes=conv_shapes))
register(nn.Conv1d, ModuleRules(shapes=conv_shapes))  # the rules around it read it
