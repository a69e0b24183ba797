"""Bounds of the distance between a module served in float32 or bfloat16 and its float64 function.

x' is an input of the served module, x^ what one of its parts receives instead of x', x the clean one,

    ||x' - x||_F <= r,        ||x^ - x'||_F <= e        (radius of the ball, and rounding so far; tokens together),

and `rounding(module, precision)(x) -> Rounded(y, radius(r), error(r, e))`. Here `radius` bounds how far the exact
output moves, and `error` bounds what the module makes of e and adds itself. primitives.py has the rules of primitive
operations; this file combines them. ASSUMPTIONS lists the assumptions about kernels; the weights are those served.
Proofs: docs/proofs.md#rounding.

Letters: B images, N tokens, D width; r and e (..., B).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT
from zoo.bounds.contracts import Precision, Rounded, Rounding
from zoo.bounds.first_order import trunk
from zoo.bounds.rule_table import Link, NoRule, rules_of

TINY = 1e-30  # above underflow, flushed to zero or not
LARGEST = 1e37  # sums of moduli below this do not overflow
ROOT = 1e18  # the same for numbers that are squared
NO_BOUND = "it has no rounding bound; certify with served_dtype=null"
ASSUMPTIONS = (
    "matrix products, convolutions and sums are taken in float32 (or wider), in any order, with unit round-off 2^-24; "
    "neither TF32 nor Winograd nor any other product of fewer multiplications",
    "every operation ends in one rounding to the served type",
    "exp, erf, tanh and log1p are within 40 units of 2^-24, square roots, their inverses and quotients within 4",
    "what underflows is lost by at most 2^-126 a term, flushed to zero or not",
    "the served weights are those certified, the images float32 numbers; the forward pass is that of the modules' code "
    "in eval mode, without torch.compile",
)


# u is twice that of rounding to nearest for bfloat16, whose kernels may round a second time on the way.
PRECISIONS = {torch.float32: Precision(2.0**-24), torch.bfloat16: Precision(2.0**-8)}


def trunk_roundings(model: nn.Module, precision: Precision) -> list[Rounding]:
    """Return one rounding for every node of `curvature.trunk_of`, in its order. Raises `NoRule`."""
    links, _ = trunk(model)
    return [rounding for link in links for rounding in roundings_of(link, precision)]


def roundings_of(module: nn.Module | Link, precision: Precision) -> list[Rounding]:
    """Return one rounding for every node of `curvature.nodes_of`, in its order. Raises `NoRule`."""
    if not isinstance(module, nn.Module):
        return module.roundings(precision)
    rules = rules_of(module)
    if rules.chain is not None and rules.expansion is None:
        return [rounding for link in rules.chain(module) for rounding in roundings_of(link, precision)]
    if rules.rounding is None:
        raise NoRule(module, NO_BOUND)
    return [rules.rounding(module, precision)]


def exact(f: Callable[[Tensor], Tensor]) -> Rounding:
    """Return the rounding of f, which computes nothing and lengthens nothing.

    Examples are an identity in eval mode, entries that are moved or dropped, one of many tokens, appended constants,
    and units clipped at constants.
    """
    return lambda x: Rounded(f(x), lambda r: r, lambda r, e: e)


def exact_module(module: nn.Module, precision: Precision) -> Rounding:
    """Return the same as a module's rule."""
    return exact(module)


def composed(parts: Sequence[Rounding]) -> Rounding:
    """Return the rounding of a composition: each part gets the radius and the error of the parts before it."""

    def around(x: Tensor) -> Rounded:
        inner, y = list[Rounded](), x
        for part in parts:
            inner.append(part(y))
            y = inner[-1].y

        def radius(r: Tensor) -> Tensor:
            for one in inner:
                r = one.radius(r)
            return r

        def error(r: Tensor, e: Tensor) -> Tensor:
            for one in inner:
                r, e = one.radius(r), one.error(r, e)
            return e

        return Rounded(y, radius, error)

    return around


def of_chain(links: Sequence[nn.Module | Link], precision: Precision) -> Rounding:
    """Return the rounding of all links as one."""
    return composed([rounding for link in links for rounding in roundings_of(link, precision)])


def residual_rounding(branch: Sequence[Rounding], precision: Precision) -> Rounding:
    """Return the rounding of x + branch(x), that of the sum included."""
    of_branch = composed(branch)

    def around(x: Tensor) -> Rounded:
        inner = of_branch(x)
        y, moduli_B = x + inner.y, size(x) + size(inner.y)
        y_B = size(y)

        def radius(r: Tensor) -> Tensor:
            return r + inner.radius(r)

        def error(r: Tensor, e: Tensor) -> Tensor:
            both, moved = e + inner.error(r, e), radius(r)
            own = precision.u * (y_B + moved + both)
            return in_range(moduli_B + moved + both, (both + own) * OUT)

        return Rounded(y, radius, error)

    return around


def size(x: Tensor) -> Tensor:
    """Return ||x||_F per image: (B,)."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def longest(x: Tensor) -> Tensor:
    """Return the length of the longest row of every image, (B, ..., O) -> (B,)."""
    return torch.linalg.vector_norm(x, dim=-1).view(len(x), -1).amax(1)


def in_range(size_B: Tensor, error_B: Tensor, most: float = LARGEST) -> Tensor:
    """Return the error, infinite where float32 may overflow."""
    return torch.where(size_B <= most, error_B, torch.inf)
