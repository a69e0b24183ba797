"""Softmax attention in a captured graph, however it is written, as `DotProductAttention` with copies of its weights.

    F.scaled_dot_product_attention(q, k, v)      nn.MultiheadAttention      softmax(s q k^T) v

Attention in windows is that of all tokens with a mask (windows.py).
q, k and v have to be linear maps of the same tokens, token by token, and the heads as wide as the tokens together. That
is read off the index of each: which row of which linear layer, of which token, every entry is.

Letters: H heads, N tokens, D width, O = D / H.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from certify.graph.export import BATCH
from certify.graph.values import Node, Product, Unmapped, Value, alike, step
from certify.graph.windows import Windows
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.masked import MaskedAttention
from zoo.primitives.diagonal import Diagonal
from zoo.primitives.moves import Move


@dataclass(frozen=True)
class Projection:
    """A linear map of tokens: weight (H, O, D) and bias (H, O) of the heads, and a factor."""

    source: Node
    weight: Tensor
    bias: Tensor
    factor: float


def attended(
    q: Value,
    k: Value,
    v: Value,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """Return attention of q, k, v (batch, heads, tokens, width); `scale` is 1 / sqrt(width) unless given."""
    if isinstance(mask, Value | Product):
        raise Unmapped("attention with a mask that depends on the image")
    if dropout or enable_gqa:
        raise Unmapped("attention with dropout or grouped queries")
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2]).tril().bool()
    if mask is not None:
        mask = _added(mask)
    if len(q.shape) == 3:  # one head
        q, k, v = (Value(x.node, x.index.unsqueeze(1), x.constant) for x in (q, k, v))
        mask = mask.unsqueeze(-3) if isinstance(mask, Tensor) and mask.ndim > 1 else mask
        y = attended(q, k, v, mask, scale=scale)
        return Value(y.node, y.index.squeeze(1))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if len(q.shape) > 4 or q.shape[0] != BATCH:
        return _in_windows(q, k, v, mask, scale)
    parts = [projection(value, what) for value, what in ((q, "queries"), (k, "keys"), (v, "values"))]
    source = parts[0].source
    if not all(alike(part.source, source) for part in parts):
        raise Unmapped("attention whose queries, keys and values are projections of different tokens")
    heads, width, dim = parts[2].weight.shape
    if any(part.weight.shape != (heads, width, dim) for part in parts) or heads * width != dim:
        raise Unmapped(
            f"attention of {heads} heads of width {width} on tokens of width {dim}; heads times width must be {dim}"
        )
    if parts[2].factor != 1:
        raise Unmapped("attention whose values have a factor")
    with torch.no_grad():
        module = DotProductAttention(dim, heads, scale * parts[0].factor * parts[1].factor, proj_bias=False).double()
        module.qkv.weight.copy_(torch.cat([part.weight.flatten(0, 1) for part in parts]))
        module.qkv.bias.copy_(torch.cat([part.bias.flatten() for part in parts]))
        module.proj.weight.copy_(torch.eye(dim))
    masked = _masked(module, _mask(mask, (BATCH, heads, source.shape[0], source.shape[0])))
    node = step(masked, source, source.shape, "attention")
    rows = torch.arange(BATCH * node.numel).view(BATCH, source.shape[0], heads, width)
    return Value(node, rows.transpose(1, 2))


def _in_windows(q: Value, k: Value, v: Value, mask: Tensor | None, scale: float) -> Value:
    """Return attention of (..., heads, tokens, width) whose leading axes are the windows of all images."""
    lead, shape = q.shape[:-3], q.shape[-3:]
    if mask is not None:
        mask = mask[(None,) * (len(q.shape) - mask.ndim)]
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
    flat = [Value(x.node, x.index.flatten(0, -4)) for x in (q, k, v)]
    windows = Windows.of(flat[0])
    if not all(windows.same(Windows.of(x)) for x in flat[1:]):
        raise Unmapped("attention whose queries, keys and values are projections of different tokens")
    whole_q, whole_k, whole_v = map(windows.joined, flat)
    y = windows.apart(attended(whole_q, whole_k, whole_v, windows.mask(mask), scale=scale))
    return Value(y.node, y.index.view(*lead, *shape))


def _added(mask: Tensor) -> Tensor:
    """Return the numbers that a mask adds to scores; a boolean says which keys to keep."""
    given = mask.detach().cpu()
    if given.dtype is torch.bool:
        return torch.zeros(given.shape).double().masked_fill(~given, -torch.inf)
    return given.double()


def _mask(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return what is added to the scores, (1 or heads, tokens, tokens); None if nothing is."""
    if mask is None:
        return None
    whole = mask.expand(shape)
    if not bool((whole == whole[:1]).all()):
        raise Unmapped("attention with a mask that differs from image to image")
    if not bool((whole != -torch.inf).any(-1).all()) or bool((whole.isnan() | (whole == torch.inf)).any()):
        raise Unmapped("attention with a mask that leaves a query no key, or with NaN or infinity in it")
    found = whole[0, :1] if bool((whole == whole[:, :1]).all()) else whole[0]
    return None if not bool(found.any()) else found


