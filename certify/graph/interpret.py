"""Walk a captured graph in order: constants are computed, operations on the image become nodes, faults are listed.

A module that is registered with rules of its own, outside torch, stays whole: the part of the graph that it computed is
replaced by the module, after both have been compared on random inputs.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_map

from certify.graph.attention import regrouped, rescaled, shifted, without
from certify.graph.export import BATCH, SKIPPED, Graph, line_of, name_of, other_type, path_of
from certify.graph.operations import MOVES, OPERATIONS, moved
from certify.graph.ordering import COMPARISONS, ORDERING, of_comparison
from certify.graph.pooling import POOLING
from certify.graph.rowwise import ROWWISE, Lengths, of_lengths
from certify.graph.values import Comparison, LogProbabilities, Node, Product, Unmapped, Value, materialised, step
from zoo.bounds.rule_table import NOTHING, NoRule, refuse_altered, refuse_unknown, rules_of

KNOWN = OPERATIONS | POOLING | ROWWISE | ORDERING
OF_AN_IMAGE = Value | Product | Lengths | LogProbabilities | Comparison
NO_RULE = "this operation has no rule"
ALIKE = 1e-9  # a module and its part of the graph, in float64


@dataclass(frozen=True)
class Missing:
    """Marks the result of an operation without a counterpart; nothing is derived from it."""


@dataclass(frozen=True)
class Fault:
    """An operation without a counterpart: its name, what is missing, and the module and line of code."""

    operation: str
    reason: str
    where: str

    def __str__(self) -> str:
        return f"{self.operation} ({self.where}): {self.reason}"


@dataclass
class Walk:
    """Modules found for the nodes of a graph."""

    graph: Graph
    model: nn.Module
    found: dict[fx.Node, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def result(self) -> Value | None:
        """Return the logits as a value; None if something is missing."""
        self.found |= {
            node: self.graph.constants[node.name] for node in self.graph.nodes if node.name in self.graph.constants
        }
        shape = tuple(self.graph.image.meta["val"].shape[1:])
        self.found[self.graph.image] = Value.of(Node(shape))
        whole = dict(_whole_modules(self.graph, self.model))
        for node in self.graph.nodes:
            if node.op == "call_function" and node not in self.found:
                self.found[node] = self._guarded(node, whole.get(node))
        end = self.found.get(self.graph.result)
        end = end.logits if isinstance(end, LogProbabilities) else end
        if isinstance(end, Tensor):
            self.faults.append(Fault("output", "the result does not depend on the image", line_of(self.graph.result)))
        if isinstance(end, Product | Lengths | Comparison):
            self.faults.append(Fault("output", "the result is part of another operation", line_of(self.graph.result)))
        if isinstance(end, Value) and isinstance(end.node.module, nn.Softmax):
            advice = "a certificate is about logits; leave out the last softmax"
            self.faults.append(Fault("softmax", advice, line_of(self.graph.result)))
        return end if isinstance(end, Value) and not self.faults else None

    def _guarded(self, node: fx.Node, whole: "Whole | None") -> Any:
        """Evaluate one node; record a fault if that is impossible."""
        operands, _ = tree_flatten((self._known(node.args), self._known(node.kwargs)))
        name = name_of(node)
        if any(isinstance(operand, Missing) for operand in operands):
            both = sum(isinstance(operand, Missing | Value) for operand in operands) > 1
            if name not in (*KNOWN, *MOVES, *SKIPPED, "getitem") or (both and name == "div"):
                self.faults.append(Fault(name, NO_RULE, line_of(node)))
            return Missing()
        try:
            if whole is not None and (value := self._module(whole)) is not None:
                return value
            return _placed(self._evaluated(node, name, operands), path_of(node))
        except Unmapped as lacking:
            reason = str(lacking)
        except (
            NotImplementedError, TypeError, ValueError, RuntimeError, IndexError, AssertionError, AttributeError
        ) as error:  # fmt: skip
            reason = f"its arguments are not mapped ({' '.join(str(error).split())[:120]})"
        self.faults.append(Fault(name, reason, line_of(node)))
        return Missing()

    def _known(self, arguments: Any) -> Any:
        return tree_map(lambda arg: self.found.get(arg) if isinstance(arg, fx.Node) else arg, arguments)

    def _evaluated(self, node: fx.Node, name: str, operands: list[Any]) -> Any:
        args, kwargs = self._known(node.args), self._known(node.kwargs)
        if name in SKIPPED:
            return None
        if node.target is operator.getitem:
            return args[0][args[1]]
        if not any(isinstance(operand, OF_AN_IMAGE) for operand in operands):
            return self._constant(node, args, kwargs)
        if name not in COMPARISONS and (other := other_type(node)):
            raise Unmapped(f"a result of {other}; compute in the type of the weights, without torch.autocast")
        if any(isinstance(operand, LogProbabilities) for operand in operands):
            raise Unmapped("log_softmax before another operation; it has a rule only as the last one")
        if any(isinstance(operand, Comparison) for operand in operands):
            return of_comparison(name, args)
        if any(isinstance(operand, Product) for operand in operands):
            return _of_product(name, args, kwargs)
        if any(isinstance(operand, Lengths) for operand in operands):
            return of_lengths(name, node.target, args, kwargs)
        if name in KNOWN:
            return KNOWN[name](*args, **kwargs)
        if name in MOVES:
            return moved(node.target, *args, **kwargs)
        if _draws(node):
            raise Unmapped("random numbers, or dropout that is active; a certificate needs eval mode")
        raise Unmapped(NO_RULE)

    def _constant(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if _draws(node):
            raise Unmapped("random numbers; a certificate needs a deterministic model")
        assert callable(node.target)
        return node.target(
            *args, **{key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        )

    def _module(self, whole: "Whole") -> Any:
        """Return what the first node of a whole module becomes; None if it is not a function of one tensor."""
        entering = self.found.get(whole.entering)
        if not isinstance(entering, Value):
            return None
        source = materialised(entering)
        shape = tuple(whole.leaving.meta["val"].shape)
        if shape[:1] != (BATCH,) or (given := self._output(whole, entering.shape)) is None:
            return None
        y = _placed(Value.of(step(whole.module, source, given[1:], "module")), whole.path)
        if given != shape:
            y = moved(torch.narrow, y, 1, 0, shape[1])
        self.found |= dict.fromkeys(whole.nodes, Missing()) | {whole.leaving: y}
        return self.found[whole.nodes[0]]

    def _output(self, whole: "Whole", shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the module's output if its part of the graph agrees with it on random inputs.

        That part may leave out the last tokens: a model may ask the last block for the class token alone.
        """
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        local: dict[fx.Node, Any] = {whole.entering: x}

        def known(argument: Any) -> Any:
            return local[argument] if argument in local else self.found[argument]

        with torch.no_grad():
            for node in whole.nodes:
                args: Any = fx.map_arg(node.args, known)
                kwargs: Any = fx.map_arg(node.kwargs, known)
                assert callable(node.target)
                local[node] = node.target(*args, **kwargs)
            y, expected = whole.module(x), local[whole.leaving]
        first = y[:, : expected.shape[1]] if y.ndim == expected.ndim > 1 else y
        alike = first.shape == expected.shape and torch.allclose(first, expected, rtol=ALIKE, atol=ALIKE)
        return tuple(y.shape) if alike else None


