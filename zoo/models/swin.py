"""The Swin Transformer (Liu et al. 2021) with injected attention, norm and MLP, and its sensitivity rules.

It is a subclass of timm's model: windows, shifts, masks and merging of patches are used unchanged, and the keys of its
state dict, apart from the attention's (`attn.content`), are timm's. Only the parts are ours.

Letters: B images, C channels, H x W the grid of tokens, h x w a window, K windows of an image, N = h w, D width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from timm.layers.adaptive_avgmax_pool import FastAdaptiveAvgPool, FastAdaptiveMaxPool
from timm.models import swin_transformer
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock, SwinTransformerStage
from torch import Tensor, nn

from certizoo import UserError
from zoo.attention.softmax.qkv import bounded, widened
from zoo.attention.softmax.rounding import in_windows
from zoo.attention.window import WindowAttention, masked, mixing, window_bounds
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer, Node, Precision, Rounded, Rounding
from zoo.bounds.first_order import Step
from zoo.bounds.hypotheses import Shapes, expanded_in_range
from zoo.bounds.links import Affine, Residual
from zoo.bounds.primitives import mean
from zoo.bounds.rounding import composed, exact
from zoo.bounds.rule_table import Links, ModuleRules, NoRule, expect, register
from zoo.layers.init import finish_init_, trunc_normal_init_
from zoo.layers.patches import Normalize, by_products_, patches_gram, patches_norm, patches_rounding


class Swin(swin_transformer.SwinTransformer):
    """A Swin Transformer: images (B, C, H, W) in [0,1] -> logits (B, num_classes); methods and tokens as in timm.

    Tokens are (B, H', W', D).

    Args:
        attention: width, num_heads -> the attention inside a window.
        mlp: width, hidden width -> the MLP of a block.
        norm: width -> a norm.
        img_size: side of the square image.
        patch_size: side of a patch.
        embed_dim: width of the first stage; each next stage is twice as wide.
        depths: blocks per stage.
        num_heads: heads per stage.
        mean: mean of the pixels, per channel.
        std: standard deviation of the pixels, per channel.
        init: gives the weights their initial values.
        options: timm's.
    """

    def __init__(
        self,
        *,
        attention: Callable[[int, int], nn.Module],
        mlp: Callable[[int, int], nn.Module],
        norm: Callable[[int], nn.Module],
        img_size: int,
        patch_size: int,
        embed_dim: int,
        depths: Sequence[int],
        num_heads: Sequence[int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        init: Callable[[nn.Module], None] = trunc_normal_init_,
        **options: Any,
    ) -> None:
        if img_size % patch_size:
            raise UserError(f"img_size {img_size} is not a multiple of patch_size {patch_size}; change one of them")
        if len(depths) != len(num_heads):
            raise UserError(
                f"depths has {len(depths)} stages, but num_heads {len(num_heads)}; give both one value per stage"
            )
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depths=tuple(depths),
            num_heads=tuple(num_heads),
            weight_init="skip",
            **options,
        )
        by_products_(self.patch_embed)
        ours: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
            swin_transformer.WindowAttention: lambda old: WindowAttention(
                attention(old.dim, old.num_heads), old.window_size
            ),
            timm.layers.Mlp: lambda old: mlp(old.fc1.in_features, old.fc1.out_features),
            nn.LayerNorm: lambda old: norm(old.normalized_shape[0]),
        }
        for name, old in list(self.named_modules()):
            if type(old) in ours:
                self.set_submodule(name, ours[type(old)](old))
        self.normalize = Normalize(mean, std)
        init(self)
        finish_init_(self)

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        """Return the tokens before pooling: (B, C, H, W) -> (B, H', W', D)."""
        return super().forward_features(self.normalize(x_BCHW))

    def forward_intermediates(self, x_BCHW: Tensor, *args: Any, **options: Any) -> Any:
        """Forward as in timm, with normalised images."""
        return super().forward_intermediates(self.normalize(x_BCHW), *args, **options)


@dataclass(frozen=True)
class InWindows:
    """Shift, windows, attention, and back.

    Windows do not interact, and psi(r) / r is nondecreasing for the bound psi of one window: that of the image is the
    largest of theirs (docs/proofs.md#tokenwise-lemma). Shifts and partitions only move tokens; padding adds constants,
    cropping drops tokens.
    """

    block: SwinTransformerBlock

    def __call__(self, x_BHWD: Tensor) -> Tensor:
        y_BND = self.block.attn(_windows(self.block, x_BHWD), self.block.attn_mask)
        return _images(self.block, y_BND, x_BHWD.shape)

    def layer(self, local: bool) -> Layer:
        block = self.block
        _refuse_other_windows(block)
        attention = masked(block.attn, block.attn_mask, local)

        def layer(x_BHWD: Tensor) -> tuple[Tensor, Bound]:
            y_BND, bound = attention(_windows(block, x_BHWD))
            return _images(block, y_BND, x_BHWD.shape), _largest(bound, len(x_BHWD), len(y_BND))

        return Step(layer, (block.attn,))

    def nodes(self) -> list[Node]:
        return [(self.layer(local=True), expanded_in_range(self.expansion()))]

    def roundings(self, precision: Precision) -> list[Rounding]:
        """Return the rounding. Shifts, windows and cropping move and drop tokens, padding adds zeros."""
        block = self.block
        _refuse_other_windows(block)

        def around(x_BHWD: Tensor) -> Rounded:
            def windows(x: Tensor) -> Tensor:
                return _windows(block, x).unflatten(0, (len(x), -1))

            def images(y_BWND: Tensor) -> Tensor:
                return _images(block, y_BWND.flatten(0, 1), x_BHWD.shape)

            return composed([exact(windows), attention, exact(images)])(x_BHWD)

        attention = in_windows(block.attn.content, mixing(block.attn, block.attn_mask), precision)
        return [around]

    def expansion(self) -> Expand:
        """Expand all windows, which share r.

        With superhomogeneous bounds (attention/theory/core.py) sum_w psi_w(r_w) <= max_w psi_w(r), and the same for
        squares of beta; with other bounds that would be false (docs/proofs.md#tokenwise-trap). The cost of errors and
        the cap ||g|| beta are added after the maximum. Proof: docs/proofs.md#superhomogeneous.
        """
        block = self.block
        _refuse_other_windows(block)
        expand_windows = window_bounds(block.attn, block.attn_mask).expand_apart

        def expand(x_BHWD: Tensor) -> Expansion:
            inner, off = expand_windows(_windows(block, x_BHWD))
            images, windows, shape = len(x_BHWD), len(inner.y), x_BHWD.shape

            def inwards(g: Tensor) -> Tensor:
                return _windows(block, g.flatten(0, 1)).unflatten(0, (len(g), -1))

            def pull(g: Tensor) -> Tensor:
                return _images(block, inner.pull(inwards(g)).flatten(0, 1), shape).unflatten(0, (len(g), -1))

            computed = Expansion(
                y=_images(block, inner.y, shape),
                gain_B=inner.gain_B.view(images, -1).amax(-1),
                beta=_largest(inner.beta, images, windows),
                remainder=lambda g: _largest(inner.remainder(inwards(g)), images, windows),
                pull=pull,
                rounding_B=inner.rounding.view(images, -1).amax(-1),
            )
            return widened(computed, _largest(off, images, windows))

        return bounded(expand, self.layer(local=True))


def _refuse_other_windows(module: SwinTransformerBlock) -> None:
    expect(module.attn, WindowAttention)
    if module.dynamic_mask:
        raise NoRule(module, "its mask depends on the size of the image; create the model for one size")


def _windows(module: SwinTransformerBlock, x_BHWD: Tensor) -> Tensor:
    """Shift images, pad them with zeros, and cut them into windows (B K, N, D). Its transpose is `_images`."""
    (height, width), shift = module.window_size, module.shift_size
    shifted = torch.roll(x_BHWD, (-shift[0], -shift[1]), dims=(1, 2))
    padded = F.pad(shifted, (0, 0, 0, -x_BHWD.shape[2] % width, 0, -x_BHWD.shape[1] % height))
    return swin_transformer.window_partition(padded, module.window_size).flatten(1, 2)


def _images(module: SwinTransformerBlock, y_BND: Tensor, shape: torch.Size) -> Tensor:
    """Reassemble images (B, H, W, D) of this shape, without the padding."""
    (height, width), (_, rows, columns, _) = module.window_size, shape
    padded = (rows + -rows % height, columns + -columns % width)
    y_BHWD = swin_transformer.window_reverse(y_BND, module.window_size, *padded)[:, :rows, :columns]
    return torch.roll(y_BHWD, module.shift_size, dims=(1, 2))


def _largest(bound: Bound, images: int, windows: int) -> Bound:
    """Return for each image the largest bound of its windows: (..., B) -> (..., B)."""

    def largest(r: Tensor) -> Tensor:
        r_BK = r.unsqueeze(-1).expand(*r.shape, windows // images)
        return bound(r_BK.flatten(-2)).unflatten(-1, (images, -1)).amax(-1)

    return largest


def swin_block_chain(module: SwinTransformerBlock) -> Links:
    """Return two halves, as in the blocks of a ViT."""
    return (
        Residual(module.norm1, InWindows(module), module.drop_path1, first_order=True),
        Residual(module.norm2, module.mlp, module.drop_path2, first_order=True),
    )


def swin_block_shapes(module: SwinTransformerBlock) -> Shapes:
    """Return the shapes of the mask and of the relative positions.

    The mask says for every window which of its tokens are neighbours in the image; the windows must be as large as the
    attention's.
    """
    sides = zip(module.input_resolution, module.window_size, strict=True)
    windows, pairs = math.prod(-(-side // window) for side, window in sides), (module.window_area, module.window_area)
    return {"attn_mask": (windows, *pairs), "attn.relative_position_index": pairs}


def patch_merging_chain(module: PatchMerging) -> Links:
    """Return the merging of four neighbours into one token, then two layers."""
    expect(module.reduction, nn.Linear)
    merging = Affine(module, _merge, lambda: _merging(module), rounding=lambda precision: exact(_merge))
    return merging, module.norm, module.reduction


def _merge(x_BHWD: Tensor) -> Tensor:
    """Map (B, H, W, D) -> (B, H / 2, W / 2, 4 D): a permutation, with zeros for neighbours beyond an odd edge."""
    rows, columns = x_BHWD.shape[1:3]
    padded = F.pad(x_BHWD, (0, 0, 0, columns % 2, 0, rows % 2))
    return padded.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3)


def _merging(module: PatchMerging) -> Layer:
    return Step(lambda x_BHWD: (_merge(x_BHWD), lambda r: r), (module,))


def swin_stage_chain(module: SwinTransformerStage) -> Links:
    """Return the merging of patches, then blocks."""
    return module.downsample, module.blocks


def _embed(module: Swin, x_BCHW: Tensor) -> Tensor:
    """Return the patches before their norm, (B, C, H, W) -> (B, H', W', D)."""
    return module.patch_embed.proj(module.normalize(x_BCHW)).movedim(1, -1)


def _embedding(module: Swin) -> Layer:
    norm = patches_norm(module.normalize, module.patch_embed)
    return Step(lambda x_BCHW: (_embed(module, x_BCHW), lambda r: norm * r), (module.patch_embed.proj,))


def _pool(module: Swin, x_BHWD: Tensor) -> Tensor:
    return module.forward_head(x_BHWD, pre_logits=True)


def _pooling(module: Swin) -> Layer:
    """Return the rule of the mean of H W tokens: 1 / sqrt(H W)."""
    head = module.head
    expect(head, timm.layers.ClassifierHead)
    expect(head.global_pool, timm.layers.SelectAdaptivePool2d)
    if module.head.global_pool.pool_type != "avg":
        raise NoRule(
            module.head, f"it pools by {module.head.global_pool.pool_type!r}; its rule covers the mean, 'avg', only"
        )
    expect(head.global_pool.pool, FastAdaptiveAvgPool)
    for part in (head.drop, head.flatten, head.global_pool.flatten):
        expect(part, nn.Identity, nn.Dropout)

    def layer(x_BHWD: Tensor) -> tuple[Tensor, Bound]:
        gain = x_BHWD[0, ..., 0].numel() ** -0.5
        return _pool(module, x_BHWD), lambda r: gain * r

    return Step(layer, ("pool",))


def swin_trunk(module: Swin) -> tuple[Links, nn.Linear]:
    """Return everything up to the pooled token, and the linear head. Embedding and pooling are affine."""
    embedding = Affine(
        module,
        partial(_embed, module),
        lambda: _embedding(module),
        lambda: patches_gram(module.normalize, module.patch_embed),
        lambda precision: composed(
            [
                patches_rounding(module.normalize, module.patch_embed, precision),
                exact(lambda y_BDHW: y_BDHW.movedim(1, -1)),
            ]
        ),
    )
    pooling = Affine(
        module,
        partial(_pool, module),
        lambda: _pooling(module),
        rounding=lambda precision: mean(partial(_pool, module), lambda x: x[0, ..., 0].numel(), precision),
    )
    return (embedding, module.patch_embed.norm, module.layers, module.norm, pooling), module.head.fc


for _kind in (timm.layers.ClassifierHead, timm.layers.SelectAdaptivePool2d, FastAdaptiveAvgPool, FastAdaptiveMaxPool):
    register(_kind, ModuleRules())  # the rules around them read their parts
register(SwinTransformerBlock, ModuleRules(chain=swin_block_chain, shapes=swin_block_shapes))
register(PatchMerging, ModuleRules(chain=patch_merging_chain))
register(SwinTransformerStage, ModuleRules(chain=swin_stage_chain))
register(Swin, ModuleRules(trunk=swin_trunk))
