"""From images to patches, inside the model: normalisation, and the patch embedding or stem of every transformer.

Letters: B images, C channels, N tokens, D width; an image of Y x X patches of P x Q pixels.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.models import register_notrace_module
from torch import Tensor, nn

from certizoo import UserError
from zoo.arithmetic import OUT
from zoo.bounds.contracts import Bound, Layer, Precision, Rounded, Rounding
from zoo.bounds.curvature import affine
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.primitives import product
from zoo.bounds.rounding import TINY, composed, in_range, size
from zoo.bounds.rule_table import ModuleRules, expect, register
from zoo.layers.convolution import CellConv2d, conv_shapes
from zoo.spectral import sigma_upper


@register_notrace_module  # its check of the channels is no part of a traced graph
class Normalize(nn.Module):
    """(x - mean) / std per channel, inside the model: every eps is a radius in [0,1] pixel space. BCHW -> BCHW."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.chans = len(mean)
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = (x_BCHW - self.mean) / self.std
        if y_BCHW.shape != x_BCHW.shape:  # one channel is broadcast to all
            raise UserError(
                f"the images have {x_BCHW.shape[1]} channels, but the model takes {y_BCHW.shape[1]}; convert the images"
            )
        return y_BCHW


def normalize(module: Normalize) -> Layer:
    """Return the rule of a diagonal map: 1 / min std."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        gain = (1 / module.std.double()).abs().max()
        return module(x), lambda r: gain * r

    return layer


def normalize_rounding(module: Normalize, precision: Precision) -> Rounding:
    """Bound a difference and a quotient with rounded statistics.

    The image is cast to the served type first; float32 images are exact.
    """
    gain, u = 1 / float(module.std.min()), precision.u
    cast = 0.0 if u == precision.sums else u

    def around(x_BCHW: Tensor) -> Rounded:
        z = module(x_BCHW)
        x_B, z_B, still_B = size(x_BCHW), size(z), size(module(torch.zeros_like(x_BCHW)))

        def error(r: Tensor, e: Tensor) -> Tensor:
            own = 4 * u * (z_B + gain * r) + gain * (cast * (x_B + r) + e)
            return in_range(still_B + gain * (x_B + r + e), own * OUT + TINY)

        return Rounded(z, lambda r: gain * r, error)

    return around


def normalize_shapes(module: Normalize) -> Shapes:
    """Return one number per channel."""
    return {"mean": (module.chans, 1, 1), "std": (module.chans, 1, 1)}


register(Normalize, ModuleRules(rule=normalize, expansion=affine, rounding=normalize_rounding, shapes=normalize_shapes))


class PatchProjection(nn.Conv2d):
    """The convolution whose stride is its kernel, as one product with the patches: (B, C, H, W) -> (B, D, Y, X).

    Weights are stored as in `nn.Conv2d`. On a CPU the gradient for the image, which every attack step takes, costs a
    sixth to a half of what it costs through the convolution.
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        p, q = self.kernel_size
        x_BCYPXQ = x_BCHW.unflatten(3, (-1, q)).unflatten(2, (-1, p))
        patches_BYXI = x_BCYPXQ.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches_BYXI, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


register(PatchEmbed, ModuleRules())  # the rules around it read its parts
register(PatchProjection, ModuleRules(shapes=conv_shapes))


def by_products_(patch_embed: PatchEmbed) -> None:
    """Replace timm's convolution by a `PatchProjection` with the same weights."""
    conv = patch_embed.proj
    projection = PatchProjection(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, bias=conv.bias is not None, device="meta"
    )
    projection.weight, projection.bias = conv.weight, conv.bias
    patch_embed.proj = projection


def patches_norm(normalize: nn.Module, patch_embed: nn.Module) -> Tensor:
    """Return ||J|| of normalisation and projection. Proof: docs/proofs.md#patch-embedding."""
    return sigma_upper(_matrix(normalize, patch_embed))


