"""A network of the competition is read as the function that onnxruntime computes from its file, or refused."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    RuntimeException,
)
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotComputed

from benchmarks.vnncomp.vit import read
from certizoo import UserError
from tests.tools.cases import mostly_slow
from tests.tools.exported_vit import altered, exported, published_vit

Model = onnx.ModelProto
NET = exported(published_vit(0))
NODES = len(onnx.ModelProto.FromString(NET).graph.node)


def theirs(content: bytes, inputs: torch.Tensor) -> np.ndarray[Any, Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    found: np.ndarray[Any, Any] = session.run(None, {"input": inputs.float().numpy()})[0]
    return found


def off(content: bytes, side: int = 8) -> float:
    """Return the largest difference between our logits and onnxruntime's."""
    model = read(content)
    images = torch.rand(6, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return float(abs(model(images).numpy() - theirs(content, model.normalize(images))).max())


@pytest.mark.parametrize(
    "sizes",
    [{}, {"depth": 0}, {"depth": 3, "heads": 1}, {"patch": 2}, {"side": 12, "dim": 12, "heads": 3, "classes": 7}],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_logits_are_those_of_onnxruntime(sizes: dict[str, int], seed: int) -> None:
    side = sizes.get("side", 8)
    assert off(exported(published_vit(seed, **sizes), side), side) < 1e-5


@pytest.mark.parametrize("sizes", [{"depth": 2, "patch": 16}, {"depth": 3, "patch": 8}])
def test_the_published_sizes_are_read(sizes: dict[str, int]) -> None:
    content = exported(published_vit(3, side=32, dim=48, heads=3, classes=10, **sizes), side=32)
    assert off(content, 32) < 1e-5


def first(model: Model, op: str) -> Any:
    return next(node for node in model.graph.node if node.op_type == op)


def attribute(model: Model, op: str, name: str, value: Any) -> None:
    node = first(model, op)
    kept = [one for one in node.attribute if one.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def weight(model: Model, name: str) -> Any:
    return next(one for one in model.graph.initializer if one.name == name)


def _tanh(model: Model) -> None:
    first(model, "Relu").op_type = "Tanh"


def _foreign(model: Model) -> None:
    first(model, "Relu").domain = "com.microsoft"


def _loop(model: Model) -> None:
    node = first(model, "Relu")
    node.op_type = "Loop"
    node.attribute.append(helper.make_attribute("body", helper.make_graph([], "body", [], [])))


def _external(model: Model) -> None:
    one = weight(model, "positions")
    one.ClearField("raw_data")
    one.data_location = TensorProto.EXTERNAL
    one.external_data.add(key="location", value="/etc/passwd")


def _external_quietly(model: Model) -> None:
    weight(model, "positions").external_data.add(key="location", value="other.bin")


def _external_constant(model: Model) -> None:
    constant = first(model, "Constant").attribute[0].t
    constant.data_location = TensorProto.EXTERNAL
    constant.external_data.add(key="location", value="/etc/passwd")


def _huge_weight(model: Model) -> None:
    weight(model, "positions").dims[:] = [2**40, 2**20]


def _short_weight(model: Model) -> None:
    weight(model, "positions").raw_data = weight(model, "positions").raw_data[:-4]


def _half_weight(model: Model) -> None:
    weight(model, "positions").data_type = TensorProto.FLOAT16


def _weight_twice(model: Model) -> None:
    model.graph.initializer.append(weight(model, "positions"))


def _few_positions(model: Model) -> None:
    one = weight(model, "positions")
    one.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(one)[:1], "positions"))


def _wide_bias(model: Model) -> None:
    one = weight(model, "head.bias")
    one.CopyFrom(onnx.numpy_helper.from_array(np.zeros((4, 1), np.float32), "head.bias"))


def _negative_variance(model: Model) -> None:
    one = weight(model, "norm.running_var")
    one.CopyFrom(onnx.numpy_helper.from_array(-np.ones(8, np.float32), "norm.running_var"))


def _second_input(model: Model) -> None:
    model.graph.input.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, [1]))


def _second_output(model: Model) -> None:
    model.graph.output.append(model.graph.output[0])


def _huge_input(model: Model) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 2**60


def _no_output(model: Model) -> None:
    model.graph.output[0].name = "nothing"


def _backwards(model: Model) -> None:
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _computed_twice(model: Model) -> None:
    model.graph.node.append(model.graph.node[-1])


def _function(model: Model) -> None:
    model.functions.append(helper.make_function("", "Relu", ["x"], ["x"], [], []))


def _two_opsets(model: Model) -> None:
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _huge_zeros(model: Model) -> None:
    """Declare a class token of 2^60 numbers with three stored values."""
    node = first(model, "ConstantOfShape")
    huge = np.array([2**20] * 3, np.int64)
    model.graph.initializer.append(onnx.numpy_helper.from_array(huge, "huge"))
    node.input[0] = "huge"


def _growing_shapes(model: Model) -> None:
    """Make every tensor twice as long as the one before."""
    nodes = [helper.make_node("Shape", ["input"], ["grown0"])]
    nodes += [helper.make_node("Concat", [f"grown{i}"] * 2, [f"grown{i + 1}"], axis=0) for i in range(60)]
    old = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *old])


def _ones_for_zeros(model: Model) -> None:
    attribute(model, "ConstantOfShape", "value", onnx.numpy_helper.from_array(np.ones(1, np.float32)))


