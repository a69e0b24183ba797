"""The rounding of primitive operations that the rules of modules are composed of.

They are products, sums, means, factors, and functions of one number. rounding.py states the terms and the assumptions.

With u the unit round-off of the type, a = 2^-24 that of its sums and gamma_k = k a / (1 - k a), a sum of K products and
a constant has, in any order,

    |fl(A x + b) - (A x + b)| <= gamma_{K+5} (|A| |x| + |b| + |A x + b|) / 2 + u |A x + b|,

as no partial sum is above that of the positive or that of the negative terms. Moduli are taken at the clean point,
where they are known entry by entry; away from it, norms are used.

Letters: B images; r and e (..., B). Proofs: docs/proofs.md#rounding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.arithmetic import OUT
from zoo.bounds.contracts import Error, Precision, Rounded, Rounding
from zoo.bounds.rounding import TINY, in_range, longest, size
from zoo.spectral import sigma_upper

Map = Callable[[Tensor], Tensor]
Norms = Callable[[Tensor], tuple[Tensor | float, Tensor | float]]
"""Maps the output y (B, ...) to ||A|| and |||A|||, which may depend on its shape."""


def product(apply: Map, moduli: Map, norms: Norms, terms: int, precision: Precision, more: float = 0.0) -> Rounding:
    """Bound y = A x + b, computed by sums of `terms` terms.

    moduli: |x| -> |A| |x| + |b|. more: the entries of A are computed too, up to this share of their moduli.
    """
    sums = precision.gamma(terms + 5)

    def around(x: Tensor) -> Rounded:
        y, all_ = apply(x), moduli(x.abs())
        norm, absolute = norms(y)

        def off(length: Map) -> Error:
            all_B, half_B, y_B = length(all_), length((all_ + y.abs()) / 2), length(y)

            def error(r: Tensor, e: Tensor) -> Tensor:
                reach = r + e
                own_B = sums * (half_B + (absolute + norm) / 2 * reach) + precision.u * (y_B + norm * reach)
                whole_B = all_B + absolute * reach
                own_B = own_B + more * (1 + sums + precision.u) * whole_B
                return in_range(whole_B, (norm * e + own_B) * OUT + TINY)

            return error

        return Rounded(y, lambda r: norm * r, off(size), off(longest))

    return around


def matrix_product(
    weight_OI: Tensor,
    bias_O: Tensor | None,
    precision: Precision,
    more: float = 0.0,
    shaped: Map = lambda y: y,
) -> Rounding:
    """Bound x W^T + b on the last axis, then `shaped`, which moves entries. more: as in `product`."""
    weight, bias = weight_OI.detach().double(), None if bias_O is None else bias_O.detach().double()
    norm, absolute = sigma_upper(weight), sigma_upper(weight.abs())

    def moduli(x: Tensor) -> Tensor:
        return shaped(F.linear(x, weight.abs(), None if bias is None else bias.abs()))

    def apply(x: Tensor) -> Tensor:
        return shaped(F.linear(x, weight, bias))

    return product(apply, moduli, lambda y: (norm, absolute), weight.shape[1], precision, more)


def linear_rounding(module: nn.Linear, precision: Precision) -> Rounding:
    """Return the rounding of torch's module."""
    return matrix_product(module.weight, module.bias, precision)


def mean(apply: Map, many: Callable[[Tensor], int], precision: Precision) -> Rounding:
    """Bound the mean of many(x) entries: ||A|| = N^{-1/2}, and no entry of A is negative."""

    def around(x: Tensor) -> Rounded:
        terms = many(x)
        share = terms**-0.5
        return product(apply, apply, lambda y: (share, share), terms + 2, precision)(x)

    return around


def plus(f: Map, precision: Precision) -> Rounding:
    """Bound f, which adds constants and may move entries."""

    def around(x: Tensor) -> Rounded:
        y = f(x)
        x_B, y_B, none_B = size(x), size(y), size(f(torch.zeros_like(x)))

        def error(r: Tensor, e: Tensor) -> Tensor:
            return in_range(x_B + none_B + r + e, (e + precision.u * (y_B + r + e)) * OUT + TINY)

        return Rounded(y, lambda r: r, error)

    return around


def factors(scale: Tensor, roundings: int, precision: Precision) -> Rounding:
    """Bound x times `scale`, on the last axis or a number; `roundings` counts those of the factors and the products."""
    most, share = scale.abs().amax(), roundings * precision.u * (1 + roundings * precision.u)

    def around(x: Tensor) -> Rounded:
        y = x * scale
        y_B = size(y)

        def error(r: Tensor, e: Tensor) -> Tensor:
            all_B = y_B + most * (r + e)
            return in_range(all_B, (most * e + share * all_B) * OUT + TINY)

        return Rounded(y, lambda r: most * r, error)

    return around


def centred(precision: Precision) -> Rounding:
    """Bound x - mean(x) on the last axis: a sum, a division, and a difference."""

    def around(x: Tensor) -> Rounded:
        y, average, u = x - x.mean(-1, keepdim=True), x.mean(-1, keepdim=True).abs(), precision.u
        half_B, average_B, x_B = (
            size(t.expand(x.shape)) for t in ((x.abs().mean(-1, keepdim=True) + average) / 2, average, x)
        )
        sums, y_B = precision.gamma(x.shape[-1] + 6), size(y)

        def error(r: Tensor, e: Tensor) -> Tensor:
            """Return the error; a mean, repeated over its entries, is no longer than the vector it is taken of."""
            reach = r + e
            mean_B = sums * (half_B + reach) + u * (average_B + reach)
            own_B = mean_B + u * (y_B + reach + mean_B)
            return in_range(2 * (x_B + reach), (e + own_B) * OUT + TINY)

        return Rounded(y, lambda r: r, error)

    return around


def function(f: Map, slope: float, operations: int, precision: Precision) -> Rounding:
    """Bound sigma of every number, |sigma'| <= slope, computed by `operations` operations.

    Each operation is within 80 a and u, relative to |z| or |sigma(z)|, whichever is larger, and |sigma(z)| <=
    |sigma(0)| + slope |z|.
    """
    share = 80 * precision.sums + operations * precision.u

    def around(x: Tensor) -> Rounded:
        y, x_B, still_B = f(x), size(x), size(f(torch.zeros_like(x)))

        def error(r: Tensor, e: Tensor) -> Tensor:
            all_B = still_B + max(1.0, slope) * (x_B + r + e)
            return in_range(all_B, (slope * e + share * all_B) * OUT + TINY)

        return Rounded(y, lambda r: slope * r, error)

    return around
