"""An ONNX file as one expression: the inputs and operation of every tensor, for one image.

Computations on shapes are evaluated here; computations on numbers stay as `Term`s with their shapes. Operations and
attributes are those that torch writes for a Vision Transformer with opset 9. Any other is refused, so that an
expression is complete. The file comes from someone else: nothing in it is executed, its weights lie within it, and no
memory is allocated because of a number in it alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from certizoo import UserError

OPSET = 9
FEW = 64  # numbers of a shape, far more than occur
MAX_SIDE = 2048  # of an image
TYPES = {TensorProto.FLOAT: np.float32, TensorProto.INT64: np.int64}
# operation: its attributes, and the one allowed value of some of them
OPERATIONS: dict[str, dict[str, Any]] = {
    "Add": {},
    "BatchNormalization": {"epsilon": None, "momentum": None},
    "Concat": {"axis": None},
    "Constant": {"value": None},
    "ConstantOfShape": {"value": None},
    "Conv": {"dilations": [1, 1], "group": 1, "kernel_shape": None, "pads": [0, 0, 0, 0], "strides": None},
    "Gather": {"axis": 0},
    "Gemm": {"alpha": 1.0, "beta": 1.0, "transB": 1},
    "MatMul": {},
    "Mul": {},
    "ReduceMean": {"axes": [1], "keepdims": 0},
    "Relu": {},
    "Reshape": {},
    "Shape": {},
    "Slice": {"axes": [0], "starts": None, "ends": None},
    "Softmax": {"axis": None},
    "Transpose": {"perm": None},
    "Unsqueeze": {"axes": [0]},
}
Shape = tuple[int, ...]
Attributes = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Term:
    """A tensor: its operation, inputs and shape; `value` if it is a constant."""

    op: str
    name: str
    shape: Shape
    inputs: tuple["Term", ...] = ()
    attributes: Attributes = field(default_factory=dict)
    value: NDArray[Any] | None = None


def expression(content: bytes) -> Term:
    """Return the file's one output in terms of its input 'Input' and constants. Raises UserError."""
    graph = _graph(content)
    terms = {tensor.name: _constant(tensor.name, tensor) for tensor in graph.initializer}
    if len(terms) != len(graph.initializer):
        raise UserError("the net has two weights of one name; export it again")
    given = [tensor for tensor in graph.input if tensor.name not in terms]
    if len(given) != 1 or len(graph.output) != 1:
        raise UserError(f"the net has {len(given)} inputs and {len(graph.output)} outputs; give one with one of each")
    terms[given[0].name] = Term("Input", given[0].name, _input_shape(given[0]))
    for node in graph.node:
        term = _term(node, terms)
        if term.name in terms:
            raise UserError(f"the net computes {term.name!r} twice; export it again")
        terms[term.name] = term
    if graph.output[0].name not in terms:
        raise UserError("the net does not compute its output; export it again")
    return terms[graph.output[0].name]


def _graph(content: bytes) -> onnx.GraphProto:
    try:
        model = onnx.ModelProto.FromString(content)
    except DecodeError:
        raise UserError("the net is not an ONNX file; fetch it again") from None
    versions = [(opset.domain, opset.version) for opset in model.opset_import]
    if versions != [("", OPSET)]:
        raise UserError(f"the net is of the opsets {versions[:4]}; export it with opset_version={OPSET}")
    if model.functions or model.graph.sparse_initializer or model.graph.quantization_annotation:
        raise UserError("the net has functions or sparse weights of its own; export it as a plain graph")
    return model.graph


def _constant(name: str, tensor: TensorProto) -> Term:
    """Return a weight; numpy's reshape checks its dimensions against its bytes."""
    if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
        raise UserError(f"the weight {name!r} lies in another file; put all weights into the net's own")
    if tensor.data_type not in TYPES:
        raise UserError(f"the weight {name!r} is of ONNX's type {tensor.data_type}; give float32")
    try:
        value = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"the weight {name!r} does not have its declared size; export the net again") from None
    return Term("Constant", name, value.shape, value=value)


def _input_shape(given: onnx.ValueInfoProto) -> Shape:
    """Return the shape of one image; the first dimension counts images."""
    kind = given.type.tensor_type
    dims = [dim.dim_value for dim in kind.shape.dim]
    if kind.elem_type != TensorProto.FLOAT or len(dims) != 4 or not all(0 < dim <= MAX_SIDE for dim in dims[1:]):
        raise UserError(
            f"the net's input has the shape {dims[:8]}; give float32 images (batch, channels, height, width)"
        )
    return 1, *dims[1:]


def _term(node: onnx.NodeProto, terms: Mapping[str, Term]) -> Term:
    """Return the term of a node whose inputs are known."""
    op = node.op_type
    if node.domain or op not in OPERATIONS or len(node.output) != 1:
        raise UserError(f"the node {node.name!r} is {node.domain}{op}, which is not supported; only a ViT's nodes are")
    if absent := [name for name in node.input if name not in terms]:
        raise UserError(f"the node {node.name!r} reads {absent[0]!r}, which no earlier node computes")
    name, inputs = node.output[0], tuple(terms[key] for key in node.input)
    try:
        attributes = _attributes(node)
        if op == "Constant":
            return _constant(name, attributes["value"])
        if op == "Shape" or (op in _OF_SHAPES and all(map(_is_shape, inputs))):
            value = _OF_SHAPES[op](attributes, *inputs)
            return Term("Constant", name, value.shape, value=value)
        return Term(op, name, _SHAPES[op](attributes, *inputs), inputs, attributes)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, ZeroDivisionError):
        shapes = ", ".join(str(list(term.shape)) for term in inputs)
        raise UserError(f"the node {node.name!r}, {op} of {shapes or 'nothing'}, is not read in this form") from None