def _other_scale(model: Model) -> None:
    """Replace the scale by a computed one."""
    first(model, "Mul").input[1] = first(model, "Mul").input[0]


def _other_skip(model: Model) -> None:
    """Feed the second sum of a block with the input of the first."""
    sums = [node for node in model.graph.node if node.op_type == "Add"]
    names = {node.name: node for node in sums}
    halves = [node for name, node in names.items() if name.startswith("/blocks/blocks.0/Add")]
    assert len(halves) == 2
    halves[1].input[1] = halves[0].input[1]


ALTERATIONS: list[Callable[[Model], None]] = [
    _tanh, _foreign, _loop, _external, _external_quietly, _external_constant, _huge_weight, _short_weight, _half_weight,
    _weight_twice, _few_positions, _wide_bias, _negative_variance, _second_input, _second_output, _huge_input,
    _no_output, _backwards, _computed_twice, _function, _two_opsets, _huge_zeros, _growing_shapes, _ones_for_zeros,
    _other_scale, _other_skip,
]  # fmt: skip


def refused(content: bytes) -> str:
    with pytest.raises(UserError) as caught:
        read(content)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.hostile
@pytest.mark.parametrize("alter", ALTERATIONS)
def test_another_file_is_refused_in_one_line(alter: Callable[[Model], None]) -> None:
    refused(altered(NET, alter))


def test_an_unknown_node_is_refused_by_name() -> None:
    message = refused(altered(NET, _tanh))
    assert "Tanh" in message
    assert "mlp" in message


def test_another_opset_is_refused_with_the_fix() -> None:
    assert "opset_version=9" in refused(exported(published_vit(0), opset=13))


@pytest.mark.hostile
@pytest.mark.parametrize("content", [b"", b"nonsense", NET[:2000], NET[:-1], b"\xff" * 4096], ids=range(5))
def test_what_is_no_net_is_refused(content: bytes) -> None:
    refused(content)


def refused_or_equal(content: bytes) -> bool:
    """Return True if the file is read, after checking that it is read as onnxruntime's function."""
    try:
        found = off(content)
    except UserError:
        return False
    except (Fail, InvalidArgument, InvalidGraph, NotComputed, RuntimeException):
        return False  # onnxruntime refuses it too
    assert found < 1e-5
    return True


@pytest.mark.hostile
@pytest.mark.parametrize("at", mostly_slow(range(NODES), *range(0, NODES, 5)))
def test_a_rewired_node_is_refused_or_read_as_it_is(at: int) -> None:
    """Connect every input of every node to three other tensors, and permute the inputs."""
    model = onnx.ModelProto.FromString(NET)
    generator = np.random.default_rng(at)
    known = ["input", *(one.name for one in model.graph.initializer)]
    known += [name for node in list(model.graph.node)[:at] for name in node.output]
    others = [(i, str(name)) for i in range(len(model.graph.node[at].input)) for name in generator.choice(known, 3)]
    read_as_it_is = 0
    for i, name in others:

        def rewire(model: Model, i: int = i, name: str = name) -> None:
            model.graph.node[at].input[i] = name

        read_as_it_is += refused_or_equal(altered(NET, rewire))

    def turn(model: Model) -> None:
        inputs = list(model.graph.node[at].input)[::-1]
        del model.graph.node[at].input[:]
        model.graph.node[at].input.extend(inputs)

    read_as_it_is += refused_or_equal(altered(NET, turn))
    assert read_as_it_is <= len(others) + 1


@pytest.mark.hostile
@pytest.mark.parametrize("heads", [1, 2])
def test_other_transpositions_are_refused_or_read_as_they_are(heads: int) -> None:
    """With as many tokens as head dimensions, shapes cannot tell keys from their transpose."""
    net = exported(published_vit(0, dim=5 * heads, heads=heads, depth=1))
    nodes = onnx.ModelProto.FromString(net).graph.node
    changed = 0
    for at in (at for at, node in enumerate(nodes) if node.op_type == "Transpose"):
        for perm in itertools.permutations(range(len(nodes[at].attribute[0].ints))):

            def turn(model: Model, at: int = at, perm: tuple[int, ...] = perm) -> None:
                model.graph.node[at].attribute[0].ints[:] = perm

            changed += not refused_or_equal(altered(net, turn))
    assert changed > 50


@pytest.mark.hostile
@pytest.mark.parametrize("op", ["Conv", "Transpose", "Softmax", "ReduceMean", "Gemm", "Concat", "BatchNormalization"])
def test_other_attributes_are_refused_or_read_as_they_are(op: str) -> None:
    for one in first(onnx.ModelProto.FromString(NET), op).attribute:
        value = helper.get_attribute_value(one)
        others: list[Any] = [value[::-1], [2] * len(value), []] if isinstance(value, list) else [0, 2, 0.5, -1, "x"]
        for other in others:

            def change(model: Model, name: str = one.name, other: Any = other) -> None:
                node = first(model, op)
                kept = [old for old in node.attribute if old.name != name]
                del node.attribute[:]
                node.attribute.extend(
                    [
                        *kept,
                        helper.make_attribute(name, other, attr_type=None if other != [] else onnx.AttributeProto.INTS),
                    ]
                )

            refused_or_equal(altered(NET, change))

    def drop(model: Model) -> None:
        del first(model, op).attribute[0]

    refused(altered(NET, drop))
