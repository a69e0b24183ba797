"""How far the output of a module that is served in float32 or bfloat16 is from that of its float64 function.

x' is an input of the served module, x^ what one of its parts has instead of x', x the clean one,

    ||x' - x||_F <= r,        ||x^ - x'||_F <= e        (radius of the ball, and rounding so far; tokens together),

and `rounding(module, precision)(x) -> Rounded(y, radius(r), error(r, e))`, where `radius` bounds how far the exact
output moves and `error` what the module makes of e and adds itself. Rules of primitive operations stand in
primitives.py; here is how they are put together. ASSUMPTIONS says what is assumed of the kernels; the weights are those
served. Proofs: docs/proofs.md#rounding.

Letters: B images, N tokens, D width; r and e (..., B).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT
from zoo.bounds.contracts import Precision, Rounded, Rounding
from zoo.bounds.facts import Link, NoRule, facts_of
from zoo.bounds.rules import trunk

TINY = 1e-30  # over underflow, flushed to zero or not
LARGEST = 1e37  # of sums of moduli: nothing overflows below
ROOT = 1e18  # of what is squared
NO_BOUND = "no bound of its rounding is written; certify with served_dtype=null"
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
    """One for every node of `curvature.trunk_of`, in its order. Raises `NoRule`."""
    links, _ = trunk(model)
    return [rounding for link in links for rounding in roundings_of(link, precision)]


def roundings_of(module: nn.Module | Link, precision: Precision) -> list[Rounding]:
    """One for every node of `curvature.nodes_of`, in its order. Raises `NoRule`."""
    if not isinstance(module, nn.Module):
        return module.roundings(precision)
    facts = facts_of(module)
    if facts.chain is not None and facts.expansion is None:
        return [rounding for link in facts.chain(module) for rounding in roundings_of(link, precision)]
    if facts.rounding is None:
        raise NoRule(module, NO_BOUND)
    return [facts.rounding(module, precision)]


def exact(f: Callable[[Tensor], Tensor]) -> Rounding:
    """Nothing is computed, and nothing grows: an identity in eval mode, entries that are moved or left out, one of many
    tokens, constants that join, units cut off at constants."""
    return lambda x: Rounded(f(x), lambda r: r, lambda r, e: e)


def exact_module(module: nn.Module, precision: Precision) -> Rounding:
    """The same, as the fact of a module."""
    return exact(module)


def composed(parts: Sequence[Rounding]) -> Rounding:
    """One after the other: each gets the radius and the error that those in front of it make."""

    def around(x: Tensor) -> Rounded:
        inner, y = list[Rounded](), x
        for part in parts:
            inner.append(part(y))
            y = inner[-1].y

        def through(r: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
            for one in inner:
                r, e = one.radius(r), one.error(r, e)
            return r, e

        return Rounded(y, lambda r: through(r, torch.zeros_like(r))[0], lambda r, e: through(r, e)[1])

    return around


def of_chain(links: Sequence[nn.Module | Link], precision: Precision) -> Rounding:
    """All of them in one."""
    return composed([rounding for link in links for rounding in roundings_of(link, precision)])


def residual_rounding(branch: Sequence[Rounding], precision: Precision) -> Rounding:
    """x + branch(x), and the rounding of the sum."""
    of_branch = composed(branch)

    def around(x: Tensor) -> Rounded:
        inner = of_branch(x)
        y, moduli_B = x + inner.y, size(x) + size(inner.y)
        y_B = size(y)

        def radius(r: Tensor) -> Tensor:
            return r + inner.radius(r)

        def error(r: Tensor, e: Tensor) -> Tensor:
            both = e + inner.error(r, e)
            own = precision.u * (y_B + radius(r) + both)
            return in_range(moduli_B + radius(r) + both, (both + own) * OUT)

        return Rounded(y, radius, error)

    return around


def size(x: Tensor) -> Tensor:
    """||x||_F per image: (B,)."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def longest(x: Tensor) -> Tensor:
    """The longest row of every image, (B, ..., O) -> (B,)."""
    return torch.linalg.vector_norm(x, dim=-1).view(len(x), -1).amax(1)


def in_range(size_B: Tensor, error_B: Tensor, most: float = LARGEST) -> Tensor:
    """The error, infinite where numbers so large may come up that float32 overflows."""
    return torch.where(size_B <= most, error_B, torch.inf)
