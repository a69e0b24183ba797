"""From nodes to a tree of modules: a chain of steps, in which a sum is `Branches` from the value where they part.

    parts(a, b)    the modules that turn the value of node a into that of node b

The place where the branches of a sum part is their nearest common dominator: the last node on every path from the
image to each of them. Nodes after it that two branches share are in both, so the tree computes the graph's function.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from certify.graph.values import PRODUCT, Node
from zoo.bounds.rule_table import rules_of
from zoo.layers.mlp import Mlp
from zoo.primitives.branches import Branches
from zoo.primitives.folded import LAYERS, Folded, factors_of
from zoo.primitives.gates import Gate

LARGEST = 4000  # modules of a tree; branches that share much would make it exponential


class TooLarge(Exception):
    """The branches of a graph share so much that its tree would be huge."""


class Tree:
    """The nodes before one node, with their dominators."""

    def __init__(self, end: Node) -> None:
        self.order = list(_sorted(end))
        self.rank = {node: rank for rank, node in enumerate(self.order)}
        self._above: dict[Node, frozenset[Node]] = {}
        for node in self.order:
            above = [self._above[source] for source in node.inputs]
            self._above[node] = frozenset({node}).union(frozenset.intersection(*above) if above else ())
        self.size = 0

    def parts(self, start: Node, end: Node) -> list[tuple[str, nn.Module, Node]]:
        """Return name, module and input of every step from one node to another."""
        found: list[tuple[str, nn.Module, Node]] = []
        while end is not start:
            self.size += 1
            if self.size > LARGEST:
                raise TooLarge
            if end.module is not None:
                (source,) = end.inputs
                found.append((_title(end), end.module, source))
            else:
                common = frozenset.intersection(*(self._above[source] for source in end.inputs))
                source = max(common, key=self.rank.__getitem__)
                branches = [named(self.parts(source, one)) for one in end.inputs]
                joined = Gate(*branches) if end.name == PRODUCT else Branches(*branches)
                found.append((_title(end), joined, source))
            end = source
        return found[::-1]


def _title(node: Node) -> str:
    """Return the path of the step's module; a step that only moves entries is named after what it does."""
    return node.name if node.name in ("move", "reshape") else node.path or node.name


def _sorted(end: Node) -> Iterator[Node]:
    """Yield the nodes before one node, inputs first."""
    done: set[Node] = set()
    left: list[tuple[Node, bool]] = [(end, False)]
    while left:
        node, ready = left.pop()
        if node in done:
            continue
        if ready or not node.inputs:
            done.add(node)
            yield node
        else:
            left += [(node, True), *((source, False) for source in node.inputs)]


def named(parts: Sequence[tuple[str, nn.Module, Node]]) -> nn.Sequential:
    """Return the steps as one module, with names from the model; an MLP of three steps is one."""
    chain, steps = nn.Sequential(), _fused(parts)
    for name, module in steps:
        key = name.replace(".", "/") or "step"
        key = f"{key}_" if hasattr(nn.Sequential, key) else key
        number = sum(other == key or other.startswith(f"{key}__") for other, _ in chain.named_children())
        chain.add_module(f"{key}__{number + 1}" if number else key, module)
    return chain


def _fused(parts: Sequence[tuple[str, nn.Module, Node]]) -> Iterator[tuple[str, nn.Module]]:
    at = 0
    while at < len(parts):
        three = parts[at : at + 3]
        if (mlp := _mlp(three)) is not None:
            yield three[0][0], mlp
            at += 3
        elif count := _foldable([module for _, module, _ in three]):
            yield ", ".join(name for name, _, _ in three[:count]), Folded(*(module for _, module, _ in three[:count]))
            at += count
        else:
            yield parts[at][:2]
            at += 1


def _foldable(three: Sequence[nn.Module]) -> int:
    """Return how many of the first modules are one layer with factors around it; 0 if it has none."""
    at = next((k for k, module in enumerate(three[:2]) if type(module) in LAYERS), None)
    if at is None:
        return 0
    layer = three[at]
    out, into, *_ = layer.get_parameter("weight").shape
    into *= layer.groups if isinstance(layer, nn.Conv2d) else 1
    if at and factors_of(three[0], layer, into) is None:
        return 0
    behind = at + 1 < len(three) and factors_of(three[at + 1], layer, out) is not None
    return at + 1 + behind if at or behind else 0


def _mlp(three: Sequence[tuple[str, nn.Module, Node]]) -> nn.Module | None:
    """Return W_2 sigma(W_1 x + b_1) + b_2 of tokens as one module, whose second order is that of `fused`."""
    if len(three) < 3 or len(three[0][2].shape) != 2:
        return None
    first, act, second = (module for _, module, _ in three)
    if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear) or rules_of(act).activation is None:
        return None
    if first.in_features != second.out_features:
        return None
    mlp = Mlp(first.in_features, first.out_features, act_layer=nn.Identity)
    mlp.fc1, mlp.act, mlp.fc2 = first, act, second
    return mlp
