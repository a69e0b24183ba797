"""A captured graph as a program: its operations on one image, in order, as steps that have linear bounds.

The graph is that of a batch of one, so that every tensor belongs to one image. What depends on no image is a constant,
computed here once in float64, and counts as a weight.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_map

from certify.graph.export import captured_graph, line_of
from certify.linear.steps import Affine, Pull, Shape, Step, gathered
from zoo.bounds.rule_table import NoRule

SKIPPED = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")


@dataclass(frozen=True)
class Ref:
    """The result of a step, by number; 0 is the image."""

    number: int
    shape: Shape


class Lacking(Exception):
    """An operation has no linear bounds; the message says which."""


@dataclass
class Program:
    """Steps in order; step k computes result k + 1."""

    image: Ref
    device: torch.device
    steps: list[Step] = field(default_factory=list)
    result: Ref | None = None

    def zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(shape), dtype=torch.float64, device=self.device)

    def add(self, step: Step) -> Ref:
        self.steps.append(step)
        return Ref(len(self.steps), step.shape)

    def values(self, x: Tensor) -> Tensor:
        """Return the logits of images (B, 1, C, H, W): (B, J)."""
        known = [x]
        for step in self.steps:
            known.append(step.value(*(known[k] for k in step.inputs)))
        assert self.result is not None
        return known[self.result.number].flatten(1)

    def base(self, number: int) -> int:
        """Return the result that this one rearranges, scales and shifts: its box gives this one's exactly."""
        while number and isinstance(step := self.steps[number - 1], Affine) and step.entrywise:
            (number,) = step.inputs
        return number

    def maker(self, ref: Ref) -> Step | None:
        """Return the step whose result this is, rearranged or not; None for the image."""
        number = self.base(ref.number)
        return self.steps[number - 1] if number else None

    def targets(self) -> set[int]:
        """Return the results that enter a relaxation and whose own boxes are not tight."""
        entering = {self.base(k) for step in self.steps if not isinstance(step, Affine) for k in step.inputs}
        return {k for k in entering if k and not self.steps[k - 1].tight}


def program_of(model: nn.Module, shape: Shape) -> Program:
    """Return the program of a float64 model for images of one shape. Raises NoRule for an operation without bounds."""
    from certify.linear.operations import OPERATIONS  # it builds programs

    graph = captured_graph(model, shape, batch=1)
    program = Program(Ref(0, (1, *shape)), next(model.parameters()).device)
    known: dict[fx.Node, Any] = {
        node: graph.constants[node.name] for node in graph.nodes if node.name in graph.constants
    }
    known[graph.image] = program.image
    for node in graph.nodes:
        if node.op == "call_function":
            try:
                known[node] = _evaluated(program, OPERATIONS, node, known)
            except Lacking as lacking:
                raise NoRule(model, f"linear bounds: {lacking} ({line_of(node)})") from None
    result = known[graph.result]
    if not isinstance(result, Ref):
        raise NoRule(model, "linear bounds: the result does not depend on the image, or is not one tensor")
    program.result = result
    return program


def _evaluated(
    program: Program, operations: dict[str, Callable[..., Any]], node: fx.Node, known: dict[fx.Node, Any]
) -> Any:
    packet = getattr(node.target, "overloadpacket", node.target)
    name = str(getattr(packet, "__name__", packet))
    args, kwargs = (
        tree_map(lambda arg: known[arg] if isinstance(arg, fx.Node) else arg, given)
        for given in (node.args, node.kwargs)
    )
    if node.target is operator.getitem:
        return args[0][args[1]]
    if name in SKIPPED:
        return None
    if not any(isinstance(operand, Ref) for operand in tree_flatten((args, kwargs))[0]):
        assert callable(node.target)
        return node.target(*args, **kwargs)
    if name not in operations:
        raise Lacking(f"{name} has none")
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.dtype is not torch.float64:
        raise Lacking(f"{name} computes in {value.dtype}")
    return operations[name](program, node.target, *args, **kwargs)


def affine(
    program: Program,
    refs: Sequence[Ref],
    apply: Callable[..., Tensor],
    absolute: Callable[..., Tensor] | None = None,
    terms: int = 0,
    offset: Tensor | None = None,
    moves: bool = False,
    entrywise: bool = False,
    pull: Pull | None = None,
) -> Ref:
    """Add an affine step; its shape is that of `apply` on zeros."""
    shapes = tuple(ref.shape for ref in refs)
    zeros = [program.zeros(shape) for shape in shapes]
    y = apply(*zeros)
    if moves and len(refs) == 1 and pull is None and offset is None:
        pull = gathered(apply, zeros[0])
    return program.add(
        Affine(
            inputs=tuple(ref.number for ref in refs),
            shape=tuple(y.shape),
            apply=apply,
            absolute=absolute or apply,
            terms=terms,
            offset=None if offset is None else offset.abs().expand(y.shape),
            shapes=shapes,
            moves=moves,
            entrywise=entrywise or (moves and len(refs) == 1),
            pull=pull,
            constant=None if offset is None else y,
        )
    )
