"""The operations of a captured graph that have a counterpart: one small function each, by the operation's name.

    OPERATIONS["layer_norm"](x, shape, weight, bias, eps) -> Value

Arguments are those of torch's operation, with a `Value` for each one that depends on the image. An argument that is not
mapped exactly raises Unmapped. Which axes are read follows from torch's own function on the index.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certify.graph.attention import attended, merged_projection, product
from certify.graph.export import BATCH
from certify.graph.values import (
    PRODUCT,
    LogProbabilities,
    Unmapped,
    Value,
    by_rows,
    concatenated,
    elementwise,
    from_rows,
    in_layout,
    joined,
    materialised,
    step,
)
from zoo.layers.convolution import CircularConv2d, margins_of, wrapped
from zoo.layers.norms import SmoothProject
from zoo.primitives.activations import Abs
from zoo.primitives.diagonal import Diagonal
from zoo.primitives.jumps import NO_JUMP, SoftplusJump

# moves ----------------------------------------------------------------------------------------------------------------

MOVES = (
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "movedim", "select", "slice", "unsqueeze",
    "squeeze", "expand", "expand_as", "unbind", "split", "split_with_sizes", "chunk", "flip", "roll", "flatten",
    "unflatten", "repeat", "index_select", "narrow", "unfold", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "swapaxes", "numpy_T", "view_as", "reshape_as", "index", "repeat_interleave", "tile", "diagonal", "rot90",
)  # fmt: skip
SAME = ("clone", "alias", "contiguous", "detach", "lift_fresh_copy", "dropout", "feature_dropout", "to", "_to_copy")


def moved(func: Any, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Apply torch's own function to the index, and to the constants."""

    def of(t: Tensor) -> Any:
        return func(t.contiguous(), *(arg.index if isinstance(arg, Value) else arg for arg in args), **kwargs)

    index, constant = of(x.index), None if x.constant is None else of(x.constant)
    if isinstance(index, Tensor):
        return Value(x.node, index, constant)
    constants = [None] * len(index) if constant is None else constant
    return [Value(x.node, *both) for both in zip(index, constants, strict=True)]


def same(x: Value, *args: Any, **kwargs: Any) -> Value:
    """Return the tensor itself; `dropout` only in eval mode, a cast only to float64."""
    dtype = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), torch.float64)
    if True in args or kwargs.get("train"):
        raise Unmapped("dropout that is active; call model.eval()")
    if dtype is not torch.float64:
        raise Unmapped(f"a cast to {dtype}; compute in the type of the weights")
    return x


def pad(x: Value, pads: Sequence[int], mode: Any = "constant", value: float | None = None) -> Value:
    """Pad by constants, or by copies of entries."""
    if not isinstance(mode, str):  # constant_pad_nd(x, pad, value)
        mode, value = "constant", mode
    if mode != "constant":
        if x.constant is not None or mode == "circular":  # which a convolution recognises on a whole node
            x = Value.of(materialised(x))
        return Value(x.node, F.pad(x.index.double(), list(pads), mode).long())
    constant = torch.zeros(x.shape, dtype=torch.float64) if x.constant is None else x.constant
    index = F.pad(x.index, list(pads), value=-1)
    return Value(x.node, index, F.pad(constant, list(pads), value=float(value or 0)))


def cat(parts: Sequence[Value | Tensor], dim: int = 0) -> Value:
    return concatenated(parts, dim)


def stack(parts: Sequence[Value | Tensor], dim: int = 0) -> Value:
    return concatenated([_unsqueezed(part, dim) for part in parts], dim)


def _unsqueezed(part: Value | Tensor, dim: int) -> Value | Tensor:
    if isinstance(part, Tensor):
        return part.unsqueeze(dim)
    found: Value = moved(torch.unsqueeze, part, dim)
    return found


# factors and sums -----------------------------------------------------------------------------------------------------