def _placed(found: Any, path: str) -> Any:
    """Record in all new nodes where they come from."""
    left = [found.node] if isinstance(found, Value) else []
    while left:
        node = left.pop()
        if not node.path and node.inputs:
            node.path = path or node.name
            left += node.inputs
    return found


def _of_product(name: str, args: Any, kwargs: Any) -> Any:
    """Return an allowed result of scores: times a number, masked, their softmax, or their product with values."""
    x, *rest = args
    if name in ("mul", "div") and isinstance(x, Product) and isinstance(rest[0], int | float | Tensor) and not kwargs:
        factor = float(torch.as_tensor(rest[0])) if torch.as_tensor(rest[0]).numel() == 1 else 0.0
        if not factor:
            raise Unmapped("scores of attention times a tensor")
        return rescaled(x, factor if name == "mul" else 1 / factor)
    if name == "add" and not kwargs and isinstance(other := x if isinstance(rest[0], Product) else rest[0], Tensor):
        return shifted(rest[0] if other is x else x, other.double())  # of a mask of bool, torch adds 0 and 1
    if name == "masked_fill" and isinstance(x, Product) and isinstance(rest[0], Tensor):
        return without(x, *rest)
    if name == "where" and isinstance(x, Tensor):
        a, b = rest
        return without(b, x, a) if isinstance(b, Product) else without(a, ~x, b)
    if name in ("view", "reshape", "_unsafe_view") and isinstance(x, Product):
        return regrouped(x, *rest)
    if name in ("matmul", "bmm", "softmax", "_softmax", "scaled_dot_product_attention"):
        return KNOWN[name](*args, **kwargs)
    if name in ("clone", "dropout", "alias", "contiguous", "detach") and True not in rest:
        return x
    raise Unmapped("scores of attention with anything but a factor, a mask and a softmax around them")


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


# modules that stay whole ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """A module with rules of its own: its part of the graph, from the node that enters to the one that leaves."""

    path: str
    module: nn.Module
    nodes: tuple[fx.Node, ...]
    entering: fx.Node
    leaving: fx.Node


def _whole_modules(graph: Graph, model: nn.Module) -> Iterator[tuple[fx.Node, Whole]]:
    """Yield every call of such a module at its first node."""
    calls: dict[str, list[fx.Node]] = {}
    paths: dict[str, str] = {}
    for node in graph.nodes:
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items() if node.op == "call_function" else ():
            path = str(path).removeprefix("L['self']").removeprefix(".")
            if path and _stays(_submodule(model, path)):
                calls.setdefault(key, []).append(node)
                paths[key] = path
                break
    for key, nodes in calls.items():
        inside = set(nodes)
        entering = {
            arg
            for node in nodes
            for arg in node.all_input_nodes
            if arg not in inside and arg.name not in graph.constants
        }
        entering = {arg for arg in entering if arg.op != "get_attr"}
        leaving = [node for node in nodes if node is graph.result or any(user not in inside for user in node.users)]
        if len(entering) == len(leaving) == 1:
            module = _submodule(model, paths[key])
            assert module is not None
            yield nodes[0], Whole(paths[key], module, tuple(nodes), entering.pop(), leaving[0])


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path.split("@")[0])
    except AttributeError:
        return None


def _stays(module: nn.Module | None) -> bool:
    """Return whether a module has rules of its own outside torch, and nothing in it was altered."""
    if module is None or type(module).__module__.startswith("torch."):
        return False
    try:
        rules = rules_of(module)
        for part in module.modules():
            refuse_altered(part)
            refuse_unknown(part)
    except NoRule:
        return False
    return rules is not NOTHING and (rules.rule or rules.chain) is not None