def patches_gram(normalize: nn.Module, patch_embed: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return J J^T of normalisation and projection: v (..., D) of every patch."""
    matrix_DI = _matrix(normalize, patch_embed)
    gram_DD = matrix_DI @ matrix_DI.mT
    return lambda v: v @ gram_DD


def _matrix(normalize: nn.Module, patch_embed: nn.Module) -> Tensor:
    """Return normalisation and projection as one matrix on patches, W diag(1 / std): patches do not overlap."""
    expect(normalize, Normalize)
    expect(patch_embed, PatchEmbed)
    projection = patch_embed.get_submodule("proj")
    expect(projection, PatchProjection)
    weight_DCPQ = projection.get_parameter("weight").detach().double()
    return (weight_DCPQ / normalize.get_buffer("std").double()).flatten(1)


def patches_rounding(normalize: nn.Module, patch_embed: nn.Module, precision: Precision) -> Rounding:
    """Bound (x - mean) / std, then a product with the patches: images -> (B, D, Y, X)."""
    expect(normalize, Normalize)
    assert isinstance(normalize, Normalize)
    projection = patch_embed.get_submodule("proj")
    expect(projection, PatchProjection)
    assert isinstance(projection, PatchProjection)
    weight, bias = (None if w is None else w.detach().double().abs() for w in (projection.weight, projection.bias))
    assert weight is not None
    norms = sigma_upper(projection.weight.detach().double().flatten(1)), sigma_upper(weight.flatten(1))

    def moduli(x_BCHW: Tensor) -> Tensor:
        return F.conv2d(x_BCHW, weight, bias, projection.stride)

    patches = product(projection, moduli, lambda y: norms, weight[0].numel(), precision)
    return composed([normalize_rounding(normalize, precision), patches])


# the convolutional stem -----------------------------------------------------------------------------------------------


class ConvStem(nn.Module):
    """A convolutional stem that replaces the patch embedding (Xiao et al. 2021, https://arxiv.org/abs/2106.14881).

        convolutions with zero padding, an activation after each but the last; the pixels of the last are tokens

    The paper's convolutions are 3 x 3 of stride 2, here without batch normalisation; patches of neighbouring tokens
    overlap. Normalised images (B, C, H, W) -> tokens (B, N, D), N = (H / patch_size)^2; attributes named as in timm.

    Args:
        img_size: side of the square image.
        patch_size: side of the patch that one token stands for.
        in_chans: channels of the image.
        embed_dim: width of the tokens.
        layers: the convolutions before the last. Either their channels alone, for the paper's convolutions, with
            patch_size = 2^(len(layers) + 1); or (channels, kernel size, stride, padding) each, as in a conv net. The
            last convolution then has as kernel and stride the part of patch_size that their strides leave.
        act: makes the activation between them.
        bias: whether the convolutions have one.
    """

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        *,
        layers: Sequence[int | Sequence[int]],
        act: type[nn.Module] = nn.GELU,
        bias: bool = True,
    ) -> None:
        super().__init__()
        side = img_size // patch_size
        self.img_size, self.patch_size = (img_size, img_size), (patch_size, patch_size)
        self.grid_size, self.num_patches = (side, side), side * side
        self.convs = nn.Sequential()
        chans = in_chans
        for out, kernel, stride, padding in _stem_layers(layers, img_size, patch_size, embed_dim):
            if len(self.convs):
                self.convs.append(act())
            kind = nn.Conv2d if kernel % stride else CellConv2d
            self.convs.append(kind(chans, out, kernel, stride, padding, bias=bias))
            chans = out

    def kernels(self) -> Iterator[Tensor]:
        """Yield the kernels for `zoo.hinge`."""
        for module in self.convs:
            if isinstance(module, nn.Conv2d):
                yield module.weight.flatten(1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return tokens(self.convs(x_BCHW))


def _stem_layers(
    layers: Sequence[int | Sequence[int]], img_size: int, patch_size: int, embed_dim: int
) -> list[Sequence[int]]:
    """Return (channels, kernel size, stride, padding) of every convolution, including the last.

    Raises UserError if they do not make one token per patch.
    """
    widths, rows = [row for row in layers if isinstance(row, int)], [row for row in layers if not isinstance(row, int)]
    if not rows:
        if patch_size != 2 ** (len(layers) + 1):
            raise UserError(
                f"stem={[*layers]} with patch_size={patch_size}: every convolution halves the image; "
                "give log2(patch_size) - 1 widths"
            )
        return [(out, 3, 2, 1) for out in (*widths, embed_dim)]
    side = img_size
    for _, kernel, stride, padding in rows:
        side = (side + 2 * padding - kernel) // stride + 1
    left, rest = divmod(side, max(1, img_size // patch_size))
    if rest or left < 1:
        raise UserError(
            f"stem={[list(row) for row in rows]} turns a side of {img_size} into {side} pixels, but "
            f"patch_size={patch_size} needs a multiple of {img_size // patch_size}; change kernels, strides or padding"
        )
    return [*rows, (embed_dim, left, left, 0)]


def tokens(x_BDHW: Tensor) -> Tensor:
    """Turn pixels into tokens: (B, D, H, W) -> (B, N, D)."""
    return x_BDHW.flatten(2).transpose(1, 2)


register(ConvStem, ModuleRules())  # the rules around it read its parts
