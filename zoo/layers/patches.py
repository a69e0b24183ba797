"""From images to patches, inside the model: normalisation, and the patch embedding of every transformer.

Letters: B images, C channels, D width; an image of Y x X patches of P x Q pixels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from torch import Tensor, nn

from certizoo import UserError
from zoo.bounds.contracts import Bound, Layer, Precision, Rounded, Rounding
from zoo.bounds.curvature import affine
from zoo.bounds.facts import Facts, expect, register
from zoo.bounds.rounding import OUT, TINY, matrix_product, size
from zoo.spectral import sigma_upper


class Normalize(nn.Module):
    """(x - mean) / std per channel, inside the model: every eps is a radius in [0,1] pixel space. BCHW -> BCHW."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = (x_BCHW - self.mean) / self.std
        if y_BCHW.shape != x_BCHW.shape:  # one channel is broadcast to all
            raise UserError(f"the images have {x_BCHW.shape[1]} channels, give them {y_BCHW.shape[1]}")
        return y_BCHW


def normalize(module: Normalize) -> Layer:
    """Diagonal: 1 / min std."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        gain = (1 / module.std.double()).abs().max()
        return module(x), lambda r: gain * r

    return layer


register(Normalize, Facts(rule=normalize, expansion=affine))


class PatchProjection(nn.Conv2d):
    """The convolution whose stride is its kernel, as one product with the patches: (B, C, H, W) -> (B, D, Y, X).

    Weights as `nn.Conv2d` has them. On a CPU the gradient for the image, which every attack step takes, costs a sixth
    to a half of what it costs through the convolution.
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        p, q = self.kernel_size
        x_BCYPXQ = x_BCHW.unflatten(3, (-1, q)).unflatten(2, (-1, p))
        patches_BYXI = x_BCYPXQ.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches_BYXI, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


register(PatchEmbed, Facts())  # what is around them reads them
register(PatchProjection, Facts())


def by_products_(patch_embed: PatchEmbed) -> None:
    """Put a `PatchProjection` with the same weights in the place of timm's convolution."""
    conv = patch_embed.proj
    projection = PatchProjection(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, bias=conv.bias is not None, device="meta"
    )
    projection.weight, projection.bias = conv.weight, conv.bias
    patch_embed.proj = projection


def patches_norm(normalize: nn.Module, patch_embed: nn.Module) -> Tensor:
    """||J|| of normalisation and projection. Proof: docs/proofs.md#patch-embedding."""
    return sigma_upper(_matrix(normalize, patch_embed))


def patches_gram(normalize: nn.Module, patch_embed: nn.Module) -> Callable[[Tensor], Tensor]:
    """J J^T of the same: v (..., D) of every patch."""
    matrix_DI = _matrix(normalize, patch_embed)
    gram_DD = matrix_DI @ matrix_DI.mT
    return lambda v: v @ gram_DD


def _matrix(normalize: nn.Module, patch_embed: nn.Module) -> Tensor:
    """Patches do not overlap: normalisation and projection are one matrix on patches, W diag(1 / std)."""
    expect(normalize, Normalize)
    expect(patch_embed, PatchEmbed)
    projection = patch_embed.get_submodule("proj")
    expect(projection, PatchProjection)
    weight_DCPQ = projection.get_parameter("weight").detach().double()
    return (weight_DCPQ / normalize.get_buffer("std").double()).flatten(1)


def patches_rounding(
    normalize: nn.Module, patch_embed: nn.Module, embed: Callable[[Tensor], Tensor], precision: Precision
) -> Rounding:
    """(x - mean) / std, a product with the patches, positions; `embed` is all of it. The image is cast to the type
    first."""
    expect(normalize, Normalize)
    projection = patch_embed.get_submodule("proj")
    expect(projection, PatchProjection)
    assert isinstance(projection, PatchProjection)
    weight, std_C = projection.weight, normalize.get_buffer("std")
    std, u = float(std_C.min()), precision.u
    patches = matrix_product(weight.flatten(1), projection.bias, precision)
    whole = matrix_product((weight / std_C).flatten(1), None, precision)

    def around(x_BCHW: Tensor) -> Rounded:
        z, y = normalize(x_BCHW), embed(x_BCHW)
        x_B, z_B, y_B = size(x_BCHW), size(z), size(y)

        def error(r: Tensor, e: Tensor) -> Tensor:
            reach = z_B + r / std
            cast = 0.0 if u == precision.sums else u * (x_B + r) / std  # float32 images are what they are
            into = patches.error(reach, 4 * u * reach + cast + e / std, y.shape[1])
            return (into + 2 * u * (y_B + whole.norm * r + into)) * OUT + TINY

        return Rounded(y, lambda r: whole.norm * r, error)

    return around
