"""Running error analysis: a bound of how far a tensor that torch computed in float64 is from the exact one.

The method (Higham 2002, section 3.3) follows a module operation by operation. For every tensor it keeps
two others, entry by entry: the error, and the size, which is the value without cancellation (the size of W x is |W|
|x|), so that small values of large terms count as large. An operation passes on the errors of its operands by its own
slope, and adds what it rounds itself, in proportion to the size of its result:

    fl(A B) = A B + D,   |D| <= gamma_{K+2} |A| |B|,        |A' B' - A B| <= |A| e_B + e_A (|B| + e_B).

Assumptions about the kernels: IEEE double precision, sums in any order, exp, erf and tanh within LIBM units. An
operation that is not in the table is refused. Proof: docs/proofs.md#slack.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from certizoo import UserError
from zoo.arithmetic import OUT, U, gamma, nan_to_inf
from zoo.bounds.stepwise import StepwiseAttention

RESERVE = 8  # the rule of a link computes from the same tensors; its rounding is at most this times the function's own
TOGETHER = 16  # images followed at once; all their tensors are held while one link is followed
TINY = 1e-290  # above underflow
LIBM = 40 * U  # of exp, erf and tanh, relative to their values


def defects(links: Sequence[Callable[[Tensor], Tensor]], ends: Sequence[int], points: Sequence[Tensor]) -> list[Tensor]:
    """Return for every step of a chain how far its clean point may be off, RESERVE ||X_l - f_l(X_{l-1})||_F (B,).

    The values are never below the truth. Each belongs to the last step of a link f_l, which ends after ends[l] steps;
    steps inside a link get 0, and a link without steps, such as an identity, adds to the step before it. `points` are
    X_0 (B, ...) and those after each step, computed in any way.
    """
    found = [torch.zeros(len(points[0]), dtype=torch.float64, device=points[0].device) for _ in points[1:]]
    for link, start, end in zip(links, (0, *ends), ends, strict=False):
        error = defect(link, points[start], points[end])
        found[end - 1] = found[end - 1] + nan_to_inf(RESERVE * torch.linalg.vector_norm(error.flatten(1), dim=1))
    return found


def defect(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return |y - f(x)| entry by entry, never below the truth, where f(x) is exact."""
    parts = [_defect(f, *part) for part in zip(x.split(TOGETHER), y.split(TOGETHER), strict=True)]
    return torch.cat(parts) if parts else y.abs()


