"""How far the output of a module that is served in float32 or bfloat16 is from that of its float64 function.

x' is an input of the served module, x^ what one of its parts has instead of x', x the clean one,

    ||x' - x||_F <= r,        ||x^ - x'||_F <= e        (radius of the ball, and rounding so far; tokens together),

and `rounding(module, precision)(x) -> Rounded(y, radius(r), error(r, e))`, where `radius` is the rule of rules.py and
`error` bounds what the module makes of e and adds itself. With u the unit round-off of the type, a = 2^-24 that of
its sums and gamma_k = k a / (1 - k a), a matrix product with K terms has, whatever the order of its sum,

    |fl(W x + b) - (W x + b)| <= gamma_{K+2} (|W| |x| + |b|) + u |W x + b|        (Higham 2002, section 3.5).

Assumed of the kernels: sums in float32, also for bfloat16, and one rounding at the end of each operation; no TF32, no
Winograd; exp, erf and tanh within 40 u. Weights are those served. Source: MATH-PROOFS.md section 3.

Letters: B images, N tokens, D width; r and e (..., B).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.arithmetic import gamma
from zoo.bounds.facts import Link, NoRule, facts_of
from zoo.bounds.rules import Bound, trunk
from zoo.spectral import sigma_upper

OUT = 1 + 1e-9  # outwards over the rounding of these formulas themselves
TINY = 1e-30  # over underflow
NO_BOUND = "no bound of its rounding is written; certify with served_dtype=null"
Error = Callable[[Tensor, Tensor], Tensor]  # r (B,), e (B,) -> e (B,)


@dataclass(frozen=True)
class Precision:
    """Unit round-offs: u of the served type, a of its sums."""

    u: float
    sums: float = 2.0**-24

    def gamma(self, k: int) -> float:
        """That of a sum with k roundings."""
        return gamma(k, self.sums)

    @property
    def activation(self) -> float:
        """sigma(z) of an activation with |sigma(z)| <= |z|, relative to |z|."""
        return 80 * self.sums + self.u


# u is twice that of rounding to nearest for bfloat16, whose kernels may round a second time on the way.
PRECISIONS = {torch.float32: Precision(2.0**-24), torch.bfloat16: Precision(2.0**-8)}


@dataclass(frozen=True)
class Rounded:
    """One module around a clean batch."""

    y: Tensor
    radius: Bound
    error: Error


Rounding = Callable[[Tensor], Rounded]


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
    """Nothing is computed: an identity in eval mode, one of many tokens, constants that join."""
    return lambda x: Rounded(f(x), lambda r: r, lambda r, e: e)


def exact_module(module: nn.Module, precision: Precision) -> Rounding:
    """The same, as the fact of a module."""
    return exact(module)


def residual_rounding(branch: Sequence[Rounding], precision: Precision) -> Rounding:
    """x + branch(x), and the rounding of the sum."""

    def around(x: Tensor) -> Rounded:
        inner, y = [], x
        for rounding in branch:
            inner.append(rounding(y))
            y = inner[-1].y
        x_B, y_B = size(x), size(y)

        def through(r: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
            for one in inner:
                r, e = one.radius(r), one.error(r, e)
            return r, e

        def error(r: Tensor, e: Tensor) -> Tensor:
            r_b, e_b = through(r, e)
            return (e + e_b + precision.u * (x_B + r + e + y_B + r_b + e_b)) * OUT

        return Rounded(x + y, lambda r: r + through(r, torch.zeros_like(r))[0], error)

    return around


def size(x: Tensor) -> Tensor:
    """||x||_F per image: (B,)."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


@dataclass(frozen=True)
class MatrixProduct:
    """x W^T + b on tokens: its norm, that of |W|, and what it adds to an error."""

    norm: Tensor
    absolute: Tensor
    bias: float
    terms: int
    precision: Precision

    def size(self, size_B: Tensor, tokens: int) -> Tensor:
        """||x W^T + b||_F for ||x||_F <= size."""
        return self.norm * size_B + self.bias * math.sqrt(tokens)

    def error(self, size_B: Tensor, e_B: Tensor, tokens: int) -> Tensor:
        """||W|| e + (gamma_{K+2} + u) (|||W||| ||x^|| + ||b||)."""
        mine = self.absolute * (size_B + e_B) + self.bias * math.sqrt(tokens)
        share = self.precision.gamma(self.terms + 2) + self.precision.u
        return (self.norm * e_B + share * mine) * OUT + TINY


def matrix_product(weight_OI: Tensor, bias_O: Tensor | None, precision: Precision) -> MatrixProduct:
    """Its weights measured."""
    length = 0.0 if bias_O is None else float(torch.linalg.vector_norm(bias_O.detach().double()))
    return MatrixProduct(sigma_upper(weight_OI), sigma_upper(weight_OI.abs()), length, weight_OI.shape[1], precision)
