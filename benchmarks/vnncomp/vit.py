"""The competition's Vision Transformers (Shi et al. 2023) as our ViT.

The file must compute

    patches -> class token, positions -> blocks x + attn(norm(x)), x + mlp(norm(x)) -> mean of tokens -> norm -> head

with batch norms. These are affine in eval mode and are folded into the following linear map in float64:

    W (s x + t) + b = (W diag(s)) x + (W t + b),      s = gamma / sqrt(var + eps),   t = beta - s mean.

Every node of the file must have its place in this, or the file is refused.

Letters: I and O inputs and outputs of a linear map, D width of a token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.vnncomp.graph import Term, expression
from certizoo import UserError
from zoo.attention.dot_product import DotProductAttention
from zoo.layers.block import PostNormBlock
from zoo.layers.mlp import Mlp
from zoo.models.vit import ViT

# of CIFAR-10, from the benchmark's own generator of properties: its nets take (pixels - mean) / std
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


@dataclass(frozen=True)
class Linear:
    """A linear map, weight_OI x + bias_O in float64."""

    weight_OI: Tensor
    bias_O: Tensor

    def behind(self, s_I: Tensor, t_I: Tensor) -> "Linear":
        """Return the same map applied to s x + t."""
        return Linear(self.weight_OI * s_I, self.weight_OI @ t_I + self.bias_O)


@dataclass(frozen=True)
class Attention:
    """softmax(scale q k^T) v in heads, projected; the norm before it is folded into q, k, v."""

    heads: int
    scale: float
    qkv: Linear
    proj: Linear


@dataclass(frozen=True)
class Feedforward:
    """fc2(relu(fc1 x)); the norm before it is folded into fc1."""

    fc1: Linear
    fc2: Linear


@dataclass(frozen=True)
class Embedding:
    """The patch embedding of one image (1, C, side, side)."""

    image: tuple[int, ...]
    patches_DCPP: Tensor
    bias_D: Tensor
    cls_D: Tensor
    positions_ND: Tensor


def read(content: bytes) -> ViT:
    """Return our model of the net in a file: float64, in eval mode, of images in [0,1].

    Raises:
        UserError: the file is not such a net.
    """
    pooled, weight, bias = _inputs(expression(content), "Gemm")
    normed, s_D, t_D = _batch_norm(pooled)
    (x,) = _inputs(normed, "ReduceMean")
    blocks = list[tuple[Attention, Feedforward]]()
    while not _is_embedding(x):
        x, mlp = _feedforward(x)
        x, attention = _attention(x)
        blocks.insert(0, (attention, mlp))
    return _built(_embedding(x), blocks, Linear(_weight(weight), _weight(bias)).behind(s_D, t_D))


# from the expression to its parts -------------------------------------------------------------------------------------


def _inputs(term: Term, op: str, **attributes: Any) -> tuple[Term, ...]:
    """Return the inputs of a term that is this operation with these attributes; raise UserError for another."""
    if term.op != op or any(term.attributes[key] != value for key, value in attributes.items()):
        raise UserError(f"{term.name!r} comes from {term.op}, not from {op}; only the ViTs of the benchmark are read")
    return term.inputs


def _weight(term: Term) -> Tensor:
    """Return a float32 constant."""
    if term.value is None or term.value.dtype != "float32":
        raise UserError(f"{term.name!r} is computed, not a weight; only the ViTs of the benchmark are read")
    return torch.from_numpy(term.value.copy()).double()


def _refuse_unless(fits: bool, term: Term, why: str) -> None:
    if not fits:
        raise UserError(f"{term.name!r} is {why}; only the ViTs of the benchmark are read")


def _batch_norm(term: Term) -> tuple[Term, Tensor, Tensor]:
    """Return its input, s and t."""
    x, *statistics = _inputs(term, "BatchNormalization")
    gamma, beta, mean, variance = map(_weight, statistics)
    spread = variance + term.attributes["epsilon"]
    _refuse_unless(bool((spread > 0).all()), term, "a batch norm with a variance below 0")
    s = gamma / spread.sqrt()
    return x, s, beta - s * mean


def _token_norm(term: Term) -> tuple[Term, Tensor, Tensor]:
    """Return the same for a batch norm of the channels of tokens (1, N, D)."""
    (normed,) = _inputs(term, "Transpose", perm=[0, 2, 1])
    channels_first, s_D, t_D = _batch_norm(normed)
    (x,) = _inputs(channels_first, "Transpose", perm=[0, 2, 1])
    return x, s_D, t_D


def _linear(term: Term) -> tuple[Term, Linear]:
    """Return the input of a linear map of tokens, and the map."""
    one, other = _inputs(term, "Add")
    bias, product = (one, other) if one.value is not None else (other, one)
    x, weight = _inputs(product, "MatMul")
    found = Linear(_weight(weight).mT, _weight(bias))
    _refuse_unless(found.bias_O.shape == found.weight_OI.shape[:1], term, "a linear map with a bias of another width")
    return x, found


def _branch(term: Term) -> tuple[Term, Term]:
    """Return the two operands of a residual sum."""
    branch, skip = _inputs(term, "Add")
    _refuse_unless(branch.shape == skip.shape, term, "a sum of two shapes")
    return branch, skip


def _feedforward(term: Term) -> tuple[Term, Feedforward]:
    branch, skip = _branch(term)
    active, fc2 = _linear(branch)
    (hidden,) = _inputs(active, "Relu")
    normed, fc1 = _linear(hidden)
    x, s_D, t_D = _token_norm(normed)
    _refuse_unless(x is skip, term, "a residual sum of two things")
    return skip, Feedforward(fc1.behind(s_D, t_D), fc2)


def _attention(term: Term) -> tuple[Term, Attention]:
    branch, skip = _branch(term)
    merged, proj = _linear(branch)
    mixed, _ = _inputs(merged, "Reshape")
    (by_heads,) = _inputs(mixed, "Transpose", perm=[0, 2, 1, 3])
    p, v = _inputs(by_heads, "MatMul")
    (scaled,) = _inputs(p, "Softmax", axis=3)
    scores, scale = _inputs(scaled, "Mul")
    q, k = _inputs(scores, "MatMul")
    shape, many = mixed.shape, mixed.shape[2]
    _refuse_unless(merged.shape == (*shape[:2], shape[2] * shape[3]), merged, "no joining of heads")
    parts = [_heads(q, [0, 2, 1, 3]), _heads(k, [0, 2, 3, 1]), _heads(v, [0, 2, 1, 3])]
    _refuse_unless(len({normed for normed, _, _ in parts}) == 1, term, "an attention of several things")
    _refuse_unless({split for _, split, _ in parts} == {shape}, term, "an attention with heads of several kinds")
    x, s_D, t_D = _token_norm(parts[0][0])
    _refuse_unless(x is skip, term, "a residual sum of two things")
    folded = [linear.behind(s_D, t_D) for _, _, linear in parts]
    qkv = Linear(torch.cat([one.weight_OI for one in folded]), torch.cat([one.bias_O for one in folded]))
    return skip, Attention(many, float(_weight(scale)), qkv, proj)


def _heads(term: Term, perm: list[int]) -> tuple[Term, tuple[int, ...], Linear]:
    """Return the input of queries, keys or values, their shape (1, N, H, D / H), and their linear map."""
    (split,) = _inputs(term, "Transpose", perm=perm)
    whole, _ = _inputs(split, "Reshape")
    _refuse_unless(len(split.shape) == 4 and whole.shape[:2] == split.shape[:2], split, "no division into heads")
    normed, linear = _linear(whole)
    return normed, split.shape, linear


def _is_embedding(term: Term) -> bool:
    return _inputs(term, "Add")[1].value is not None


def _embedding(term: Term) -> Embedding:
    tokens, positions = _inputs(term, "Add")
    first, patches = _inputs(tokens, "Concat", axis=1)
    zeros, cls = _inputs(first, "Add")
    _inputs(zeros, "ConstantOfShape")
    (channels_first,) = _inputs(patches, "Transpose", perm=[0, 2, 1])
    projected, _ = _inputs(channels_first, "Reshape")
    image, weight, bias = _inputs(projected, "Conv")
    _inputs(image, "Input")
    found = Embedding(image.shape, *map(_weight, (weight, bias, cls, positions)))
    (_, _, height, width), (dim, _, p, q) = image.shape, found.patches_DCPP.shape
    _refuse_unless(height == width and p == q, projected, "made of patches that are not squares of a square image")
    many = (height // p) * (width // q)
    _refuse_unless(channels_first.shape == (1, dim, many), channels_first, "no row of patches")
    fits = zeros.shape == (1, 1, dim) and found.cls_D.shape == (dim,) and found.positions_ND.shape == (many + 1, dim)
    _refuse_unless(fits, term, "no class token and patches with a position each")
    return found


# from the parts to our model ------------------------------------------------------------------------------------------


def _built(embedding: Embedding, blocks: list[tuple[Attention, Feedforward]], head: Linear) -> ViT:
    """Return our model.

    Without norms of its own a block is the same function as PreNormBlock and PostNormBlock; the latter's residual sums
    are measured in one norm.
    """
    dim, channels, side, _ = embedding.patches_DCPP.shape

    def block(index: int, drop_path: float) -> nn.Module:
        attention, mlp = blocks[index]
        return PostNormBlock(
            DotProductAttention(dim, attention.heads, scale=attention.scale),
            Mlp(dim, len(mlp.fc1.bias_O), act_layer=nn.ReLU),
            nn.Identity(),
            nn.Identity(),
        )

    model = ViT(
        block=block,
        norm=lambda dim: nn.Identity(),
        img_size=embedding.image[-1],
        patch_size=side,
        in_chans=channels,
        num_classes=len(head.bias_O),
        embed_dim=dim,
        depth=len(blocks),
        global_pool="avg",
        class_token=True,
        mean=MEAN,
        std=STD,
    )
    return _filled(model.double().eval(), embedding, blocks, head)


def _filled(model: ViT, embedding: Embedding, blocks: list[tuple[Attention, Feedforward]], head: Linear) -> ViT:
    weights = {
        "patch_embed.proj.weight": embedding.patches_DCPP,
        "patch_embed.proj.bias": embedding.bias_D,
        "cls_token": embedding.cls_D[None, None],
        "pos_embed": embedding.positions_ND[None],
        **_named("head", head),
    }
    for i, (attention, mlp) in enumerate(blocks):
        weights |= _named(f"blocks.{i}.attn.qkv", attention.qkv) | _named(f"blocks.{i}.attn.proj", attention.proj)
        weights |= _named(f"blocks.{i}.mlp.fc1", mlp.fc1) | _named(f"blocks.{i}.mlp.fc2", mlp.fc2)
    places = dict(model.named_parameters())
    for name, weight in weights.items():
        if places[name].shape != weight.shape:
            raise UserError(f"{name} is of {list(weight.shape)} in the net, and of {list(places[name].shape)} in a ViT")
    if places.keys() != weights.keys():
        raise AssertionError(f"no weights for {sorted(places.keys() - weights.keys())}")
    with torch.no_grad():
        for name, weight in weights.items():
            places[name].copy_(weight)
    return model


def _named(path: str, linear: Linear) -> dict[str, Tensor]:
    return {f"{path}.weight": linear.weight_OI, f"{path}.bias": linear.bias_O}