def _defect(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad(), StepwiseAttention(), RunningError() as running:
        found = running.of(f(x))
    return nan_to_inf((y - found.value).abs() + found.error) * OUT


@dataclass(frozen=True)
class Known:
    """A tensor as computed, its modulus without cancellation (size), and its distance from the exact one (error)."""

    value: Tensor
    size: Tensor
    error: Tensor


class RunningError(TorchDispatchMode):
    """Follow everything that is computed in float64 while this mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Known] = {}  # keyed by id(); holding the tensor keeps its id unique

    def of(self, x: Tensor) -> Known:
        """Return what is known of x. A tensor not computed under this mode is exact: weights, constants, the input."""
        if id(x) not in self._known:
            self._known[id(x)] = Known(x, x.abs(), torch.zeros_like(x))
        return self._known[id(x)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = self._found(func, args, kwargs or {})
        for known in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(known, Known):
                self._known[id(known.value)] = known
        return tree_map(lambda known: known.value if isinstance(known, Known) else known, found)

    def _found(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        floats = [x for x in _tensors(args) if x.is_floating_point()]
        if not floats or name in CREATE:
            return func(*args, **kwargs)
        if any(x.dtype is not torch.float64 for x in floats):
            raise UserError(f"{name} computes in {floats[0].dtype}; a certificate needs float64 throughout")
        operands = tree_map(lambda x: self.of(x) if isinstance(x, Tensor) and x.is_floating_point() else x, args)
        if name in RULES:
            return RULES[name](*operands, **kwargs)
        if name == "add_":  # on the result of a product, when a linear layer runs through torch.func
            return _in_place(operands[0], _add(*operands, **kwargs))
        if name in MOVE:
            return _moved(func, operands, kwargs)
        raise UserError(f"torch's {name} has no rounding bound; add one to zoo/bounds/float_error.py")


def _tensors(args: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, Tensor) else None, args)
    return found


def _in_place(x: Known, found: Known) -> Known:
    x.value.copy_(found.value)
    return Known(x.value, found.size, found.error)


def _moved(func: Any, operands: Any, kwargs: Any) -> Any:
    """Apply an operation that moves entries, or chooses among them, to all three tensors."""

    def by(part: str) -> Any:
        return func(*tree_map(lambda x: getattr(x, part) if isinstance(x, Known) else x, operands), **kwargs)

    value, size, error = by("value"), by("size"), by("error")
    if not isinstance(value, (list, tuple)):
        return Known(value, size, error)
    return [Known(*parts) for parts in zip(value, size, error, strict=True)]


CREATE = {"zeros_like", "ones_like", "full_like", "empty_like", "new_empty", "new_zeros", "new_ones", "new_full"}
MOVE = {
    *("alias", "amax", "as_strided", "cat", "clone", "copy", "detach", "diagonal", "expand", "flip"),
    *("gather", "index", "index_select", "lift_fresh", "permute", "repeat", "roll", "select", "slice", "split", "t"),
    *("split_with_sizes", "squeeze", "stack", "transpose", "unbind", "unfold", "unsqueeze", "view", "_to_copy"),
    *("_unsafe_view", "_reshape_alias", "select_backward", "slice_backward"),
}

# rules, for operands that are Known or plain numbers ------------------------------------------------------------------

Operand = Known | float


def _known(x: Operand, like: Tensor) -> Known:
    if isinstance(x, Known):
        return x
    number = torch.as_tensor(x, dtype=torch.float64, device=like.device)
    return Known(number, number.abs(), torch.zeros_like(number))


def _pair(a: Operand, b: Operand) -> tuple[Known, Known]:
    like = a.value if isinstance(a, Known) else b.value  # type: ignore[union-attr]
    return _known(a, like), _known(b, like)


def _fresh(value: Tensor, error: Tensor) -> Known:
    """Return a result without cancellation: its size is that of the value."""
    return Known(value, value.abs() + error, error)


def _add(a: Operand, b: Operand, alpha: float = 1.0) -> Known:
    x, y = _pair(a, b)
    size = x.size + abs(alpha) * y.size
    value, error = x.value + alpha * y.value, x.error + abs(alpha) * y.error + 2 * U * size
    if bool(size.isinf().any()):  # an infinite constant, such as -inf of a mask, makes an exact sum
        error = torch.where(_infinite(x) | _infinite(y), 0.0, error)
    return Known(value, size, error)


def _infinite(x: Known) -> Tensor:
    """Return where x is infinite itself; a number that overflowed has an infinite error."""
    return x.value.isinf() & (x.error == 0)


def _sub(a: Operand, b: Operand, alpha: float = 1.0) -> Known:
    return _add(a, b, -alpha)


def _mul(a: Operand, b: Operand) -> Known:
    x, y = _pair(a, b)
    size = x.size * y.size
    return Known(x.value * y.value, size, x.size * y.error + x.error * (y.size + y.error) + U * size + TINY)


def _div(a: Operand, b: Operand) -> Known:
    return _mul(a, _reciprocal(_pair(a, b)[1]))


def _reciprocal(x: Known) -> Known:
    low = (x.value.abs() - x.error).clamp_min(0)
    return _fresh(1 / x.value, x.error / (x.value.abs() * low) + U / low)


def _rsqrt(x: Known) -> Known:
    """Use the slope of x^-1/2 at the low end."""
    low = (x.value - x.error).clamp_min(0)
    return _fresh(x.value.rsqrt(), x.error / (2 * low * low.sqrt()) + 4 * U / low.sqrt())


def _sqrt(x: Known) -> Known:
    value, low = x.value.sqrt(), (x.value - x.error).clamp_min(0).sqrt()
    steep = torch.where(x.error > 0, x.error / (value + low), 0.0)  # |a - b| / (sqrt a + sqrt b)
    return _fresh(value, steep + U * value)


def _pow(x: Known, exponent: float) -> Known:
    if exponent == 2:
        return _mul(x, x)
    if exponent == 0.5:
        return _sqrt(x)
    if exponent == -0.5:
        return _rsqrt(x)
    if exponent == 3:
        return _mul(_mul(x, x), x)
    raise UserError(f"x^{exponent:g} has no rounding bound; add one to zoo/bounds/float_error.py")


def _where(chosen: Tensor, a: Operand, b: Operand) -> Known:
    """Choose by a constant; a comparison of computed numbers has no bound and never gets here."""
    x, y = _pair(a, b)
    return Known(*(torch.where(chosen, getattr(x, part), getattr(y, part)) for part in ("value", "size", "error")))


def _product(apply: Callable[[Tensor, Tensor], Tensor], x: Known, y: Known, terms: int) -> Known:
    size = apply(x.size, y.size)
    passed = apply(x.error, y.size + y.error)
    if bool((y.error > 0).any()):
        passed = passed + apply(x.size, y.error)
    return Known(apply(x.value, y.value), size, passed + gamma(terms + 2) * size + TINY)


def _matmul(x: Known, y: Known) -> Known:
    return _product(torch.matmul, x, y, x.value.shape[-1])


def _addmm(b: Known, x: Known, y: Known, beta: float = 1.0, alpha: float = 1.0) -> Known:
    return _add(_mul(_matmul(x, y), alpha), _mul(b, beta))


def _convolution(x: Known, weight: Known, bias: Known | None, *options: Any) -> Known:
    def apply(a: Tensor, b: Tensor) -> Tensor:
        return torch.convolution(a, b, None, *options)

    y = _product(apply, x, weight, weight.value[0].numel())
    return y if bias is None else _add(y, _reshaped(bias, (-1, *[1] * (x.value.ndim - 2))))


def _convolution_backward(g: Known, x: Known, weight: Known, _: Any, *options: Any) -> list[Known | None]:
    """Return the transpose of the linear part, the only gradient that certificates need."""
    *options_of_map, mask = options
    if list(mask)[1:] != [False, False]:
        raise UserError("the gradient of a convolution's weights was asked for; ask for that of its input")

    def apply(a: Tensor, b: Tensor) -> Tensor:
        backward = torch.ops.aten.convolution_backward.default
        return backward(a, x.value, b, None, *options_of_map, [True, False, False])[0]

    return [_product(apply, g, weight, weight.value[:, 0].numel()), None, None]


def _pad(x: Known, pad: Sequence[int], value: float = 0.0) -> Known:
    def by(t: Tensor, fill: float) -> Tensor:
        return torch.constant_pad_nd(t, pad, fill)

    return Known(by(x.value, value), by(x.size, abs(value)), by(x.error, 0.0))


def _reshaped(x: Known, shape: tuple[int, ...]) -> Known:
    return Known(x.value.view(shape), x.size.view(shape), x.error.view(shape))


def _sum(x: Known, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any) -> Known:
    def add(t: Tensor) -> Tensor:
        return t.sum(tuple(range(t.ndim)) if dim is None or len(dim) == 0 else tuple(dim), keepdim)

    value, size = add(x.value), add(x.size)
    terms = x.value.numel() // max(1, value.numel())
    return Known(value, size, add(x.error) + gamma(terms + 2) * size)


def _mean(x: Known, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any) -> Known:
    total = _sum(x, dim, keepdim)
    return _div(total, x.value.numel() / total.value.numel())


def _vector_norm(
    x: Known, order: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any
) -> Known:
    if order != 2:
        raise UserError(f"the {order:g}-norm has no rounding bound; add one to zoo/bounds/float_error.py")

    def norm(t: Tensor) -> Tensor:
        return torch.linalg.vector_norm(t, 2, None if dim is None else tuple(dim), keepdim)

    value = norm(x.value)
    terms = x.value.numel() // max(1, value.numel())
    return _fresh(value, norm(x.error) + gamma(terms + 4) * value + TINY)


def _layer_norm(x: Known, shape: Sequence[int], weight: Known | None, bias: Known | None, eps: float) -> list[Known]:
    dims = tuple(range(-len(shape), 0))
    mean = _mean(x, dims, True)
    centred = _sub(x, mean)
    centred = _fresh(centred.value, centred.error)
    rstd = _rsqrt(_add(_mean(_mul(centred, centred), dims, True), eps))
    y = _mul(centred, rstd)
    y = y if weight is None else _mul(y, weight)
    return [y if bias is None else _add(y, bias), mean, rstd]


def _softmax(x: Known, dim: int, *_: Any) -> Known:
    """Bound the error of a softmax.

    A score off by e changes every weight by a factor within e^(+-2e). Beyond that, each exponent rounds in proportion
    to its distance from the largest, and the weights themselves make this small in the sum.
    """
    value, far = x.value.softmax(dim), (x.value.amax(dim, True) - x.value) * 2 * U
    share = torch.expm1(x.error + x.error.amax(dim, True) + far + LIBM) + gamma(3 * x.value.shape[dim] + 200)
    return _fresh(value, torch.where(value > 0, value * share, TINY) + TINY)


def _lipschitz(f: Callable[..., Tensor], slope: float, rounding: float) -> Callable[..., Known]:
    """Return the rule of f with |f'| <= slope, computed to `rounding` of |f| or |x|, whichever is larger."""

    def rule(x: Known, *args: Any, **kwargs: Any) -> Known:
        value = f(x.value, *args, **kwargs)
        return _fresh(value, slope * x.error + rounding * torch.maximum(value.abs(), x.value.abs()) + TINY)

    return rule


def _softplus(x: Known, beta: float = 1.0, threshold: float = 20.0) -> Known:
    """Add to the slope 1 the jump at the threshold, for entries that may lie on either side of it."""
    smooth = _lipschitz(torch.nn.functional.softplus, 1.0, 2 * LIBM)(x, beta, threshold)
    either = (beta * x.value - threshold).abs() <= 2 * beta * x.error + 8 * U * threshold
    return replace(smooth, error=smooth.error + either * (math.log1p(math.exp(-threshold)) / beta * OUT))


def _exp(x: Known) -> Known:
    value = x.value.exp()
    return _fresh(value, value * (torch.expm1(x.error) + LIBM * (1 + x.error.exp())) + TINY)


def _sigmoid(x: Known) -> Known:
    value = x.value.sigmoid()
    return _fresh(value, 0.25 * x.error + 2 * LIBM * value + TINY)


def _extremum(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Operand, Operand], Known]:
    def rule(a: Operand, b: Operand) -> Known:
        x, y = _pair(a, b)
        return Known(f(x.value, y.value), torch.maximum(x.size, y.size), torch.maximum(x.error, y.error))

    return rule


SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946  # alpha and scale, as in torch


def _elu(x: Known, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Known:
    slope = abs(scale) * max(1.0, abs(alpha * input_scale)) * OUT
    value = torch.ops.aten.elu(x.value, alpha, scale, input_scale)
    own = LIBM * slope * (1 + abs(input_scale)) * torch.maximum(x.value.abs(), value.abs()) + TINY
    return _fresh(value, slope * x.error + own)  # e^x - 1 is within LIBM of the larger of |x| and itself


def _prelu(x: Known, weight: Known) -> Known:
    value = torch.ops.aten._prelu_kernel(x.value, weight.value)
    return _fresh(value, weight.value.abs().clamp_min(1) * x.error + U * value.abs() + TINY)


def _leaky_relu(x: Known, slope: float = 0.01) -> Known:
    value = torch.nn.functional.leaky_relu(x.value, slope)
    return _fresh(value, max(1.0, abs(slope)) * x.error + U * value.abs() + TINY)


def _batch_norm(
    x: Known, weight: Known | None, bias: Known | None, mean: Known, variance: Known, *options: Any
) -> list[Known]:
    """Return w x + (b - w mean), whose size is that of the three terms, in whatever order a kernel adds them."""
    *_, eps = (option for option in options if isinstance(option, float))
    shape = (-1, *(1,) * (x.value.ndim - 2))
    scale = _rsqrt(_add(variance, eps))
    scale = scale if weight is None else _mul(scale, weight)
    shift = _mul(_mul(mean, scale), -1.0)
    shift = shift if bias is None else _add(shift, bias)
    y = _add(_mul(x, _reshaped(scale, shape)), _reshaped(shift, shape))
    nothing = x.value.new_empty(0)
    return [y, Known(nothing, nothing, nothing), Known(nothing, nothing, nothing)]


def _group_norm(
    x: Known, weight: Known | None, bias: Known | None, images: int, channels: int, rest: int, groups: int, eps: float
) -> list[Known]:
    y, mean, rstd = _layer_norm(_reshaped(x, (images, groups, -1)), (channels // groups * rest,), None, None, eps)
    shape = (-1, *(1,) * (x.value.ndim - 2))
    y = _reshaped(y, x.value.shape)
    y = y if weight is None else _mul(y, _reshaped(weight, shape))
    return [y if bias is None else _add(y, _reshaped(bias, shape)), mean, rstd]


def _pooled(name: str, terms: Callable[..., int]) -> Callable[..., Known]:
    """Return the rule of a weighted sum of `terms` entries without negative weights, or of its transpose."""

    def rule(x: Known, *args: Any, **kwargs: Any) -> Known:
        f = getattr(torch.ops.aten, name)
        plain = tree_map(lambda arg: arg.value if isinstance(arg, Known) else arg, args)
        size = f(x.size, *plain, **kwargs)
        count = terms(x.value, *plain)
        return Known(f(x.value, *plain, **kwargs), size, f(x.error, *plain, **kwargs) + gamma(count + 4) * size)

    return rule


def _sort(x: Known, dim: int = -1, descending: bool = False) -> list[Any]:
    """Return the rule of order statistics, |sort a - sort b| <= max |a - b|; the indices are not numbers."""
    value, at = x.value.sort(dim, descending)
    size, error = (t.amax(dim, True).expand_as(value).contiguous() for t in (x.size, x.error))  # views follow
    return [Known(value, size, error), at]


def _max_pool(x: Known, *args: Any, **kwargs: Any) -> list[Any]:
    """Return the rule of maxima, |max a - max b| <= max |a - b|; the indices are not numbers."""

    def pooled(t: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.aten.max_pool2d_with_indices(t, *args, **kwargs)
        return found

    value, index = pooled(x.value)
    return [Known(value, pooled(x.size)[0], pooled(x.error)[0]), index]


def _window(x: Tensor, kernel: Sequence[int], *_: Any) -> int:
    return math.prod(kernel) if len(kernel) > 1 else kernel[0] ** 2


RULES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "rsub": lambda a, b, alpha=1.0: _sub(_mul(b, 1.0) if isinstance(b, Known) else b, a, alpha),
    "constant_pad_nd": _pad,
    "neg": lambda x: Known(-x.value, x.size, x.error),
    "abs": lambda x: Known(x.value.abs(), x.size, x.error),
    "mul": _mul,
    "div": _div,
    "reciprocal": _reciprocal,
    "rsqrt": _rsqrt,
    "sqrt": _sqrt,
    "pow": _pow,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "sum": _sum,
    "mean": _mean,
    "linalg_vector_norm": _vector_norm,
    "native_layer_norm": _layer_norm,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "exp": _exp,
    "sigmoid": _sigmoid,
    "tanh": _lipschitz(torch.tanh, 1.0, LIBM),
    "gelu": _lipschitz(torch.nn.functional.gelu, 1.13, 2 * LIBM),
    "silu": _lipschitz(torch.nn.functional.silu, 1.1, 2 * LIBM),
    "softplus": _softplus,
    "relu": _lipschitz(torch.relu, 1.0, 0.0),
    "clamp": _lipschitz(torch.clamp, 1.0, 0.0),
    "clamp_min": _lipschitz(torch.clamp_min, 1.0, 0.0),
    "clamp_max": _lipschitz(torch.clamp_max, 1.0, 0.0),
    "hardtanh": _lipschitz(torch.nn.functional.hardtanh, 1.0, 0.0),
    "hardswish": _lipschitz(torch.nn.functional.hardswish, 1.5, 8 * U),
    "hardsigmoid": _lipschitz(torch.nn.functional.hardsigmoid, 1.0, 8 * U),
    "mish": _lipschitz(torch.nn.functional.mish, 1.1, 4 * LIBM),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "celu": lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1 / alpha),
    "selu": lambda x: _elu(x, *SELU),
    "_prelu_kernel": _prelu,
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_batch_norm_no_update": _batch_norm,
    "native_group_norm": _group_norm,
    "avg_pool2d": _pooled("avg_pool2d", _window),
    "avg_pool2d_backward": _pooled("avg_pool2d_backward", lambda g, x, kernel, *_: _window(x, kernel)),
    "_adaptive_avg_pool2d": _pooled("_adaptive_avg_pool2d", lambda x, *_: x[0, 0].numel()),
    "_adaptive_avg_pool2d_backward": _pooled("_adaptive_avg_pool2d_backward", lambda g, x: x[0, 0].numel()),
    "max_pool2d_with_indices": _max_pool,
    "sort": _sort,
    "where": _where,
    "maximum": _extremum(torch.maximum),
    "minimum": _extremum(torch.minimum),
}
