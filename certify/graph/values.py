"""Tensors of a captured graph as entries of nodes, so that moving entries is arithmetic on an index.

A `Node` is a step that has to be computed: one module on one input, or a sum or product of several. A `Value` is a
tensor of the graph: each of its entries is an entry of a node's output, (BATCH, *shape) flat, or a constant. Reshape,
permute, select and their like change the index alone, however the model's code writes them. Before a step its input is
brought into the form (image, ...), by a `Move` of every image where that is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from certify.graph.export import BATCH
from zoo.primitives.moves import Move, Reshape

Shape = tuple[int, ...]
SUM, PRODUCT = "sum", "product"  # names of nodes that join several


class Unmapped(Exception):
    """An operation has no counterpart; the message says what is missing."""


@dataclass(eq=False)
class Node:
    """A step, with the shape of its output for one image.

    Without inputs it is the image; without a module, the sum or product of its inputs.
    `path` is that of the module of the model whose code the step comes from.
    """

    shape: Shape
    inputs: tuple["Node", ...] = ()
    module: nn.Module | None = None
    name: str = ""
    path: str = ""
    sorted: list[tuple["Value", "Value"]] = field(default_factory=list)  # groups of its entries, and these sorted

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Product:
    """Scores q k^T of attention, or their softmax: a product of two results, which only attention may use.

    `mask` is added to the scores after the factor; it broadcasts to (batch, heads, queries, keys).
    """

    query: "Value"
    key: "Value"
    scale: float = 1.0
    softmax: bool = False
    mask: Tensor | None = None

    @property
    def shape(self) -> Shape:
        return (*self.query.shape[:-1], self.key.shape[-2])


@dataclass(frozen=True)
class Comparison:
    """One tensor compared with another; torch.where may choose the greater or the less, and either of equal entries."""

    greater: "Value | Tensor"
    less: "Value | Tensor"


@dataclass(frozen=True)
class LogProbabilities:
    """log_softmax of logits, (batch, classes): every margin is that of the logits. It may occur only as the result."""

    logits: "Value"


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: entries of a node, and constants where the index is -1."""

    node: Node
    index: Tensor
    constant: Tensor | None = field(default=None)

    @staticmethod
    def of(node: Node) -> "Value":
        """Return the whole output of a node."""
        return Value(node, torch.arange(BATCH * node.numel).view(BATCH, *node.shape))

    @property
    def shape(self) -> Shape:
        return tuple(self.index.shape)

    def permutes(self) -> bool:
        """Return True if every entry of the node occurs exactly once."""
        if self.constant is not None or self.index.numel() != BATCH * self.node.numel:
            return False
        return bool((self.index.flatten().bincount(minlength=self.index.numel()) == 1).all())

    def like(self, node: Node) -> "Value":
        """Return the same entries of another node of the same shape."""
        return Value(node, self.index, self.constant)


def materialised(value: Value) -> Node:
    """Return a node whose output is this tensor, its first axis being the batch. Raises Unmapped if it is not."""
    index, node = value.index, value.node
    if value.shape[:1] != (BATCH,):
        raise Unmapped(f"a tensor of the shape {value.shape}, whose first axis is not the batch")
    own = _of_one_image(index, node.numel)
    if value.constant is not None and not bool((value.constant == value.constant[:1]).all()):
        raise Unmapped("constants that differ from image to image")
    if own is None:
        raise Unmapped("a tensor that mixes the images of a batch")
    shape = value.shape[1:]
    if value.constant is None and torch.equal(own.flatten(), torch.arange(node.numel)):
        return node if shape == node.shape else step(Reshape(node.shape, shape), node, shape, "reshape")
    constant = None if value.constant is None else value.constant[0]
    return step(Move(own, node.shape, constant), node, shape, "move")


def _of_one_image(index: Tensor, numel: int) -> Tensor | None:
    """Return the index into one image, the same for all; None if images are mixed or differ."""
    own = index - numel * torch.arange(BATCH).view(-1, *(1,) * (index.ndim - 1))
    own = torch.where(index < 0, index, own)
    inside = ((own >= 0) & (own < numel)) | (index < 0)
    return own[0] if bool(inside.all()) and bool((own == own[:1]).all()) else None


