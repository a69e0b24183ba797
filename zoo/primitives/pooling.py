"""Pooling: means over axes or windows, and maxima over windows, with their rules.

    mean of n entries: ||J|| = n^{-1/2};   windows that overlap: the norm of a convolution with a constant kernel

    max of disjoint windows: with gap_w >= 0 between the largest and the second largest entry of window w,

        0 <= R_w = max_i (G_i - G_* - gap_i)_+ <= (sqrt2 |G_w| - gap_w)_+,        G_i - G_* <= sqrt2 |G_w|

so that only g_w < 0 harms, and `hinges` shares the change of the image among the windows (docs/proofs.md#kinks). If
an entry lies in up to m windows, max pooling is that of disjoint windows of m copies, and has the norm m^{1/2}. Proof:
docs/proofs.md#primitives.

Letters: B images, C classes, W windows of K entries.
"""

import math

import torch
from torch import Tensor, nn

from zoo.arithmetic import FAR, OUT, at_least_near, length, product
from zoo.bounds.activations import beyond, hinges
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer, Precision, Rounded, Rounding
from zoo.bounds.curvature import affine
from zoo.bounds.primitives import mean as mean_rounding
from zoo.bounds.primitives import product as product_rounding
from zoo.bounds.rounding import exact_module
from zoo.bounds.rule_table import ModuleRules, NoRule, register
from zoo.layers.convolution import conv_norm

SQRT2 = math.sqrt(2) * OUT


class Mean(nn.Module):
    """The mean over some axes of an image, which disappear: dims (1, 2) of (B, C, H, W) are C and H."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


class WindowMax(nn.Module):
    """The largest entry of every window: (B, ..., K) -> (B, ...)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(-1)


def mean(module: Mean) -> Layer:
    """Return the rule of an average of n entries: n^{-1/2}."""
    if not module.dims or min(module.dims) < 1:
        raise NoRule(module, f"its axes are {module.dims}; take the mean over axes of one image, 1 and up")

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        gain = math.prod(x.shape[dim] for dim in module.dims) ** -0.5 * OUT
        return module(x), lambda r: gain * r

    return layer


def mean_rounded(module: Mean, precision: Precision) -> Rounding:
    """Bound a sum and a quotient."""
    return mean_rounding(module, lambda x: math.prod(x.shape[dim] for dim in module.dims), precision)


