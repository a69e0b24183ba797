"""The operations of torch that have linear bounds, by name: each adds steps to a program and returns what it made.

    OPERATIONS["linear"](program, target, x, weight, bias) -> Ref

Arguments are those of torch's operation, with a `Ref` for each one that depends on the image;
`target` is the operation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certify.linear.enclosures.products import Product
from certify.linear.enclosures.softmax import Softmax
from certify.linear.functions import activation_rule, clamp, elu, exp, gelu, reciprocal, rsqrt, square
from certify.linear.moves import OFTEN, ONCE, cat, moved, pad, repeated, reshaped, same, stack
from certify.linear.program import Lacking, Program, Ref, affine
from zoo.primitives.activations import Abs

FEW = 8  # roundings of an entry that is scaled or shifted

# factors and sums -----------------------------------------------------------------------------------------------------


def _number(program: Program, value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=program.device)


def _expanded(program: Program, x: Ref, shape: Sequence[int]) -> Ref:
    if tuple(shape) == x.shape:
        return x
    if len(shape) != len(x.shape):
        x = reshaped(program, None, x, (*(1,) * (len(shape) - len(x.shape)), *x.shape))
    given = x.shape
    return affine(
        program, (x,), lambda t: t.expand(tuple(shape)), terms=math.prod(shape), moves=True,
        pull=lambda a: (a.sum_to_size(len(a), *given),),
    )  # fmt: skip


def _scaled(program: Program, x: Ref, weight: Any, bias: Any = None) -> Ref:
    """Add weight x + bias."""
    weight = _number(program, weight)
    shift = program.zeros(()) if bias is None else _number(program, bias)
    x = _expanded(program, x, torch.broadcast_shapes(x.shape, weight.shape, shift.shape))
    size, offset = weight.abs(), None if bias is None else shift
    return affine(
        program,
        (x,),
        lambda t: t * weight + shift,
        lambda t: t * size,
        FEW,
        offset,
        entrywise=True,
        pull=lambda a: (a * weight,),
    )


def add(program: Program, target: Any, x: Any, y: Any, alpha: float = 1) -> Ref:
    if isinstance(x, Ref) and isinstance(y, Ref):
        shape = torch.broadcast_shapes(x.shape, y.shape)
        both = [_expanded(program, part, shape) for part in (x, y)]
        if both[0] == both[1]:
            return _scaled(program, both[0], 1 + alpha)
        return affine(
            program,
            both,
            lambda a, b: a + alpha * b,
            lambda a, b: a + abs(alpha) * b,
            FEW,
            pull=lambda a: (a, a if alpha == 1 else alpha * a),
        )
    return _scaled(program, x, 1, alpha * _number(program, y)) if isinstance(x, Ref) else _scaled(program, y, alpha, x)


def sub(program: Program, target: Any, x: Any, y: Any, alpha: float = 1) -> Ref:
    return add(program, target, x, y, -alpha)


def mul(program: Program, target: Any, x: Any, y: Any) -> Ref:
    if isinstance(x, Ref) and isinstance(y, Ref):
        if x == y:
            return square(program, target, x)
        shape = torch.broadcast_shapes(x.shape, y.shape)
        both = [_expanded(program, part, shape) for part in (x, y)]
        return program.add(Product((both[0].number, both[1].number), tuple(shape), False, 1))
    return _scaled(program, x, y) if isinstance(x, Ref) else _scaled(program, y, x)


def div(program: Program, target: Any, x: Any, y: Any, **kwargs: Any) -> Ref:
    if kwargs.get("rounding_mode"):
        raise Lacking("a rounded quotient has none")
    if isinstance(y, Ref):
        return mul(program, target, x, reciprocal(program, target, y))
    divisor = _number(program, y)
    if not bool((divisor != 0).all()):
        raise Lacking("a division by 0 has none")
    x = _expanded(program, x, torch.broadcast_shapes(x.shape, divisor.shape))
    size = divisor.abs()
    return affine(program, (x,), lambda t: t / divisor, lambda t: t / size, FEW, entrywise=True)


def power(program: Program, target: Any, x: Ref, exponent: Any) -> Ref:
    if exponent != 2:
        raise Lacking(f"a power with the exponent {exponent} has none")
    return square(program, target, x)


def batch_norm(
    program: Program, target: Any, x: Ref, weight: Any, bias: Any, mean: Tensor, variance: Tensor, *options: Any
) -> tuple[Ref]:
    over = (-1, *(1,) * (len(x.shape) - 2))
    scale = (variance + float(options[-1])).rsqrt() * (1 if weight is None else weight)
    shift = torch.zeros_like(mean) if bias is None else bias
    scale, shift, mean = (part.reshape(over) for part in (scale, shift, mean))
    offset = shift.abs() + (mean * scale).abs()
    offset = offset.expand(x.shape)
    return (
        affine(
            program, (x,), lambda t: (t - mean) * scale + shift, lambda t: t * scale.abs(), FEW, offset, entrywise=True
        ),
    )


# products -------------------------------------------------------------------------------------------------------------


def linear(program: Program, target: Any, x: Any, weight: Any, bias: Any = None) -> Ref:
    if not isinstance(weight, Tensor) or isinstance(bias, Ref):
        raise Lacking("a linear layer whose weights depend on the image has none")
    size, shift = weight.abs(), None if bias is None else bias
    return affine(
        program, (x,), lambda t: F.linear(t, weight, shift), lambda t: F.linear(t, size),
        max(weight.shape) + 2, None if bias is None else bias, pull=lambda a: (a @ weight,),
    )  # fmt: skip


def matmul(program: Program, target: Any, x: Any, y: Any) -> Ref:
    if isinstance(x, Ref) and isinstance(y, Ref):
        if x.shape[:-2] != y.shape[:-2]:
            raise Lacking(f"a product of {x.shape} and {y.shape} has none; expand one of them")
        shape = (*x.shape[:-1], y.shape[-1])
        weights = isinstance(program.maker(x), Softmax)
        return program.add(Product((x.number, y.number), shape, True, max(*x.shape[-2:], y.shape[-1]) + 2, weights))
    if isinstance(y, Tensor):
        size = y.abs()
        return affine(program, (x,), lambda t: t @ y, lambda t: t @ size, max(y.shape[-2:]) + 2 + _spread(x, y))
    size = x.abs()
    return affine(program, (y,), lambda t: x @ t, lambda t: size @ t, max(x.shape[-2:]) + 2 + _spread(y, x))


def _spread(x: Ref, y: Tensor) -> int:
    """Return the number of products that one matrix enters."""
    return 0 if y.ndim <= 2 else math.prod(y.shape[:-2]) * max(y.shape[-2:])


def addmm(program: Program, target: Any, b: Any, x: Any, y: Any, **kwargs: Any) -> Ref:
    if kwargs:
        raise Lacking("addmm with factors has none")
    return add(program, target, matmul(program, target, x, y), b)


def conv2d(program: Program, target: Any, x: Ref, weight: Any, bias: Any = None, *options: Any, **named: Any) -> Ref:
    if not isinstance(weight, Tensor) or isinstance(bias, Ref):
        raise Lacking("a convolution whose weights depend on the image has none")
    size = weight.abs()
    terms = weight[0].numel() + weight.shape[0] * weight[0, 0].numel() + 2
    offset = None if bias is None else bias.view(1, -1, 1, 1)
    return affine(
        program, (x,), lambda t: F.conv2d(t, weight, bias, *options, **named),
        lambda t: F.conv2d(t, size, None, *options, **named), terms, offset,
    )  # fmt: skip


def attention(
    program: Program, target: Any, q: Ref, k: Ref, v: Ref, mask: Any = None, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Ref:  # fmt: skip
    if dropout or causal or enable_gqa or isinstance(mask, Ref):
        raise Lacking("attention with dropout, a causal mask or grouped queries has none")
    if isinstance(mask, Tensor) and (mask.dtype is torch.bool or not bool(torch.isfinite(mask).all())):
        if not bool(mask.all()):
            raise Lacking("attention with a mask has none")
        mask = None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = moved(program, torch.transpose, _scaled(program, k, scale), -2, -1)
    scores = matmul(program, target, q, keys)
    scores = scores if mask is None else _scaled(program, scores, 1, mask)
    return matmul(program, target, softmax(program, target, scores, -1), v)


def softmax(program: Program, target: Any, x: Ref, dim: int, *_: Any) -> Ref:
    if dim not in (-1, len(x.shape) - 1):
        raise Lacking("a softmax over another axis than the last one has none")
    return program.add(Softmax((x.number,), x.shape))


# sums -----------------------------------------------------------------------------------------------------------------


def mean(program: Program, target: Any, x: Ref, dims: Any = None, keepdim: bool = False, **_: Any) -> Ref:
    return _reduced(program, torch.mean, x, dims, keepdim)


def total(program: Program, target: Any, x: Ref, dims: Any = None, keepdim: bool = False, **_: Any) -> Ref:
    return _reduced(program, torch.sum, x, dims, keepdim)


def _reduced(program: Program, reduce: Callable[..., Tensor], x: Ref, dims: Any, keepdim: bool) -> Ref:
    axes = [dims] if isinstance(dims, int) else list(range(len(x.shape)) if dims is None or not len(dims) else dims)
    kept = [1 if k in axes or k - len(x.shape) in axes else side for k, side in enumerate(x.shape)]
    count = math.prod(x.shape[k] for k in axes)
    share = 1 / count if reduce is torch.mean else 1.0

    def pull(a: Tensor) -> tuple[Tensor]:
        return ((share * a).reshape(len(a), *kept).expand(len(a), *x.shape),)

    return affine(program, (x,), lambda t: reduce(t, axes, keepdim), terms=count + 2, pull=pull)


def average(function: Callable[..., Tensor]) -> Callable[..., Ref]:
    """Return the rule of a pooling whose weights are not negative."""

    def rule(program: Program, target: Any, x: Ref, *args: Any, **kwargs: Any) -> Ref:
        return affine(program, (x,), lambda t: function(t, *args, **kwargs), terms=math.prod(x.shape[-2:]) + 4)

    return rule


def layer_norm(
    program: Program, target: Any, x: Ref, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, *_: Any,
) -> Ref:  # fmt: skip
    """Add (x - mean) / sqrt(mean of squares + eps), times weight, plus bias, part by part."""
    axes = list(range(-len(shape), 0))
    centred = sub(program, target, x, mean(program, target, x, axes, True))
    variance = mean(program, target, square(program, target, centred), axes, True)
    rate = rsqrt(program, target, add(program, target, variance, eps))
    y = mul(program, target, centred, rate)
    return y if weight is None and bias is None else _scaled(program, y, 1 if weight is None else weight, bias)


ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "leaky_relu": nn.LeakyReLU, "abs": Abs,
    "hardtanh": nn.Hardtanh, "relu6": nn.ReLU6, "hardswish": nn.Hardswish, "hardsigmoid": nn.Hardsigmoid,
}  # fmt: skip
OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), reshaped), **dict.fromkeys(ONCE, moved),
    **dict.fromkeys(OFTEN, repeated),
    **dict.fromkeys(("dropout", "feature_dropout", "to", "_to_copy"), same),
    "cat": cat, "stack": stack, "pad": pad, "constant_pad_nd": pad,
    "add": add, "sub": sub, "rsub": lambda p, t, x, y, alpha=1: add(p, t, y, x, -alpha), "mul": mul, "div": div,
    "neg": lambda p, t, x: _scaled(p, x, -1), "pow": power, "square": square, "exp": exp, "rsqrt": rsqrt,
    "reciprocal": reciprocal, "_native_batch_norm_legit_no_training": batch_norm, "layer_norm": layer_norm,
    "linear": linear, "matmul": matmul, "mm": matmul, "bmm": matmul, "addmm": addmm, "conv2d": conv2d,
    "scaled_dot_product_attention": attention, "softmax": softmax, "_softmax": softmax,
    "mean": mean, "sum": total, "avg_pool2d": average(F.avg_pool2d),
    "adaptive_avg_pool2d": average(F.adaptive_avg_pool2d), "_adaptive_avg_pool2d": average(F.adaptive_avg_pool2d),
    "gelu": gelu, "elu": elu,
    "clamp": clamp, "clamp_min": clamp, "clamp_max": lambda p, t, x, high: clamp(p, t, x, None, high),
    **{name: activation_rule(make) for name, make in ACTIVATIONS.items()},
}  # fmt: skip
