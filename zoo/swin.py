"""The Swin Transformer (Liu et al. 2021) with injected attention, norm and MLP, and its sensitivity rules.

A subclass of timm's model: its windows, shifts, masks and merging of patches are used as they are, and the keys of its
state dict, apart from the attention's (`attn.content`), stay timm's. Only the parts are ours.

Letters: B images, C channels, H x W the grid of tokens, h x w a window, K windows of an image, N = h w, D width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from timm.models import swin_transformer
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock, SwinTransformerStage
from torch import Tensor, nn

from certizoo import UserError
from zoo.attention.window import WindowAttention, masked
from zoo.init import finish_init_, trunc_normal_init_
from zoo.rules import Bound, Layer, NoRule, Step, chain, classifier_rule, expect, layer_of, residual, rule
from zoo.vit import Normalize, patches_norm


class Swin(swin_transformer.SwinTransformer):
    """Images (B, C, H, W) in [0,1] -> logits (B, num_classes); methods and tokens (B, H', W', D) as in timm.

    Args:
        attention: width, num_heads -> the attention inside a window.
        mlp: width, hidden width -> the MLP of a block.
        norm: width -> a norm.
        embed_dim, num_heads, depths: width of the first stage (twice as wide in each next one), heads and blocks per
            stage. The other options are timm's.
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
            raise UserError(f"depths has {len(depths)} stages and num_heads {len(num_heads)}; give both one per stage")
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depths=tuple(depths),
            num_heads=tuple(num_heads),
            weight_init="skip",
            **options,
        )
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
        """Tokens before pooling: (B, C, H, W) -> (B, H', W', D)."""
        return super().forward_features(self.normalize(x_BCHW))

    def forward_intermediates(self, x_BCHW: Tensor, *args: Any, **options: Any) -> Any:
        """As in timm."""
        return super().forward_intermediates(self.normalize(x_BCHW), *args, **options)


@rule(SwinTransformerBlock)
def swin_block(module: SwinTransformerBlock) -> Layer:
    """Each half is r + branch(norm(r)), as in the blocks of a ViT."""
    attention = chain([layer_of(module.norm1), _in_windows(module), layer_of(module.drop_path1)])
    mlp = chain([layer_of(module.norm2), layer_of(module.mlp), layer_of(module.drop_path2)])
    return chain([residual(attention), residual(mlp)])


def _in_windows(module: SwinTransformerBlock) -> Layer:
    """Shift, windows, attention, and back. Windows do not see each other, and psi(r) / r is nondecreasing for the bound
    psi of one window: that of the image is the largest of theirs (MATH-PROOFS.md section 1, tokenwise lemma). Shifts
    and partitions move tokens only; padding adds constants, cropping drops tokens."""
    expect(module.attn, WindowAttention)
    if module.dynamic_mask:
        raise NoRule(module, "its mask depends on the size of the image; create the model for one size")
    (height, width), shift = module.window_size, module.shift_size
    attention = masked(module.attn, module.attn_mask)

    def layer(x_BHWD: Tensor) -> tuple[Tensor, Bound]:
        batch, rows, columns = x_BHWD.shape[:3]
        shifted = torch.roll(x_BHWD, (-shift[0], -shift[1]), dims=(1, 2))
        padded = F.pad(shifted, (0, 0, 0, -columns % width, 0, -rows % height))
        windows = swin_transformer.window_partition(padded, module.window_size)
        y_BND, bound = attention(windows.flatten(1, 2))
        y_BHWD = swin_transformer.window_reverse(y_BND, module.window_size, *padded.shape[1:3])[:, :rows, :columns]

        def largest(r: Tensor) -> Tensor:
            r_BK = r.unsqueeze(-1).expand(*r.shape, len(windows) // batch)
            return bound(r_BK.flatten(-2)).unflatten(-1, (batch, -1)).amax(-1)

        return torch.roll(y_BHWD, shift, dims=(1, 2)), largest

    return Step(layer, (module.attn,))


@rule(PatchMerging)
def patch_merging(module: PatchMerging) -> Layer:
    """Four neighbours become one token: a permutation, with zeros for those beyond an odd edge. Then two layers."""
    expect(module.reduction, nn.Linear)
    merged = chain([layer_of(module.norm), layer_of(module.reduction)])

    def layer(x_BHWD: Tensor) -> tuple[Tensor, Bound]:
        rows, columns = x_BHWD.shape[1:3]
        padded = F.pad(x_BHWD, (0, 0, 0, columns % 2, 0, rows % 2))
        return merged(padded.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3))

    return layer


@rule(SwinTransformerStage)
def swin_stage(module: SwinTransformerStage) -> Layer:
    """Merging of patches, then blocks."""
    return chain([layer_of(module.downsample), layer_of(module.blocks)])


def _embedding(module: Swin) -> Layer:
    """Patches before their norm, (B, C, H, W) -> (B, H', W', D)."""
    norm = patches_norm(module.normalize, module.patch_embed)

    def layer(x_BCHW: Tensor) -> tuple[Tensor, Bound]:
        return module.patch_embed.proj(module.normalize(x_BCHW)).movedim(1, -1), lambda r: norm * r

    return Step(layer, (module.patch_embed.proj,))


def _pooling(module: Swin) -> Layer:
    """Mean of H W tokens: 1 / sqrt(H W)."""
    expect(module.head, timm.layers.ClassifierHead)
    if module.head.global_pool.pool_type != "avg":
        raise NoRule(module.head, "the pooling has to be the mean, 'avg'")

    def layer(x_BHWD: Tensor) -> tuple[Tensor, Bound]:
        gain = x_BHWD[0, ..., 0].numel() ** -0.5
        return module.forward_head(x_BHWD, pre_logits=True), lambda r: gain * r

    return Step(layer, ("pool",))


@classifier_rule(Swin)
def swin(module: Swin) -> tuple[Layer, nn.Linear]:
    """Everything up to the pooled token, and the linear head."""
    parts = (module.patch_embed.norm, module.layers, module.norm)
    return chain([_embedding(module), *map(layer_of, parts), _pooling(module)]), module.head.fc