def _number(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def scaled(x: Value, weight: Any, bias: Any, name: str) -> Value:
    """Return weight x + bias for constants that broadcast to the shape of the result."""
    weight, bias = _number(weight), _number(bias)
    shape = torch.broadcast_shapes(x.shape, weight.shape, bias.shape)
    if shape != x.shape:
        x = moved(torch.Tensor.expand, x, shape)
    if x.constant is None and weight.numel() == 1 and not bool(bias.any()):  # whatever its layout
        factor = Diagonal(weight.reshape(()), torch.zeros((), dtype=torch.float64))
        return x.like(step(factor, x.node, x.node.shape, name))
    if not x.permutes():
        x = Value.of(materialised(x))
    return x.like(step(Diagonal(in_layout(weight, x), in_layout(bias, x)), x.node, x.node.shape, name))


def add(x: Any, y: Any, alpha: float = 1) -> Value:
    if isinstance(x, Value) and isinstance(y, Value):
        return joined(_of_one_shape(x, y if alpha == 1 else scaled(y, alpha, 0, "scale")))
    if isinstance(x, Value):
        return scaled(x, 1, alpha * _number(y), "shift")
    return scaled(y, alpha, x, "shift")


def _of_one_shape(*values: Value) -> list[Value]:
    shape = torch.broadcast_shapes(*(value.shape for value in values))
    return [value if value.shape == shape else moved(torch.Tensor.expand, value, shape) for value in values]


def sub(x: Any, y: Any, alpha: float = 1) -> Value:
    return add(x, y, -alpha)


def rsub(x: Any, y: Any, alpha: float = 1) -> Value:
    return add(y, x, -alpha)


def mul(x: Any, y: Any) -> Value:
    if isinstance(x, Value) and isinstance(y, Value):
        return joined(_of_one_shape(x, y), PRODUCT)
    return scaled(x, y, 0, "scale") if isinstance(x, Value) else scaled(y, x, 0, "scale")


def power(x: Any, exponent: Any) -> Value:
    if isinstance(exponent, Value) or not isinstance(x, Value):
        raise Unmapped("a power with an exponent that depends on the image")
    if exponent != 2:
        raise Unmapped(f"a power with the exponent {exponent}; squares have a rule")
    return mul(x, x)


def div(x: Any, y: Any, **kwargs: Any) -> Value:
    if kwargs.get("rounding_mode") or not isinstance(x, Value) or isinstance(y, Value):
        raise Unmapped("a quotient by a result of the image, or a rounded one")
    divisor = _number(y)
    if not bool((divisor != 0).all()):
        raise Unmapped("a division by 0")
    shape = torch.broadcast_shapes(x.shape, divisor.shape)
    x = x if shape == x.shape else moved(torch.Tensor.expand, x, shape)
    x = x if x.permutes() else Value.of(materialised(x))
    return x.like(
        step(Diagonal(in_layout(divisor, x), torch.zeros(()).double(), divides=True), x.node, x.node.shape, "divide")
    )


def batch_norm(x: Value, weight: Any, bias: Any, mean: Tensor, variance: Tensor, *options: Any) -> tuple[Value]:
    """Return torch's module with these numbers. The operation of the graph exists in eval mode only."""
    if len(x.shape) > 4:
        raise Unmapped("a batch norm of more than two axes beside its channels")
    kind = nn.BatchNorm2d if len(x.shape) == 4 else nn.BatchNorm1d
    module = kind(len(mean), eps=float(options[-1]), affine=weight is not None or bias is not None)
    module.load_state_dict({"running_mean": mean, "running_var": variance}, strict=False)
    _set(module, weight, bias)
    source = materialised(x)
    return (Value.of(step(module, source, source.shape, "batch_norm")),)


def _set(module: nn.Module, weight: Any, bias: Any) -> None:
    """Put copies of these numbers into a module; None leaves ones and zeros."""
    for name, given in (("weight", weight), ("bias", bias)):
        like = getattr(module, name, None)
        if like is not None:
            neutral = torch.ones_like(like) if name == "weight" else torch.zeros_like(like)
            value = (given if isinstance(given, Tensor) else neutral).detach().double().reshape(like.shape)
            setattr(module, name, nn.Parameter(value.clone(), requires_grad=False))


# products -------------------------------------------------------------------------------------------------------------


def linear(x: Value, weight: Any, bias: Any = None) -> Value:
    """Return W x + b along the last axis."""
    if isinstance(weight, Value) or isinstance(bias, Value) or not isinstance(x, Value):
        raise Unmapped("a product with weights that depend on the image")
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    _set(module, weight, bias)
    if len(x.shape) == 2 and x.shape[0] == BATCH:
        source = materialised(x)
        return Value.of(step(module, source, (weight.shape[0],), "linear"))
    source, place = by_rows(x)
    leading = x.shape[:-1]
    if (node := merged_projection(source, module)) is not None:
        return from_rows(node, place, leading)
    return from_rows(step(module, source, (source.shape[0], weight.shape[0]), "linear"), place, leading)


def matmul(x: Any, y: Any) -> Any:
    """Return a product with a matrix of weights, from either side, or one of attention."""
    if isinstance(x, Tensor) and isinstance(y, Value):
        if x.ndim != 2:
            raise Unmapped("a product with a batch of matrices of weights")
        turned = linear(moved(torch.transpose, y, -2, -1), x)
        found: Value = moved(torch.transpose, turned, -2, -1)
        return found
    if isinstance(y, Tensor):
        if y.ndim != 2:
            raise Unmapped("a product with a batch of matrices of weights")
        return linear(x, y.mT)
    return product(x, y)


def addmm(b: Any, x: Any, y: Any, **kwargs: Any) -> Value:
    if kwargs or isinstance(b, Value) or not isinstance(y, Tensor):
        raise Unmapped("a product of two results of the image")
    return add(matmul(x, y), b)


def conv2d(
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> Value:
    """Return torch's module with these numbers."""
    if isinstance(weight, Value) or isinstance(bias, Value):
        raise Unmapped("a convolution with weights that depend on the image")
    out, part, *kernel = weight.shape
    if isinstance(padding, str):
        padding = [d * (k - 1) for d, k in zip(two(dilation), kernel, strict=True)] if padding == "same" else [0, 0]
        if any(p % 2 for p in padding):
            raise Unmapped("padding='same' that is not the same on both sides")
        padding = [p // 2 for p in padding]
    size, stride, padding, dilation = (two(option) for option in (kernel, stride, padding, dilation))
    module: nn.Conv2d
    if stride == (1, 1) and padding == (0, 0) and _is_around(x, size, dilation):
        source = x.node
        module = CircularConv2d(part * groups, out, size, dilation, groups, bias=bias is not None)
    else:
        source = materialised(x)
        module = nn.Conv2d(part * groups, out, size, stride, padding, dilation, groups, bias=bias is not None)
    _set(module, weight, bias)
    with torch.no_grad():
        shape = module(torch.zeros(1, *source.shape).double()).shape[1:]
    return Value.of(step(module, source, shape, "conv"))


def _is_around(x: Value, size: tuple[int, int], dilation: tuple[int, int]) -> bool:
    """Return whether a tensor is the image of a node with the rows and columns around it that the kernel reaches."""
    margins = margins_of(size, dilation)
    if margins is None or margins == (0, 0) or x.constant is not None or len(x.node.shape) != 3:
        return False
    if any(margin > side for margin, side in zip(margins, x.node.shape[1:], strict=True)):
        return False
    return torch.equal(x.index, wrapped(Value.of(x.node).index, margins))


def conv_transpose2d(
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Value:
    """Return the convolution with the turned kernel of the image, spread with zeros between its pixels."""
    (s_y, s_x), more, d = two(stride), two(output_padding), two(dilation)
    *left, height, width = x.shape
    index = torch.full((*left, (height - 1) * s_y + 1, (width - 1) * s_x + 1), -1)
    constant = torch.zeros(index.shape, dtype=torch.float64)
    index[..., ::s_y, ::s_x] = x.index
    if x.constant is not None:
        constant[..., ::s_y, ::s_x] = x.constant
    wide = Value(x.node, index, constant if bool((index < 0).any()) else None)
    turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)
    y, x_ = (d_k * (k - 1) - p for d_k, k, p in zip(d, weight.shape[2:], two(padding), strict=True))
    return conv2d(pad(wide, (x_, x_ + more[1], y, y + more[0])), turned, bias, 1, 0, d, groups)


def two(value: Any) -> tuple[int, int]:
    given = (value,) if isinstance(value, int) else tuple(value)
    return (given[0], given[0]) if len(given) == 1 else (given[0], given[1])


# norms ----------------------------------------------------------------------------------------------------------------


def layer_norm(
    x: Value, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Value:
    """Return torch's module over the last axes, flattened."""
    wide, width = moved(torch.flatten, x, len(x.shape) - len(shape)), torch.Size(shape).numel()
    module = nn.LayerNorm(width, eps, elementwise_affine=weight is not None or bias is not None)
    _set(module, weight, bias)
    source, place = by_rows(wide)
    y = from_rows(step(module, source, source.shape, "layer_norm"), place, wide.shape[:-1])
    found: Value = moved(torch.reshape, y, x.shape)
    return found


def group_norm(x: Value, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Value:
    """Return LayerNorm of every group, and factors of the channels."""
    y = layer_norm(
        moved(torch.reshape, x, (*x.shape[:1], groups, -1)), (torch.Size(x.shape[1:]).numel() // groups,), eps=eps
    )
    y = moved(torch.reshape, y, x.shape)
    if weight is None and bias is None:
        return y
    over = (-1, *(1,) * (len(x.shape) - 2))
    weight, bias = (1 if weight is None else weight.reshape(over)), (0 if bias is None else bias.reshape(over))
    return scaled(y, weight, bias, "channels")


def instance_norm(
    x: Value, weight: Any, bias: Any, mean: Any, variance: Any, own: bool, momentum: float, eps: float, *_: Any
) -> Value:
    if not own:
        return batch_norm(x, weight, bias, mean, variance, eps)[0]
    return group_norm(x, x.shape[1], weight, bias, eps)


def rms_norm(x: Value, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Value:
    """Return gamma x / sqrt(|x|^2 / d + eps) = gamma / sqrt(eps) N_R(x) with R^2 = d eps, over the last axes."""
    if eps is None or not eps > 0:
        raise Unmapped("RMSNorm whose eps depends on the type; set one, such as eps=1e-6")
    wide, width = moved(torch.flatten, x, len(x.shape) - len(shape)), torch.Size(shape).numel()
    source, place = by_rows(wide)
    module = SmoothProject(width, math.sqrt(width * eps))
    y = from_rows(step(module, source, source.shape, "rms_norm"), place, wide.shape[:-1])
    factor = (1.0 if weight is None else weight.detach().double()) / math.sqrt(eps)
    return scaled(moved(torch.reshape, y, x.shape), factor, 0, "channels")


# the end --------------------------------------------------------------------------------------------------------------


def log_softmax(x: Value, dim: int, *_: Any) -> LogProbabilities:
    if len(x.shape) != 2 or dim % 2 != 1:
        raise Unmapped("log_softmax over anything but the classes")
    return LogProbabilities(x)


# activations ----------------------------------------------------------------------------------------------------------


def _activation(make: Callable[..., nn.Module]) -> Callable[..., Value]:
    def operation(x: Value, *args: Any, **kwargs: Any) -> Value:
        return elementwise(x, make(*args, **kwargs), make.__name__.lower())

    return operation


def elu(x: Value, alpha: float = 1.0, scale: float = 1.0, rate: float = 1.0) -> Value:
    module = nn.ELU(alpha) if scale == rate == 1 else nn.CELU(alpha) if scale == 1 and rate == 1 / alpha else None
    if module is None:
        raise Unmapped("an ELU with other factors than those of torch's modules")
    return elementwise(x, module, "elu")


def clamp(x: Value, low: Any = None, high: Any = None) -> Value:
    if isinstance(low, Tensor | Value) or isinstance(high, Tensor | Value):
        raise Unmapped("clamp with bounds that are tensors")
    if low is None and high is None:
        return x
    if low == 0 and high is None:
        return elementwise(x, nn.ReLU(), "relu")
    low, high = (-3e38 if low is None else float(low)), (3e38 if high is None else float(high))
    return elementwise(x, nn.Hardtanh(low, high), "clamp")


def prelu(x: Value, weight: Tensor) -> Value:
    module = nn.PReLU(weight.numel())
    _set(module, weight, None)
    source = materialised(x)
    return Value.of(step(module, source, source.shape, "prelu"))


def softplus(x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """Return softplus; with a threshold that is felt, as that without and the jump."""
    smooth = elementwise(x, nn.Softplus(beta, max(threshold, NO_JUMP)), "softplus")
    if threshold >= NO_JUMP:
        return smooth
    return joined([smooth, elementwise(x, SoftplusJump(beta, threshold), "jump")])


def log_sigmoid(x: Value) -> Value:
    """Return -softplus(-x)."""
    return scaled(elementwise(scaled(x, -1, 0, "negate"), nn.Softplus(1, 40), "softplus"), -1, 0, "negate")


def glu(x: Value, dim: int = -1) -> Value:
    """Return a sigmoid(b) for the halves a, b of an axis."""
    a, b = moved(torch.chunk, x, 2, dim)
    return mul(a, elementwise(b, nn.Sigmoid(), "sigmoid"))


def gelu(x: Value, approximate: str = "none") -> Value:
    return elementwise(x, nn.GELU(approximate), "gelu")


OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(SAME, same),
    "pad": pad, "constant_pad_nd": pad, "cat": cat, "stack": stack,
    "zeros_like": lambda x, **_: torch.zeros(x.shape, dtype=torch.float64),
    "new_zeros": lambda x, shape, **_: torch.zeros(shape, dtype=torch.float64),
    "ones_like": lambda x, **_: torch.ones(x.shape, dtype=torch.float64),
    "add": add, "sub": sub, "rsub": rsub, "mul": mul, "div": div, "neg": lambda x: scaled(x, -1, 0, "negate"),
    "pow": power, "square": lambda x: mul(x, x),
    "linear": linear, "matmul": matmul, "mm": matmul, "bmm": matmul, "addmm": addmm,
    "conv2d": conv2d, "conv_transpose2d": conv_transpose2d,
    "scaled_dot_product_attention": attended,
    "_native_batch_norm_legit_no_training": batch_norm, "layer_norm": layer_norm, "group_norm": group_norm,
    "instance_norm": instance_norm, "rms_norm": rms_norm,
    "log_softmax": log_softmax, "_log_softmax": log_softmax,
    "abs": _activation(Abs), "glu": glu, "log_sigmoid": log_sigmoid,
    "relu": _activation(nn.ReLU), "gelu": gelu, "silu": _activation(nn.SiLU), "sigmoid": _activation(nn.Sigmoid),
    "tanh": _activation(nn.Tanh), "softplus": softplus, "leaky_relu": _activation(nn.LeakyReLU),
    "elu": elu, "celu": _activation(nn.CELU), "selu": _activation(nn.SELU), "mish": _activation(nn.Mish),
    "hardtanh": _activation(nn.Hardtanh), "relu6": _activation(nn.ReLU6), "hardswish": _activation(nn.Hardswish),
    "hardsigmoid": _activation(nn.Hardsigmoid), "prelu": prelu, "_prelu_kernel": prelu,
    "clamp": clamp, "clamp_min": lambda x, low: clamp(x, low), "clamp_max": lambda x, high: clamp(x, None, high),
}  # fmt: skip
