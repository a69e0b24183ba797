"""What the facts of a module give: the types of their answers, of first order, of second order, and of rounding.

Each promise is told where the answers are used: rules.py, activations.py, curvature.py, rounding.py. Shapes:
x (B, ...); g (C, B, ...); r (..., B).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zoo.arithmetic import gamma

Bound = Callable[[Tensor], Tensor]
"""r (..., B), radii of a ball around the input of each image -> a radius around the output that is never exceeded."""
Layer = Callable[[Tensor], tuple[Tensor, Bound]]
"""x (B, ...), clean inputs -> the outputs for them, and the bound of how far these move."""
LambdaMax = Callable[[Tensor], Tensor]  # c (P, N, H) -> (P,), never below max(0, max_tokens sum_h c_h d_h^2 / |eta|^2)


class Activation(Protocol):
    """What is known of sigma. `slopes`: the least and the largest, rounded outwards. `operations`: by how many it is
    computed, as primitives.py says of `function`; 0: it chooses between z and constants; None: it is not known."""

    @property
    def slopes(self) -> tuple[float, float]: ...

    @property
    def operations(self) -> int | None: ...

    def slope(self, z: Tensor) -> Tensor:
        """sigma'(z); at a kink one of the two."""

    def remainder(self, z_PNH: Tensor, w_PNH: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """(P,) never below -sum w_h R_h, for a change of the input by r."""

    def beta(self, z_PNH: Tensor, s_H: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """(P,) never below (sum (s_h R_h)^2)^(1/2)."""

    def parabola(self, z: Tensor, w: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """(c, s) with -w_h R_h <= c_h d_h^2 / 2 + s_h, both >= 0."""

    def chord(self, z: Tensor, reach: Tensor) -> Tensor:
        """k with |R_h| <= k_h |d_h|, nondecreasing in the reach."""


@dataclass(frozen=True)
class QuadraticForm:
    """H -> <H, C H> with C >= 0, C of them for each of B. `largest` (C, B) is never below lambda_max(C), `rounding`
    (C, B) never below |fl(C v) - C v| / |v|, the coefficients of C being the numbers that they are."""

    apply: Callable[[Tensor], Tensor]  # v (C, B, *x) -> C v
    largest: Tensor
    constant: Tensor | float = 0.0  # (C, B), what a remainder can cost besides
    rounding: Tensor | float = math.inf


class Forms(Protocol):
    """The remainder R = B r of a module around one clean batch, in quadratic forms of the change H of its input. They
    hold while every functional <a, H> of some, one an entry of (B, ...), stays within its `reach`. An entry may stand
    for any other function of H that is at most |a| |H|."""

    @property
    def shared(self) -> bool:
        """Whether the functionals are those of every image, and all of them have an a."""
        ...

    @property
    def sizes(self) -> Tensor:
        """|a| of all functionals, to be broadcast."""
        ...

    @property
    def slack(self) -> Tensor:
        """Never below |fl(<a, v>) - <a, v>| / |v|, to be broadcast."""
        ...

    @property
    def spread_rounding(self) -> Tensor | float:
        """Never below |fl(B r) - B r| / |r|, and the same of B^T; (B,) or one number."""
        ...

    def squares(self, probes: Tensor) -> Tensor:
        """sum_m <a, v_m>^2 for vectors v (M, B, *x): (B, ...); infinite where there is no a, only its size."""
        ...

    def of_gradient(self, g: Tensor, reach: Tensor) -> QuadraticForm:
        """g (C, B, *y): -<g, R(H)> <= <H, C H> / 2 + constant, for every smaller reach too."""
        ...

    def of_rest(self, reach: Tensor, weight: Tensor) -> QuadraticForm:
        """|weight r(H)|^2 <= <H, C H>, weight (B, ...) >= 0 entry by entry; one for each of B. For every
        smaller reach too."""
        ...

    def size(self, reach: Tensor) -> Tensor:
        """About |r|, entry by entry: an estimate, which chooses weights."""
        ...

    def shrink(self, small: Tensor, large: Tensor) -> Tensor:
        """Of two reaches, small <= large: t (B,), at most 1, with |r(H)|^2 <= t <H, C H> within the small one, for the
        form C that `of_rest` makes for the large one."""
        ...

    def spread(self, r: Tensor) -> Tensor:
        """B r, r (C, B, ...)."""
        ...

    def collect(self, g: Tensor) -> Tensor:
        """B^T g, g (C, B, *y)."""
        ...


@dataclass(frozen=True)
class Expansion:
    """f around one clean batch. A rule gives J v too where that is cheaper than transposing J^T g, and J J^T v where it
    is cheaper than both."""

    y: Tensor
    gain_B: Tensor
    beta: Bound
    remainder: Callable[[Tensor], Bound]
    pull: Callable[[Tensor], Tensor]  # g (C, B, *y) -> J^T g (C, B, *x)
    own_push: Callable[[Tensor], Tensor] | None = None
    own_gram: Callable[[Tensor], Tensor] | None = None
    affine: bool = False  # no remainder
    rounding_B: Tensor | None = None  # never below |fl(J v) - J v| / |v|, and the same of J^T g; None: not known
    forms: Forms | None = None
    parts: tuple["Expansion", ...] = ()  # of a composition, in their order; and whether the input is added to it
    skip: bool = False

    def push(self, v: Tensor) -> Tensor:
        """v (C, B, *x) -> J v (C, B, *y)."""
        if self.own_push is not None:
            return self.own_push(v)
        g = self.y.new_zeros(len(v), *self.y.shape)  # any point will do: J^T g is linear in g
        return torch.func.vjp(self.pull, g)[1](v)[0]

    @property
    def rounding(self) -> Tensor:
        """`rounding_B`, infinite where nothing is known."""
        return torch.full_like(self.gain_B, torch.inf) if self.rounding_B is None else self.rounding_B

    def gram(self, v: Tensor) -> Tensor:
        """v (C, B, *y) -> J J^T v."""
        return self.push(self.pull(v)) if self.own_gram is None else self.own_gram(v)


Expand = Callable[[Tensor], Expansion]
"""x (B, ...), clean inputs -> the second order around them."""
Node = tuple[Layer, Expand]
"""One step of the chain of a model: how its radius grows, and its second order."""
Error = Callable[[Tensor, Tensor], Tensor]  # r (B,), e (B,) -> e (B,)


@dataclass(frozen=True)
class Precision:
    """Unit round-offs: u of the served type, a of its sums."""

    u: float
    sums: float = 2.0**-24

    def gamma(self, k: int) -> float:
        """That of a sum with k roundings."""
        return gamma(k, self.sums)


@dataclass(frozen=True)
class Rounded:
    """One module around a clean batch. rows: the error of a row alone, the last axis of y, where it is known apart."""

    y: Tensor
    radius: Bound
    error: Error
    rows: Error | None = None

    def row_error(self, r: Tensor, e: Tensor) -> Tensor:
        """No row is off by more."""
        return (self.rows or self.error)(r, e)


Rounding = Callable[[Tensor], Rounded]
"""x (B, ...), clean inputs -> how far the served module may be from the float64 one around them."""
