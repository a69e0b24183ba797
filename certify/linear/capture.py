"""A captured graph as a program.

The graph is that of a batch of one, so that every tensor belongs to one image. What depends on no image is a constant,
computed here once in float64, and counts as a weight.
"""

import operator
from typing import Any

from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_map

from certify.graph.export import SKIPPED, captured_graph, line_of, name_of, other_type
from certify.linear.enclosures.steps import Shape
from certify.linear.operations import OPERATIONS
from certify.linear.program import Lacking, Program, Ref
from zoo.bounds.rule_table import NoRule


def program_of(model: nn.Module, shape: Shape) -> Program:
    """Return the program of a float64 model for images of one shape. Raises NoRule for an operation without bounds."""
    graph = captured_graph(model, shape, batch=1)
    program = Program(Ref(0, (1, *shape)), next(model.parameters()).device)
    known: dict[fx.Node, Any] = {
        node: graph.constants[node.name] for node in graph.nodes if node.name in graph.constants
    }
    known[graph.image] = program.image
    for node in graph.nodes:
        if node.op == "call_function":
            try:
                known[node] = _evaluated(program, node, known)
            except Lacking as lacking:
                raise NoRule(model, f"linear bounds: {lacking} ({line_of(node)})") from None
            except (NotImplementedError, TypeError, ValueError, RuntimeError, IndexError) as error:
                why = " ".join(str(error).split())[:120]
                raise NoRule(model, f"linear bounds: {node.target} has none in this form: {why}") from None
    result = known[graph.result]
    if not isinstance(result, Ref):
        raise NoRule(model, "linear bounds: the result does not depend on the image, or is not one tensor")
    program.result = result
    return program


def _evaluated(program: Program, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    name = name_of(node)
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
    if name not in OPERATIONS:
        raise Lacking(f"{name} has none")
    if other := other_type(node):
        raise Lacking(f"{name} computes in {other}")
    return OPERATIONS[name](program, node.target, *args, **kwargs)