def _masked(module: DotProductAttention, mask: Tensor | None) -> nn.Module:
    return module if mask is None else MaskedAttention(module, mask)


def projection(value: Value, what: str) -> Projection:
    """Return the linear map of tokens that gives these entries (batch, heads, tokens, width)."""
    node, factor = value.node, 1.0
    while isinstance(scale := node.module, Diagonal) and scale.weight.numel() == 1 and not bool(scale.bias.any()):
        number = float(scale.weight)
        node, factor = node.inputs[0], factor / number if scale.divides else factor * number
    if value.constant is not None or not isinstance(node.module, nn.Linear) or len(node.shape) != 2:
        raise Unmapped(f"attention whose {what} are not a linear map of the tokens")
    tokens, width = node.shape
    index = value.index
    image, token, row = index // (tokens * width), index // width % tokens, index % width
    expected = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(tokens).view(1, 1, -1, 1)
    if index.shape[2] != tokens or not bool((image == expected[0]).all()) or not bool((token == expected[1]).all()):
        raise Unmapped(f"attention whose {what} come from other tokens than their own")
    if not bool((row == row[:1, :, :1]).all()):
        raise Unmapped(f"attention whose {what} have other weights at other tokens")
    rows = row[0, :, 0]
    weight = node.module.weight.detach()[rows]
    bias = torch.zeros(rows.shape).double() if node.module.bias is None else node.module.bias.detach()[rows]
    return Projection(node.inputs[0], weight, bias, factor)


def merged_projection(source: Node, module: nn.Linear) -> Node | None:
    """Return attention with this linear layer as its W_O, if the layer reads attention that has none yet.

    A `Move` in between may permute the channels, which is a permutation of the columns of W_O.
    """
    node, columns = source, torch.arange(module.in_features)
    if isinstance(node.module, Move) and node.inputs[0].shape == node.shape:
        rows = node.module.index.view(node.shape) - torch.arange(node.shape[0])[:, None] * node.shape[1]
        if bool((rows == rows[:1]).all()) and torch.equal(rows[0].sort().values, columns):
            node, columns = node.inputs[0], rows[0]
    around = node.module
    found = around.content if isinstance(around, MaskedAttention) else around
    if (
        not isinstance(found, DotProductAttention)
        or found.proj.bias is not None
        or module.out_features != module.in_features
    ):
        return None
    if not torch.equal(found.proj.weight, torch.eye(module.in_features).double()):
        return None
    joint = DotProductAttention(
        module.in_features, found.num_heads, found.scale, proj_bias=module.bias is not None
    ).double()
    with torch.no_grad():
        joint.qkv.load_state_dict(found.qkv.state_dict())
        joint.proj.weight[:, columns] = module.weight
        if module.bias is not None:
            joint.proj.bias.copy_(module.bias)
    mask = around.mask() if isinstance(around, MaskedAttention) else None
    return step(_masked(joint, mask), node.inputs[0], node.shape, "attention")


# attention by two products --------------------------------------------------------------------------------------------


def product(x: Any, y: Any) -> Any:
    """Return scores q k^T, or attention from their softmax and the values."""
    if isinstance(x, Product) and x.softmax and isinstance(y, Value):
        return attended(x.query, x.key, y, x.mask, scale=x.scale)
    if isinstance(x, Value) and isinstance(y, Value):
        return Product(x, Value(y.node, y.index.transpose(-2, -1), y.constant))
    raise Unmapped("a product of two results of the image that is not attention")


def regrouped(x: Product, shape: Any) -> Product:
    """Return scores with other leading axes; those of queries and keys stay."""
    found = torch.empty(x.shape, device="meta").reshape(shape).shape
    if found[-2:] != x.shape[-2:]:
        raise Unmapped("scores of attention whose queries or keys are arranged otherwise")
    query, key = (Value(y.node, y.index.reshape(*found[:-2], *y.shape[-2:]), y.constant) for y in (x.query, x.key))
    mask = None if x.mask is None else x.mask.expand(x.shape).reshape(found)
    return replace(x, query=query, key=key, mask=mask)


def softmax(x: Product, dim: int) -> Product:
    """Return the softmax of scores."""
    if x.softmax or dim not in (-1, len(x.query.shape) - 1):
        raise Unmapped("a softmax of scores over anything but the keys")
    return replace(x, softmax=True)


def rescaled(x: Product, factor: float) -> Product:
    """Return scores times a number."""
    if x.softmax or x.mask is not None:
        raise Unmapped("a factor of attention's weights, or of scores behind their mask")
    return replace(x, scale=x.scale * factor)


def shifted(x: Product, mask: Tensor) -> Product:
    """Return scores plus constants; -inf leaves a key out."""
    if x.softmax:
        raise Unmapped("attention with something added to its weights")
    return replace(x, mask=mask if x.mask is None else x.mask + mask)


def without(x: Product, left_out: Tensor, value: Any) -> Product:
    """Return scores that are -inf where `left_out` says so."""
    if float(value) != -torch.inf:
        raise Unmapped(f"attention with scores set to {float(value):g}; use -inf, which leaves a key out")
    return shifted(x, _added(~left_out))
