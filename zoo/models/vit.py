"""The Vision Transformer (Dosovitskiy et al. 2021) with injected attention, norm and MLP, and its sensitivity rule.

    images in [0,1] -> normalise -> patches -> (class token) + positions -> blocks -> norm -> pool -> head

ConViT (d'Ascoli et al. 2021) is the same, with the class token prepended after its convolutional blocks.

Letters: B images, C channels, N tokens, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from timm.layers import PatchEmbed, trunc_normal_
from timm.models import VisionTransformer
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn.functional import pad

from certizoo import UserError
from zoo.attention.softmax.module import SoftmaxAttention
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer, Node, Precision, Rounded, Rounding
from zoo.bounds.curvature import expansion_of
from zoo.bounds.first_order import Step, layer_of
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.links import Affine
from zoo.bounds.primitives import mean, plus
from zoo.bounds.rounding import composed, exact, roundings_of
from zoo.bounds.rule_table import Link, Links, ModuleRules, NoRule, expect, register
from zoo.layers.block import PreNormBlock, recomputed
from zoo.layers.cap import cap_
from zoo.layers.constrained import constrain_
from zoo.layers.init import finish_init_, trunc_normal_init_
from zoo.layers.norm_forms import NormForms
from zoo.layers.patches import (
    ConvStem,
    Normalize,
    by_products_,
    normalize_rounding,
    patches_gram,
    patches_norm,
    patches_rounding,
    tokens,
)
from zoo.models.sentences import SentenceEmbed


class ViT(nn.Module):
    """A Vision Transformer: images (B, C, H, W) in [0,1] -> logits (B, num_classes); methods named as in timm.

    Args:
        block: index, drop_path -> one block; the model does not know what is in it.
        norm: embed_dim -> the norm before pooling, or after it if `fc_norm`.
        img_size: side of the square image.
        patch_size: side of a patch.
        in_chans: channels of the image.
        num_classes: number of logits.
        embed_dim: width of the tokens.
        depth: number of blocks.
        global_pool: 'avg' (mean of all tokens) or 'cls' (the class token).
        mean: mean of the pixels, per channel.
        std: standard deviation of the pixels, per channel.
        class_token: whether there is one; None: only if it is pooled.
        cls_after: the number of blocks after which the class token joins; it has a position only if that is 0.
        fc_norm: put the norm after pooling.
        bias: whether the patch embedding and the head have one.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0.
        init: gives the weights their initial values.
        stem: the convolutions before the one that makes the tokens, by their channels or as rows (`ConvStem`); None: a
            projection of patches makes them.
        patch_cap: cap on the spectral norm of the patch embedding (None: free).
        patch_constraint: keeps that norm at 1 instead, by 'aol' or 'orthogonal' (None: not).
        vocabulary: the number of words of a text model, whose images are embedded sentences of at most `img_size`
            tokens, one a row (zoo/models/sentences.py); None: the images are images.
    """

    grad_checkpointing = False  # `set_grad_checkpointing`

    def __init__(
        self,
        *,
        block: Callable[[int, float], nn.Module],
        norm: Callable[[int], nn.Module],
        img_size: int,
        patch_size: int,
        in_chans: int,
        num_classes: int,
        embed_dim: int,
        depth: int,
        global_pool: str,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        class_token: bool | None = None,
        cls_after: int = 0,
        fc_norm: bool = False,
        bias: bool = True,
        drop_path_rate: float = 0.0,
        init: Callable[[nn.Module], None] = trunc_normal_init_,
        stem: Sequence[int | Sequence[int]] | None = None,
        patch_cap: float | None = None,
        patch_constraint: str | None = None,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        if img_size % patch_size:
            raise UserError(f"img_size {img_size} is not a multiple of patch_size {patch_size}; change one of them")
        if global_pool not in ("avg", "cls"):
            raise UserError(f"global_pool is {global_pool!r}; choose 'avg' or 'cls'")
        if stem is not None and (patch_cap, patch_constraint) != (None, None):
            raise UserError(
                "patch_cap and patch_constraint bound a projection of patches; with a stem set both to null"
            )
        if patch_cap is not None and patch_constraint is not None:
            raise UserError("patch_cap and patch_constraint both bound the patch embedding; set one of them to null")
        self.num_classes, self.in_chans, self.global_pool = num_classes, in_chans, global_pool
        self.embed_dim = self.num_features = self.head_hidden_size = embed_dim
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size} for i in range(depth)
        ]
        self.normalize = Normalize(mean, std)
        sizes = (img_size, patch_size, in_chans, embed_dim)
        self.patch_embed: PatchEmbed | ConvStem | SentenceEmbed
        if vocabulary is not None:
            if in_chans * img_size != embed_dim:
                raise UserError(f"embed_dim={embed_dim} is not in_chans={in_chans} * img_size={img_size}; change one")
            self.patch_embed = SentenceEmbed(img_size, embed_dim, vocabulary)
        elif stem is None:
            self.patch_embed = PatchEmbed(*sizes, bias=bias)
            by_products_(self.patch_embed)
        else:
            self.patch_embed = ConvStem(*sizes, layers=stem, bias=bias)
        has_cls = global_pool == "cls" if class_token is None else class_token
        if global_pool == "cls" and not has_cls:
            raise UserError(
                "global_pool is 'cls', but there is no class token; set class_token=True or global_pool='avg'"
            )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if has_cls else None
        self.cls_after = cls_after
        positions = self.patch_embed.num_patches + (has_cls and cls_after == 0)
        self.pos_embed = nn.Parameter(torch.empty(1, positions, embed_dim))
        trunc_normal_(self.pos_embed, std=0.02)
        drop = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        self.blocks = nn.Sequential(*(block(i, drop[i]) for i in range(depth)))
        last_norm = norm(embed_dim)
        self.norm: nn.Module = nn.Identity() if fc_norm else last_norm
        self.fc_norm: nn.Module = last_norm if fc_norm else nn.Identity()
        self.head_bias = bias
        self.head = nn.Linear(embed_dim, num_classes, bias=bias)
        init(self)
        if isinstance(self.patch_embed, PatchEmbed):
            cap_(self.patch_embed.proj, [patch_cap])
            if patch_constraint is not None:
                constrain_(self.patch_embed.proj, patch_constraint)
        finish_init_(self)

    def embed(self, x_BCHW: Tensor) -> Tensor:
        """Embed normalised patches and add positions, also to a class token that has one: (B, C, H, W) -> (B, N, D)."""
        return self.place(self.patch_embed(self.normalize(x_BCHW)))

    def place(self, x_BND: Tensor) -> Tensor:
        """Add positions to tokens of patches, and the class token if it is there from the start."""
        if self.cls_after == 0:
            x_BND = self.add_cls_token(x_BND)
        if isinstance(self.patch_embed, SentenceEmbed):
            return x_BND + self.pos_embed[:, : x_BND.shape[1]]
        return x_BND + self.pos_embed

    def add_cls_token(self, x_BND: Tensor) -> Tensor:
        """Prepend the class token, in models that have one."""
        if self.cls_token is None:
            return x_BND
        return torch.cat([self.cls_token.expand(x_BND.shape[0], -1, -1), x_BND], dim=1)

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        """Return the tokens before pooling: (B, C, H, W) -> (B, N, D)."""
        return self.norm(self.trunk(x_BCHW))

    def trunk(self, x_BCHW: Tensor, first: int | None = None) -> Tensor:
        """Return the tokens after the blocks, or only the `first` ones: (B, C, H, W) -> (B, N or first, D)."""
        x_BND = self.embed(x_BCHW)
        for step in self.steps(first):
            x_BND = step(x_BND)
        return x_BND

    def steps(self, first: int | None = None) -> list[Callable[..., Tensor]]:
        """Return the blocks, the last for the `first` tokens only, and where it joins between them, the class token."""
        steps: list[Callable[..., Tensor]] = [*self.blocks]
        if self.grad_checkpointing:
            steps = [recomputed(block) for block in self.blocks]
        if first is not None:
            steps[-1] = partial(steps[-1], first=first)
        if self.cls_after:
            steps.insert(self.cls_after, self.add_cls_token)
        return steps

    def forward_intermediates(
        self,
        x_BCHW: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the tokens before pooling and a list with the patches after each block, as timm's ViT does.

        Args:
            x_BCHW: the images.
            indices: the blocks: the last n, a list of them, or None for all.
            return_prefix_tokens: make every entry of the list a pair, the patches and the class token (B, 0 or 1, D).
            norm: apply the norm to every entry.
            stop_early: leave out the blocks behind the last entry.
            output_fmt: 'NCHW' (B, D, Y, X), or 'NLC' (B, N, D).
            intermediates_only: return the list alone.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt is {output_fmt!r}; choose 'NCHW' or 'NLC'")
        taken, last = feature_take_indices(len(self.blocks), indices)
        states: list[Tensor] = []
        x_BND = self.embed(x_BCHW)
        for step in self.steps():
            x_BND = step(x_BND)
            if step != self.add_cls_token:
                states.append(x_BND)
            if stop_early and len(states) > last:
                break
        states = [self.norm(states[i]) if norm else states[i] for i in sorted(set(taken))]
        found: list[Any] = [state[:, -self.patch_embed.num_patches :] for state in states]
        if output_fmt == "NCHW":
            found = [tokens_BND.mT.unflatten(-1, self.patch_embed.grid_size).contiguous() for tokens_BND in found]
        if return_prefix_tokens:
            prefixes = [state[:, : -self.patch_embed.num_patches] for state in states]
            found = list(zip(found, prefixes, strict=True))
        return found if intermediates_only else (self.norm(x_BND), found)

    def pool(self, x_BND: Tensor) -> Tensor:
        """Pool the tokens: (B, N, D) -> (B, D); without pooling, '', they stay as they are."""
        if not self.global_pool:
            return x_BND
        return x_BND.mean(1) if self.global_pool == "avg" else x_BND[:, 0]

    def forward_head(self, x_BND: Tensor, pre_logits: bool = False) -> Tensor:
        """Map (B, N, D) to logits (B, num_classes), or to the pooled token (B, D)."""
        pooled_BD = self.fc_norm(self.pool(x_BND))
        return pooled_BD if pre_logits else self.head(pooled_BD)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.forward_head(self.norm(self.trunk(x_BCHW, self._pooled_alone())))

    def _pooled_alone(self) -> int | None:
        """Return 1 if the last block can compute the class token alone, the only one that is pooled."""
        last = self.blocks[-1] if len(self.blocks) > self.cls_after else None
        able = isinstance(last, PreNormBlock) and isinstance(last.attn, SoftmaxAttention)
        return 1 if able and self.global_pool == "cls" else None

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay skips, in addition to those of one axis; the name is timm's."""
        words = {"patch_embed.words"} if isinstance(self.patch_embed, SentenceEmbed) else set()
        return {"pos_embed", "cls_token"} | words

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the linear head, or remove it (0 classes). `global_pool=""` also removes the pooling."""
        if global_pool not in (None, "", self.global_pool):
            raise UserError("the pooling decides whether there is a class token; create a new model instead")
        self.global_pool = self.global_pool if global_pool is None else global_pool
        self.num_classes = num_classes
        head: Any = nn.Linear(self.embed_dim, num_classes, bias=self.head_bias) if num_classes else nn.Identity()
        self.head = head.to(self.pos_embed)

    # These read the parts by names that are timm's.
    get_classifier = VisionTransformer.get_classifier
    group_matcher = VisionTransformer.group_matcher
    prune_intermediate_layers = VisionTransformer.prune_intermediate_layers
    set_grad_checkpointing = VisionTransformer.set_grad_checkpointing


def _embedding(module: ViT) -> Layer:
    """Return the rule of the embedding; positions and class token are constant."""
    expect(module.patch_embed, PatchEmbed)
    expect(module.patch_embed.get_submodule("norm"), nn.Identity)
    norm = patches_norm(module.normalize, module.patch_embed)

    def layer(x_BCHW: Tensor) -> tuple[Tensor, Bound]:
        _refuse_broadcast(module, module.patch_embed(module.normalize(x_BCHW)))
        return module.embed(x_BCHW), lambda r: norm * r

    return Step(layer, (module.patch_embed,))


def _sentence(module: ViT) -> Affine:
    """Return the link of embedded sentences: a diagonal map, other places for the numbers, and positions."""

    def gain_D() -> Tensor:
        gain_C11 = (1 / module.normalize.std.double()).expand(module.in_chans, 1, 1)
        return gain_C11.flatten().repeat_interleave(module.embed_dim // module.in_chans)

    def rule() -> Layer:
        gain = gain_D().max()

        def layer(x_BCNT: Tensor) -> tuple[Tensor, Bound]:
            _, tokens_N, width = module.patch_embed(x_BCNT).shape
            if tokens_N > module.pos_embed.shape[1] or width != module.embed_dim:
                raise NoRule(module, f"a sentence has {tokens_N} tokens of width {width}; it takes fewer, or others")
            return module.embed(x_BCNT), lambda r: gain * r

        return Step(layer, ("embedding",))

    def gram() -> Callable[[Tensor], Tensor]:
        square_D = gain_D().square()
        return lambda v_CBND: v_CBND * square_D

    def rounding(precision: Precision) -> Rounding:
        placed = plus(lambda x_BCNT: module.place(module.patch_embed(x_BCNT)), precision)
        return composed([normalize_rounding(module.normalize, precision), placed])

    return Affine(module, module.embed, rule, gram, rounding)


def _constants(module: ViT) -> int:
    """Count the leading tokens that are not patches: the class token, if it is there from the start."""
    return int(module.cls_token is not None and module.cls_after == 0)


def _refuse_broadcast(module: ViT, patches_BND: Tensor) -> None:
    """Refuse other shapes: one patch would be added to all positions, or one channel to all of a position."""
    _, patches, width = patches_BND.shape
    if (patches + _constants(module), width) != (positions := tuple(module.pos_embed.shape[1:])):
        raise NoRule(
            module,
            f"the image has {patches} patches of width {width}, but there are {positions[0]} positions for tokens of "
            f"width {positions[1]}",
        )


def vit_shapes(module: ViT) -> Shapes:
    """Return the shapes of positions and class token."""
    positions = module.patch_embed.num_patches + _constants(module)
    return {"pos_embed": (1, positions, module.embed_dim), "cls_token": (1, 1, module.embed_dim)}


def _embedding_gram(module: ViT) -> Callable[[Tensor], Tensor]:
    """Return J J^T of the embedding. A leading class token is constant: its row of J is 0."""
    constant = _constants(module)
    gram_of_patches = patches_gram(module.normalize, module.patch_embed)

    def gram(v_CBND: Tensor) -> Tensor:
        return pad(gram_of_patches(v_CBND[..., constant:, :]), (0, 0, constant, 0))

    return gram


def _placing(module: ViT) -> Affine:
    """Return the link after a convolutional stem: every pixel is a token, and gets its position.

    Constants do not move.
    """

    def placed(x_BDHW: Tensor) -> Tensor:
        return module.place(tokens(x_BDHW))

    def layer(x_BDHW: Tensor) -> tuple[Tensor, Bound]:
        _refuse_broadcast(module, tokens(x_BDHW))
        return placed(x_BDHW), lambda r: r

    return Affine(
        module, placed, lambda: Step(layer, ("positions",)), rounding=lambda precision: plus(placed, precision)
    )


def _class_token(module: ViT) -> Layer:
    """Return the rule of a constant that joins: the change of the tokens is unchanged."""
    return lambda x_BND: (module.add_cls_token(x_BND), lambda r: r)


def _pooling(module: ViT) -> Layer:
    """Return the rule of pooling. Mean of N tokens: 1 / sqrt(N). One token: 1."""

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        gain = x_BND.shape[1] ** -0.5 if module.global_pool == "avg" else 1.0
        return module.pool(x_BND), lambda r: gain * r

    return Step(layer, ("pool",))


def _pooling_rounding(module: ViT, precision: Precision) -> Rounding:
    """Bound the mean of N tokens, or the class token, which involves no computation."""
    if module.global_pool != "avg":
        return exact(module.pool)
    return mean(module.pool, lambda x_BND: x_BND.shape[1], precision)


@dataclass(frozen=True)
class OneToken:
    """A norm of tokens applied to the pooled token, as a batch of one token."""

    norm: nn.Module

    def __call__(self, x_BD: Tensor) -> Tensor:
        return self.norm(x_BD.unsqueeze(1)).squeeze(1)

    def layer(self, local: bool) -> Layer:
        norm = layer_of(self.norm, local=local)

        def layer(x_BD: Tensor) -> tuple[Tensor, Bound]:
            y_B1D, bound = norm(x_BD.unsqueeze(1))
            return y_B1D.squeeze(1), bound

        return Step(layer, (self.norm,))

    def nodes(self) -> list[Node]:
        return [] if type(self.norm) is nn.Identity else [(self.layer(local=True), self._expansion())]

    def roundings(self, precision: Precision) -> list[Rounding]:
        return [] if type(self.norm) is nn.Identity else [self._rounding(precision)]

    def _expansion(self) -> Expand:
        expand_token = expansion_of(self.norm)

        def expand(x_BD: Tensor) -> Expansion:
            of_token = expand_token(x_BD.unsqueeze(1))
            forms = of_token.forms
            return replace(
                of_token,
                y=of_token.y.squeeze(1),
                remainder=lambda g_CBD: of_token.remainder(g_CBD.unsqueeze(-2)),
                pull=lambda g_CBD: of_token.pull(g_CBD.unsqueeze(-2)).squeeze(-2),
                own_push=lambda v_CBD: of_token.push(v_CBD.unsqueeze(-2)).squeeze(-2),
                forms=replace(forms, u=forms.u.squeeze(1)) if isinstance(forms, NormForms) else None,
            )

        return expand

    def _rounding(self, precision: Precision) -> Rounding:
        (rounding,) = roundings_of(self.norm, precision)

        def around(x_BD: Tensor) -> Rounded:
            of_token = rounding(x_BD.unsqueeze(1))
            return replace(of_token, y=of_token.y.squeeze(1))

        return around


def _entrance(module: ViT) -> Links:
    """Return the links from the image to the tokens of the first block."""
    if isinstance(module.patch_embed, SentenceEmbed):
        return (_sentence(module),)
    if isinstance(module.patch_embed, ConvStem):
        return module.normalize, module.patch_embed.convs, _placing(module)
    embedding = Affine(
        module,
        module.embed,
        lambda: _embedding(module),
        lambda: _embedding_gram(module),
        lambda precision: composed(
            [
                patches_rounding(module.normalize, module.patch_embed, precision),
                plus(lambda x_BDHW: module.place(tokens(x_BDHW)), precision),
            ]
        ),
    )
    return (embedding,)


def vit_trunk(module: ViT) -> tuple[Links, nn.Linear]:
    """Return everything up to the pooled token, and the linear head (for pairwise margins).

    Embedding, class token and pooling are affine. The last norm acts on every token alone, so where the class token is
    pooled, it is the norm of that token: changes of the others do not count there.
    """
    if not module.global_pool:
        raise NoRule(module, "it returns every token; create it with a pooling, 'avg' or 'cls'")
    joins = Affine(
        module,
        module.add_cls_token,
        lambda: _class_token(module),
        rounding=lambda precision: exact(module.add_cls_token),
    )
    pooling = Affine(
        module,
        module.pool,
        lambda: _pooling(module),
        rounding=lambda precision: _pooling_rounding(module, precision),
    )
    blocks: list[nn.Module | Link] = list(module.blocks)
    if module.cls_after:
        blocks.insert(module.cls_after, joins)
    norm = (module.norm, pooling) if module.global_pool == "avg" else (pooling, OneToken(module.norm))
    return (*_entrance(module), *blocks, *norm, OneToken(module.fc_norm)), module.head


register(ViT, ModuleRules(trunk=vit_trunk, shapes=vit_shapes))
