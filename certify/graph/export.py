"""The computation of a module as a graph of torch's operations, captured with its hooks and patched methods.

The graph is functional (nothing is written in place), its shapes are those of BATCH images, and its weights are those
of the float64 model. A model whose code asks for the numbers of an image is refused with the line that asks.
"""

import io
import logging
import operator
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from textwrap import shorten

import torch
from torch import Tensor, fx, nn

from certizoo import UserError

BATCH = 2  # images of the captured batch; one would hide which axis is the batch
# loggers that repeat a refusal
LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
# operations that compute nothing
SKIPPED = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")


@dataclass(frozen=True)
class Graph:
    """The nodes in order, the tensors that are not computed by node name, the image's node, and the result's."""

    nodes: tuple[fx.Node, ...]
    constants: Mapping[str, Tensor]
    image: fx.Node
    result: fx.Node


def captured_graph(model: nn.Module, shape: tuple[int, ...], batch: int = BATCH) -> Graph:
    """Return the graph of a float64 model in eval mode, for images of one shape. Raises UserError without one."""
    device = next(model.parameters()).device
    images = torch.zeros(batch, *shape, dtype=torch.float64, device=device)
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(model, (images,)).run_decompositions({})
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # torch.export raises many kinds of errors
        raise UserError(_refusal(model, error)) from None
    return _graph(program)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch warns of, logs and prints of a failed capture: it is in the error."""
    logs = [logging.getLogger(name) for name in LOGS]
    before = [log.disabled for log in logs]
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for log in logs:
                log.disabled = True
            yield
        finally:
            for log, disabled in zip(logs, before, strict=True):
                log.disabled = disabled


def _graph(program: torch.export.ExportedProgram) -> Graph:
    signature, nodes = program.graph_signature, tuple(program.graph.nodes)
    returned = program.call_spec.out_spec
    if returned is not None and not returned.is_leaf():
        raise UserError(f"the model returns a {returned.type.__name__}, not a tensor; certify a module that returns "
                        "the logits alone, such as model(x).logits")  # fmt: skip
    if signature.user_inputs_to_mutate:
        raise UserError("the model writes to its images; certify one that leaves them as they are, without an in-place "
                        "operation such as nn.ReLU(inplace=True) on its input")  # fmt: skip
    if signature.buffers_to_mutate:
        raise UserError(f"the model writes to {', '.join(signature.buffers_to_mutate.values())}; certify a module that "
                        "keeps no state in eval mode")  # fmt: skip
    held = {**program.state_dict, **program.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    constants = {node: held[name].detach() for node, name in names.items()}
    by_name = {node.name: node for node in nodes}
    result = by_name.get(str(signature.user_outputs[0]))
    if result is None:
        raise UserError("the model returns no tensor that it computed; certify a module that maps images to logits")
    return Graph(nodes, constants, by_name[str(signature.user_inputs[0])], result)


def _refusal(model: nn.Module, error: Exception) -> str:
    """Return one line with the line of the model's code that cannot be captured."""
    kind, text = type(model).__name__, " ".join(str(error).split())
    asked = re.search(
        r'The following call raised this error: File "([^"]+)", line (\d+), in \S+ (.*?)(?: The error|$)', text
    )
    if type(error).__name__.startswith("GuardOnDataDependent") or "data-dependent" in text:
        where = f"{asked[1]}, line {asked[2]}: {asked[3].strip()}" if asked else _last_line(error)
        return (
            f"{kind} decides by the values of a tensor, so it is not a single graph ({where}); replace the branch by "
            "torch.where, or, if the tensor is a weight, take the decision in __init__"
        )
    said = shorten(text, 160, placeholder=" ...")
    return f"{kind} cannot be captured by torch.export at {_last_line(error)}: {said}; see certify.explain"


def _last_line(error: Exception) -> str:
    """Return the innermost line of the model's code that is in a file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not any(part in frame.filename for part in ("/torch/", "/certify/graph/"))]
    return f"{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else "an unknown line"


def path_of(node: fx.Node) -> str:
    """Return the path of the innermost module that a node comes from."""
    stack = [str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]
    return stack[-1].removeprefix("L['self'].").split("@")[0] if stack else ""


def name_of(node: fx.Node) -> str:
    """Return the name of the operation, without its overload."""
    if node.target is operator.getitem:
        return "getitem"
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def other_type(node: fx.Node) -> torch.dtype | None:
    """Return the type of the result where it is not float64."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) and value.dtype is not torch.float64 else None


def line_of(node: fx.Node) -> str:
    """Return the module and the line of code that a node comes from."""
    path = path_of(node)
    lines = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', node.meta.get("stack_trace") or "")
    lines = [line for line in lines if not line[0].startswith("<")]  # code that torch generated
    lines = [line for line in lines if "/torch/" not in line[0]] or lines
    where = f"{lines[-1][0]}, line {lines[-1][1]}: {lines[-1][2].strip()}" if lines else ""
    return ", ".join(part for part in (path, where) if part) or "an unknown line"
