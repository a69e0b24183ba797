"""Convolutional token mixing of CoViT (docs/references.md#covit), which replaces attention, and its rules.

    F(X) = [ K_1 * X_1 | ... | K_G * X_G ] W_O,     (K * X)_n = b + sum_t K_t X_{n+t-p},   t = 0..k-1,   p = (k - 1) / 2

X_g are contiguous groups of channels, each convolved with its own kernel along the tokens (class token first, zeros
beyond both ends). There is no activation and no input projection. Source: the paper and its code (covit.py,
"MultiHeadConv1D").

Letters: B images, N tokens, D width, G groups, O = D / G, K kernel size, L length of the circle, F frequencies.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import repeat

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from certizoo import UserError
from zoo.arithmetic import U
from zoo.attention.softmax.module import check_heads
from zoo.bounds.contracts import Bound, Layer, Precision, Rounding
from zoo.bounds.curvature import affine
from zoo.bounds.first_order import added, layer_of
from zoo.bounds.primitives import linear_rounding, product
from zoo.bounds.rounding import composed
from zoo.bounds.rule_table import ModuleRules, NoRule, expect, register
from zoo.spectral import sigma_upper

SYMBOL_BYTES = 2**28  # memory for the matrices of one chunk of frequencies


@register_notrace_module  # it goes through its convolutions and their groups together
class ConvMixing(nn.Module):
    """Convolutional token mixing, x (B, N, D) -> (B, N, D).

    `kernels` is the kernel size of each group, or one size for `num_heads` groups; odd. `proj_bias` is that of W_O.
    """

    def __init__(self, dim: int, num_heads: int, kernels: int | Sequence[int] = 3, proj_bias: bool = True) -> None:
        super().__init__()
        sizes = list(repeat(kernels, num_heads)) if isinstance(kernels, int) else list(kernels)
        check_heads(dim, len(sizes))
        if even := [size for size in sizes if size % 2 == 0]:
            raise UserError(f"kernel size {even[0]} is even; choose an odd one, which keeps the number of tokens")
        width = dim // len(sizes)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, size, padding=size // 2) for size in sizes)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)

    def forward(self, x_BND: Tensor) -> Tensor:
        groups_BON = x_BND.mT.chunk(len(self.convs), dim=1)
        mixed_BDN = torch.cat([conv(x) for conv, x in zip(self.convs, groups_BON, strict=True)], dim=1)
        return self.proj(mixed_BDN.mT)


VARIANTS = {"conv": ConvMixing}


def _symbol(kernels_OOK: list[Tensor], w_o_DD: Tensor, length: int) -> Tensor:
    """Return A(w) = W_O blockdiag_g( sum_t K_t^g e^(i w (t - p)) ) at w = 2 pi f / L, f = 0..L/2: (2, F, D, D).

    The first axis is the real and the imaginary part. The phases count from the middle of each kernel, so that groups
    of all sizes, and the identity of the residual, belong to one circle.
    """
    columns = []
    f_F = torch.arange(length // 2 + 1, device=w_o_DD.device)
    for kernel_OOK, w_DO in zip(kernels_OOK, w_o_DD.chunk(len(kernels_OOK), dim=1), strict=True):
        taps = kernel_OOK.shape[-1]
        t_K = torch.arange(taps, device=w_o_DD.device) - taps // 2
        angle_FK = (f_F[:, None] * t_K % length).double() * (2 * math.pi / length)
        phase_2FK = torch.stack([angle_FK.cos(), angle_FK.sin()])
        columns.append(w_DO @ torch.einsum("cft,oit->cfoi", phase_2FK, kernel_OOK))
    return torch.cat(columns, dim=-1)


def _norm(kernels_OOK: list[Tensor], w_o_DD: Tensor, tokens: int, residual: bool) -> float:
    """Return max over w of ||A(w)||, or of ||I + A(w)||.

    It is never below the norm of X -> F(X) - F(0), or of X -> X + F(X) - F(0).

    With zeros beyond the ends, F on N tokens is a block of the circulant operator on L = N + max k - 1 tokens (no tap
    reaches around the circle from one token of the image to another), and the DFT over tokens block-diagonalises that
    into the A(w). A(-w) is the conjugate of A(w). A complex A has the singular values of [[Re, -Im], [Im, Re]].
    docs/proofs.md#conv-mixing.

    Rounding, u = 2^-53, norms Frobenius: angles below 2 pi err by 20 u, cosines and sines by 21 u, hence the sum over k
    taps by (k + 42) u S_g with S_g = sum_t ||K_t^g||, W_O times it by (D + k + 44) u ||W_O|| S, S^2 = sum_g S_g^2, and
    adding I by u (sqrt(D) + ||W_O|| S). Twice the sum of these is the margin.
    """
    dim, taps = len(w_o_DD), max(kernel.shape[-1] for kernel in kernels_OOK)
    symbol_2FDD = _symbol(kernels_OOK, w_o_DD, tokens + taps - 1)
    if residual:
        symbol_2FDD[0].diagonal(dim1=-2, dim2=-1).add_(1)
    few = max(1, SYMBOL_BYTES // (32 * dim**2))
    largest = max(float(sigma_upper(_real(a_2FDD)).max()) for a_2FDD in symbol_2FDD.split(few, dim=1))
    size = math.hypot(*(float(kernel.flatten(0, 1).norm(dim=0).sum()) for kernel in kernels_OOK))
    margin = 2 * U * ((dim + taps + 45) * float(w_o_DD.norm()) * size + math.sqrt(dim))
    return largest + margin


def _real(a_2FDD: Tensor) -> Tensor:
    """Return the real matrices [[Re, -Im], [Im, Re]]: (F, 2 D, 2 D)."""
    re, im = a_2FDD
    return torch.cat([torch.cat([re, -im], dim=-1), torch.cat([im, re], dim=-1)], dim=-2)


def _measured(module: ConvMixing, residual: bool) -> Layer:
    """Return one norm for all images with the same number of tokens, r -> norm r: the map is affine in the tokens."""
    expect(module.proj, nn.Linear)
    for conv in module.convs:
        expect(conv, nn.Conv1d)
        assert isinstance(conv, nn.Conv1d)
        if (conv.stride, conv.dilation, conv.groups, conv.padding_mode) != ((1,), (1,), 1, "zeros"):
            raise NoRule(conv, "its rule covers stride 1 and zero padding without dilation or groups only")
    kernels_OOK = [conv.get_parameter("weight").detach().double() for conv in module.convs]
    w_o_DD = module.proj.weight.detach().double()

    @cache
    def norm(tokens: int) -> float:
        return _norm(kernels_OOK, w_o_DD, tokens, residual)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        gain, y_BND = norm(x_BND.shape[1]), module(x_BND)
        return (added(x_BND, y_BND) if residual else y_BND), lambda r: gain * r

    return layer


def conv_mixing(module: ConvMixing) -> Layer:
    """Return the rule of the branch alone."""
    return _measured(module, residual=False)


def residual_conv_mixing(module: ConvMixing) -> Layer:
    """Return the rule of X + F(X) in one norm: the identity is inside the symbol, never ||I|| + ||.||."""
    return _measured(module, residual=True)


def conv_mixing_rounding(module: ConvMixing, precision: Precision) -> Rounding:
    """Bound two products: the convolutions of the groups, and W_O. A symbol without signs is largest at w = 0."""
    layer_of(module)  # refuses other convolutions
    kernels_OOK = [conv.get_parameter("weight").detach().double() for conv in module.convs]
    biases_O = [conv.get_parameter("bias").detach().double() for conv in module.convs]
    moduli_OOK = [kernel.abs() for kernel in kernels_OOK]
    absolute = max(float(sigma_upper(kernel.sum(-1))) for kernel in moduli_OOK)

    def mixed(x_BND: Tensor, kernels: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        groups = zip(x_BND.mT.chunk(len(kernels), dim=1), kernels, biases, strict=True)
        return torch.cat([F.conv1d(x, kernel, b, padding=kernel.shape[-1] // 2) for x, kernel, b in groups], dim=1).mT

    @cache
    def norm(tokens: int) -> float:
        return max(_norm([kernel], torch.eye(len(kernel)).to(kernel), tokens, False) for kernel in kernels_OOK)

    mixing = product(
        lambda x: mixed(x, kernels_OOK, biases_O),
        lambda x: mixed(x, moduli_OOK, [b.abs() for b in biases_O]),
        lambda y: (norm(y.shape[1]), absolute),
        max(kernel[0].numel() for kernel in kernels_OOK),
        precision,
    )
    return composed([mixing, linear_rounding(module.proj, precision)])


register(
    ConvMixing,
    ModuleRules(rule=conv_mixing, residual=residual_conv_mixing, expansion=affine, rounding=conv_mixing_rounding),
)