# windows of average pooling -------------------------------------------------------------------------------------------


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _windows(module: nn.AvgPool2d | nn.AdaptiveAvgPool2d, x: Tensor, y: Tensor) -> tuple[tuple[int, int], ...]:
    """Return kernel and stride. Raises NoRule unless all windows have one size and lie inside the padded image."""
    if isinstance(module, nn.AdaptiveAvgPool2d):
        stride = (x.shape[2] // y.shape[2], x.shape[3] // y.shape[3])
        if (stride[0] * y.shape[2], stride[1] * y.shape[3]) != tuple(x.shape[2:]):
            raise NoRule(module, f"{tuple(y.shape[2:])} windows do not divide {tuple(x.shape[2:])} pixels")
        return stride, stride
    kernel, padding = _pair(module.kernel_size), _pair(module.padding)
    stride = _pair(module.stride)
    sides = zip(x.shape[2:], y.shape[2:], kernel, stride, padding, strict=True)
    inside = all((n - 1) * s + k <= side + 2 * p for side, n, k, s, p in sides)
    if module.divisor_override is not None or not inside or (padding != (0, 0) and not module.count_include_pad):
        raise NoRule(module, "its windows have different divisors; set count_include_pad=True, ceil_mode=False")
    return kernel, stride


def average_pool(module: nn.AvgPool2d | nn.AdaptiveAvgPool2d) -> Layer:
    """Return the norm of the convolution with the constant kernel 1 / K, which is that of every channel."""
    norms = dict[tuple[tuple[int, ...], ...], float]()

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        y = module(x)
        kernel, stride = _windows(module, x, y)
        key = (tuple(x.shape[2:]), kernel, stride)
        if key not in norms:
            weight = torch.full((1, 1, *kernel), 1 / math.prod(kernel), dtype=torch.float64, device=x.device)
            norms[key] = float(conv_norm(weight, (stride[0], stride[1]), (y.shape[2], y.shape[3]))) * OUT
        gain = norms[key]
        return y, lambda r: gain * r

    return layer


def average_pool_rounding(module: nn.AvgPool2d | nn.AdaptiveAvgPool2d, precision: Precision) -> Rounding:
    """Bound a sum of K products with 1 / K; no entry of A is negative."""
    layer = average_pool(module)

    def around(x: Tensor) -> Rounded:
        y, bound = layer(x)
        norm = float(bound(torch.ones(1, dtype=torch.float64)))
        kernel, _ = _windows(module, x, y)
        return product_rounding(module, module, lambda _: (norm, norm), math.prod(kernel) + 2, precision)(x)

    return around


# maxima ---------------------------------------------------------------------------------------------------------------


def window_max(module: WindowMax) -> Layer:
    """Return the rule: |max a - max b| <= max |a - b|, window by window."""
    return lambda x: (module(x), lambda r: r)


def window_max_expansion(module: WindowMax) -> Expand:
    """Expand the choice of the largest entry, the first one of several: R_w <= (sqrt2 |G_w| - gap_w)_+."""

    def expand(x: Tensor) -> Expansion:
        top = x.topk(min(2, x.shape[-1]), -1).values
        gap_B1W = _gap(top).flatten(1).unsqueeze(1)
        at = x.argmax(-1, keepdim=True)

        def pull(g: Tensor) -> Tensor:
            place = at.expand(len(g), *at.shape)
            return g.new_zeros(len(g), *x.shape).scatter(-1, place, g.unsqueeze(-1))

        def push(v: Tensor) -> Tensor:
            return v.gather(-1, at.expand(len(v), *at.shape)).squeeze(-1)

        def beta(r: Tensor) -> Tensor:
            """Use (sqrt2 r - gap)_+ / r, which grows with r: the windows share r, and the largest share decides."""
            reach = SQRT2 * r
            share = beyond(gap_B1W.flatten(1).amin(1).expand(r.shape), reach)
            return torch.where(r > 0, reach * share, 0.0).nan_to_num(torch.inf)

        def remainder(g: Tensor) -> Bound:
            harm = (-g).clamp_min(0).flatten(2).unsqueeze(2)
            whole_CB = length(harm.flatten(2))
            return lambda r: shared(harm, gap_B1W, whole_CB, r)

        ones_B = x.new_ones(len(x))
        return Expansion(
            y=module(x), gain_B=ones_B, beta=beta, remainder=remainder, pull=pull, own_push=push, rounding_B=0 * ones_B
        )

    return expand


def _gap(top: Tensor) -> Tensor:
    """Return the distance to the second largest entry, infinite for windows of one, rounded down."""
    return (top[..., 0] - top[..., 1]) / OUT if top.shape[-1] == 2 else torch.full_like(top[..., 0], torch.inf)


def shared(harm_CB1W: Tensor, gap_B1W: Tensor, whole_CB: Tensor, r: Tensor) -> Tensor:
    """Bound sup sum_w harm_w (sqrt2 |G_w| - gap_w)_+ over sum |G_w|^2 <= r^2, also by |harm| sqrt2 r."""
    finite = r.clamp(max=FAR).expand(torch.broadcast_shapes(r.shape, whole_CB.shape))
    reach = at_least_near(SQRT2 * finite)
    shape = torch.broadcast_shapes((*finite.shape, 1, 1), harm_CB1W.shape)
    v, k = harm_CB1W.expand(shape), gap_B1W.expand(shape)
    square = reach.square()[..., None, None]
    shared = hinges(v, k, reach[..., None, None].expand(shape), reach, lambda c: (square * c).amax((-2, -1)))
    return torch.where(r > FAR, torch.inf, torch.minimum(shared, product(whole_CB, reach))).where(r > 0, 0.0)


def max_pool(module: nn.MaxPool2d) -> Layer:
    """Return the root of the largest number of windows that share an entry. Second order: `WindowMax`."""
    if module.return_indices:
        raise NoRule(module, "it returns indices too; set return_indices=False")
    kernel, stride = _pair(module.kernel_size), _pair(module.stride)
    dilation = _pair(module.dilation)
    windows = math.prod(
        k if d > 1 else -(-k // s) for k, s, d in zip(kernel, stride, dilation, strict=True)
    )  # with a dilation at most k offsets of a window reach an entry
    gain = math.sqrt(windows) * (1.0 if math.isqrt(windows) ** 2 == windows else OUT)
    return lambda x: (module(x), lambda r: gain * r)


register(Mean, ModuleRules(rule=mean, expansion=affine, rounding=mean_rounded))
register(WindowMax, ModuleRules(rule=window_max, expansion=window_max_expansion, rounding=exact_module))
register(nn.MaxPool2d, ModuleRules(rule=max_pool))
register(nn.AvgPool2d, ModuleRules(rule=average_pool, expansion=affine, rounding=average_pool_rounding))
register(nn.AdaptiveAvgPool2d, ModuleRules(rule=average_pool, expansion=affine, rounding=average_pool_rounding))
KINDS = (Mean, WindowMax, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