def by_rows(value: Value) -> tuple[Node, Tensor]:
    """Return a node (image, rows, width) with the rows of this tensor, along its last axis, and where each one is.

    The rows of an image are consecutive, whichever axis is the batch. The second result is the place of every row among
    the BATCH * rows of the node.
    """
    index = value.index.reshape(-1, value.shape[-1])
    image = torch.where(index < 0, -1, index // value.node.numel).amax(1)
    if value.shape[0] == BATCH and bool((image < 0).any()):  # a row of constants, such as a class token
        image = torch.arange(BATCH).repeat_interleave(len(index) // BATCH)
    order = image.argsort(stable=True)
    rows, rest = divmod(len(index), BATCH)
    if rest or not torch.equal(image[order], torch.arange(BATCH).repeat_interleave(rows)):
        raise Unmapped("rows that do not belong to the images of the batch alike")
    shape = (BATCH, rows, value.shape[-1])
    constant = None if value.constant is None else value.constant.reshape(index.shape)[order].view(shape)
    node = materialised(Value(value.node, index[order].view(shape), constant))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return node, place


def from_rows(node: Node, place: Tensor, leading: Shape) -> Value:
    """Return the tensor (*leading, width) of a node (image, rows, width): the inverse of `by_rows`."""
    width = node.shape[-1]
    return Value(node, (place[:, None] * width + torch.arange(width)).view(*leading, width))


def alike(one: Node, other: Node) -> bool:
    """Return whether two nodes are one step, or the same move of one node."""
    if not isinstance(one.module, Move) or not isinstance(other.module, Move):
        return one is other
    pairs = [(getattr(one.module, name), getattr(other.module, name)) for name in ("index", "constant")]
    same = one.inputs == other.inputs and one.shape == other.shape
    return same and all(torch.equal(*pair) for pair in pairs)


def step(module: nn.Module, source: Node, shape: Sequence[int], name: str) -> Node:
    """Return the node of a module on one input."""
    return Node(tuple(shape), (source,), module, name)


def elementwise(value: Value, module: nn.Module, name: str) -> Value:
    """Return sigma of every entry, in the node's own layout where the tensor only rearranges it."""
    if not value.permutes():
        value = Value.of(materialised(value))
    return value.like(step(module, value.node, value.node.shape, name))


def in_layout(constant: Tensor, value: Value) -> Tensor:
    """Return a constant in the layout of a permuting value's node, of size 1 along axes where it is constant."""
    flat = torch.empty(value.index.numel(), dtype=torch.float64)
    flat[value.index.flatten()] = constant.detach().double().cpu().expand(value.shape).flatten()
    laid = flat.view(BATCH, *value.node.shape)
    if not bool((laid == laid[:1]).all()):
        raise Unmapped("constants that differ from image to image")
    found = laid[0]
    for axis in range(found.ndim):
        first = found.narrow(axis, 0, 1)
        found = first if bool((found == first).all()) else found
    return found.reshape(()) if found.numel() == 1 else found


def joined(values: Sequence[Value], name: str = SUM) -> Value:
    """Return the sum or the product of tensors of one shape, in the layout of the first that is a whole node."""
    plain = [
        k
        for k, value in enumerate(values)
        if torch.equal(value.index.flatten(), torch.arange(BATCH * value.node.numel))
    ]
    lead = values[plain[0]] if plain else values[0]
    if not lead.permutes():
        lead = Value.of(materialised(lead))
    back = torch.empty_like(lead.index.flatten())
    back[lead.index.flatten()] = torch.arange(len(back))  # the place in the tensor of every entry of the lead's node

    def relaid(value: Value) -> Node:
        parts = [
            None if part is None else part.flatten()[back].view(BATCH, *lead.node.shape)
            for part in (value.index, value.constant)
        ]
        return materialised(Value(value.node, parts[0], parts[1]))  # type: ignore[arg-type]

    return lead.like(Node(lead.node.shape, tuple(relaid(value) for value in values), None, name))


def concatenated(parts: Sequence["Value | Tensor"], dim: int) -> Value:
    """Return torch.cat of values and constants; of several nodes it is the sum of each node padded with zeros."""
    nodes = list(dict.fromkeys(part.node for part in parts if isinstance(part, Value)))

    def of(node: Node) -> Value:
        both = [_share(part, node, with_constants=node is nodes[0]) for part in parts]
        index, constant = (torch.cat([pair[k] for pair in both], dim) for k in (0, 1))
        return Value(node, index, constant if bool((index < 0).any()) else None)

    found = [of(node) for node in nodes]
    return found[0] if len(found) == 1 else joined([Value.of(materialised(value)) for value in found])


def _share(part: "Value | Tensor", node: Node, with_constants: bool) -> tuple[Tensor, Tensor]:
    """Return index and constants of one part of a tensor, as far as they come from this node."""
    zeros = torch.zeros(tuple(part.shape), dtype=torch.float64)
    if isinstance(part, Value) and part.node is node:
        return part.index, zeros if part.constant is None else part.constant
    constant = part.detach().double().cpu() if isinstance(part, Tensor) and with_constants else zeros
    return torch.full(tuple(part.shape), -1), constant