def _attributes(node: onnx.NodeProto) -> Attributes:
    """Return all attributes; refuse missing or unknown ones."""
    found = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    wanted = OPERATIONS[node.op_type]
    fits = len(found) == len(node.attribute) and found.keys() == wanted.keys()
    _need(fits and all(wanted[key] in (None, found[key]) for key in found))
    return found


def _need(fits: bool) -> None:
    if not fits:
        raise ValueError("not in this form")


# of shapes: constants -------------------------------------------------------------------------------------------------


def _is_shape(term: Term) -> bool:
    return term.value is not None and term.value.dtype == np.int64


def _numbers(term: Term) -> list[int]:
    """Return the numbers of a known shape."""
    _need(_is_shape(term) and term.value is not None and len(term.shape) == 1 and term.shape[0] <= FEW)
    assert term.value is not None
    return [int(number) for number in term.value]


def _gather(attributes: Attributes, shape: Term, index: Term) -> NDArray[np.int64]:
    _need(index.value is not None and index.shape == ())
    assert index.value is not None
    return np.array(_numbers(shape)[int(index.value)])


def _slice(attributes: Attributes, shape: Term) -> NDArray[np.int64]:
    (start,), (end,) = attributes["starts"], attributes["ends"]
    return np.array(_numbers(shape)[start:end], dtype=np.int64)


def _unsqueeze(attributes: Attributes, number: Term) -> NDArray[np.int64]:
    _need(number.shape == ())
    assert number.value is not None
    return number.value.reshape(1)


def _joined(attributes: Attributes, *shapes: Term) -> NDArray[np.int64]:
    _need(attributes["axis"] == 0 and len(shapes) <= FEW)
    return np.array([number for shape in shapes for number in _numbers(shape)], dtype=np.int64)


_OF_SHAPES: dict[str, Callable[..., NDArray[np.int64]]] = {
    "Shape": lambda attributes, x: np.array(x.shape, dtype=np.int64),
    "Gather": _gather,
    "Slice": _slice,
    "Unsqueeze": _unsqueeze,
    "Concat": _joined,
}


# of numbers: their shapes ---------------------------------------------------------------------------------------------


def _batch_norm(attributes: Attributes, x: Term, *statistics: Term) -> Shape:
    _need(isinstance(attributes["epsilon"], float) and len(statistics) == 4)
    _need(all(one.shape == x.shape[1:2] for one in statistics))
    return x.shape


def _concat(attributes: Attributes, x: Term, y: Term) -> Shape:
    _need(attributes["axis"] == 1 and x.shape[:1] + x.shape[2:] == y.shape[:1] + y.shape[2:])
    return x.shape[0], x.shape[1] + y.shape[1], *x.shape[2:]


def _zeros(attributes: Attributes, shape: Term) -> Shape:
    _need(not numpy_helper.to_array(attributes["value"]).any())
    return tuple(_numbers(shape))


def _conv(attributes: Attributes, x: Term, weight: Term, bias: Term) -> Shape:
    """Return the shape for patches that do not overlap and fill the image."""
    (_, channels, height, width), (dim, of, p, q) = x.shape, weight.shape
    _need(attributes["kernel_shape"] == attributes["strides"] == [p, q] and bias.shape == (dim,))
    _need(of == channels and height % p == width % q == 0)
    return 1, dim, height // p, width // q


def _gemm(attributes: Attributes, x: Term, weight: Term, bias: Term) -> Shape:
    (many, inner), (classes, of) = x.shape, weight.shape
    _need(inner == of and bias.shape == (classes,))
    return many, classes


def _matmul(attributes: Attributes, x: Term, y: Term) -> Shape:
    _need(len(x.shape) >= 2 and len(y.shape) >= 2 and x.shape[-1] == y.shape[-2])
    _need(len(y.shape) == 2 or x.shape[:-2] == y.shape[:-2])
    return *x.shape[:-1], y.shape[-1]


def _mul(attributes: Attributes, x: Term, factor: Term) -> Shape:
    _need(factor.shape == () and factor.value is not None)
    return x.shape


def _mean(attributes: Attributes, x: Term) -> Shape:
    _need(len(x.shape) == 3)
    return x.shape[0], x.shape[2]


def _reshape(attributes: Attributes, x: Term, shape: Term) -> Shape:
    target = _numbers(shape)
    known = math.prod(number for number in target if number != -1)
    _need(target.count(-1) <= 1 and known > 0 and math.prod(x.shape) % known == 0)
    found = tuple(math.prod(x.shape) // known if number == -1 else number for number in target)
    _need(min(found) > 0 and math.prod(found) == math.prod(x.shape))
    return found


def _transpose(attributes: Attributes, x: Term) -> Shape:
    _need(sorted(attributes["perm"]) == [*range(len(x.shape))])
    return tuple(x.shape[axis] for axis in attributes["perm"])


_SHAPES: dict[str, Callable[..., Shape]] = {
    "Add": lambda attributes, x, y: np.broadcast_shapes(x.shape, y.shape),
    "BatchNormalization": _batch_norm,
    "Concat": _concat,
    "ConstantOfShape": _zeros,
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Mul": _mul,
    "ReduceMean": _mean,
    "Relu": lambda attributes, x: x.shape,
    "Reshape": _reshape,
    "Softmax": lambda attributes, x: x.shape,
    "Transpose": _transpose,
}
