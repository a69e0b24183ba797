"""Types of the answers that the rules of a module give: first order, second order, and rounding.

The files that use an answer state its promise: first_order.py, activations.py, curvature.py, rounding.py. Shapes: x (B,
...); g (C, B, ...); r (..., B).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zoo.arithmetic import gamma

Bound = Callable[[Tensor], Tensor]
"""Maps r (..., B), radii of a ball around the input of each image, to a radius around the output, never exceeded."""
Layer = Callable[[Tensor], tuple[Tensor, Bound]]
"""Maps x (B, ...), clean inputs, to their outputs and the bound of how far these move."""
LambdaMax = Callable[[Tensor], Tensor]  # c (P, N, H) -> (P,), never below max(0, max_tokens sum_h c_h d_h^2 / |eta|^2)


class Activation(Protocol):
    """Known properties of a scalar activation sigma.

    `slopes` are the least and the largest slope, rounded outwards. `operations` is the number of operations that
    compute it, as `function` in primitives.py counts them; 0: it chooses between z and constants; None: unknown.
    """

    @property
    def slopes(self) -> tuple[float, float]: ...

    @property
    def operations(self) -> int | None: ...

    def slope(self, z: Tensor) -> Tensor:
        """Return sigma'(z); at a kink, one of the two slopes."""

    def remainder(self, z_PNH: Tensor, w_PNH: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """Return (P,), never below -sum w_h R_h, for a change of the input by at most r."""

    def beta(self, z_PNH: Tensor, s_H: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """Return (P,), never below (sum (s_h R_h)^2)^(1/2)."""

    def parabola(self, z: Tensor, w: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Return (c, s) with -w_h R_h <= c_h d_h^2 / 2 + s_h, both >= 0."""

    def chord(self, z: Tensor, reach: Tensor) -> Tensor:
        """Return k with |R_h| <= k_h |d_h|, nondecreasing in the reach."""


@dataclass(frozen=True)
class QuadraticForm:
    """The form H -> <H, C H> with C >= 0; there are C forms for each of B images.

    `largest` (C, B) is never below lambda_max(C). `rounding` (C, B) is never below |fl(C v) - C v| / |v|, for the
    coefficients of C as they are stored.
    """

    apply: Callable[[Tensor], Tensor]  # v (C, B, *x) -> C v
    largest: Tensor
    constant: Tensor | float = 0.0  # (C, B), an additive cost of the remainder
    rounding: Tensor | float = math.inf


class SignedForm(NamedTuple):
    """A form of either sign, whose `largest` bounds its norm, and one with -absolute <= form <= absolute."""

    form: QuadraticForm
    absolute: QuadraticForm


class Forms(Protocol):
    """The remainder R = B r of a module around one clean batch, as quadratic forms of the change H of its input.

    The forms hold while certain functionals <a, H>, one for each entry of (B, ...), stay within their `reach`. An entry
    may also stand for any other function of H that is at most |a| |H|.
    """

    @property
    def shared(self) -> bool:
        """True if all images have the same functionals and every functional has a vector a."""
        ...

    @property
    def sizes(self) -> Tensor:
        """|a| of all functionals, to be broadcast."""
        ...

    @property
    def slack(self) -> Tensor:
        """A bound, never below |fl(<a, v>) - <a, v>| / |v|, to be broadcast."""
        ...

    @property
    def spread_rounding(self) -> Tensor | float:
        """A bound, never below |fl(B r) - B r| / |r|, and the same for B^T: (B,) or one number."""
        ...

    def squares(self, probes: Tensor) -> Tensor:
        """Return sum_m <a, v_m>^2 for vectors v (M, B, *x): (B, ...).

        The result is infinite for an entry of which only the size is known, not a vector a.
        """
        ...

    def of_gradient(self, g: Tensor, reach: Tensor) -> QuadraticForm:
        """Return the form and constant with -<g, R(H)> <= <H, C H> / 2 + constant, for g (C, B, *y).

        They hold for every smaller reach too.
        """
        ...

    def of_rest(self, reach: Tensor, weight: Tensor) -> QuadraticForm:
        """Return the form and constant with |weight r(H)|^2 <= <H, C H> + constant, one for each image.

        weight (B, ...) >= 0 applies entry by entry. The form holds for every smaller reach too.
        """
        ...

    def signed(self, g: Tensor, reach: Tensor) -> SignedForm:
        """Return a form of either sign with -<g, R(H)> <= <H, C H> / 2 + constant, for g (C, B, *y).

        C is minus the exact second derivative of <g, f> plus what the third order adds, which vanishes with the reach;
        without a rule of third order it is the form of `of_gradient`. It holds for every smaller reach too.
        docs/proofs.md#third-order.
        """
        ...

    @property
    def pooled(self) -> int:
        """The number of last axes of r along which only the length is bounded: the largest weight there counts."""
        ...

    def size(self, reach: Tensor) -> Tensor:
        """Return about |r|, entry by entry: an estimate, used only to choose weights."""
        ...

    def shrink(self, small: Tensor, large: Tensor) -> Tensor:
        """Return t (B,), at most 1: |r(H)|^2 <= t (<H, C H> + constant) within the small reach, for small <= large.

        Form and constant are those that `of_rest` makes for the large reach.
        """
        ...

    def spread(self, r: Tensor) -> Tensor:
        """Return B r, for r (C, B, ...)."""
        ...

    def collect(self, g: Tensor) -> Tensor:
        """Return B^T g, for g (C, B, *y)."""
        ...


class Hessian(Protocol):
    """The second order of f around one clean batch, f(x + H) = f(x) + J H + D^2 f[H, H] / 2 + R_3(H).

    It is for modules whose R has a bound but whose entries of R have none (`Forms`); reaches are those of the forms.
    R_3 also depends on how long certain vectors L_r H get; their reaches are `lengths` (B, R).
    """

    def bilinear(self, u: Tensor, v: Tensor) -> Tensor:
        """Return D^2 f[u, v] (C, B, *y) for vectors (C, B, *x)."""
        ...

    @property
    def bilinear_rounding(self) -> Tensor:
        """A bound, never below |fl(D^2 f[u, v]) - D^2 f[u, v]| / (|u| |v|): (B,)."""
        ...

    def rows(self, v: Tensor) -> Tensor:
        """Return all L_r v (C, B, R, K) for vectors (C, B, *x)."""
        ...

    @property
    def rows_rounding(self) -> Tensor:
        """A bound, never below |fl(L_r v) - L_r v| / |v|: (B,)."""
        ...

    def of_third(self, reach: Tensor, lengths: Tensor, weight: Tensor) -> QuadraticForm:
        """Return the form with |weight R_3(H)|^2 <= <H, C H>, one for each image; infinite where none is known.

        It holds for smaller reaches and lengths too.
        """
        ...

    def shrink_third(self, share: Tensor) -> Tensor:
        """Return t (B,) with |weight R_3(H)|^2 <= t <H, C H> where all reaches and lengths are `share` times as large.

        C is the form for the larger ones, and `share` (B,) at most 1.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """The second order of f around one clean batch.

    A rule also gives J v where that is cheaper than transposing J^T g, and J J^T v where it is cheaper than both.
    """

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
    hessian: Hessian | None = None
    parts: tuple["Expansion", ...] = ()  # of a composition, in order
    branches: tuple[tuple["Expansion", ...], ...] = ()  # the two compositions of a sum; an empty one is the identity

    @staticmethod
    def without_remainder(
        *,
        y: Tensor,
        gain_B: Tensor,
        pull: Callable[[Tensor], Tensor],
        own_push: Callable[[Tensor], Tensor],
        rounding_B: Tensor,
        own_gram: Callable[[Tensor], Tensor] | None = None,
    ) -> "Expansion":
        """Return the expansion of an affine map."""
        return Expansion(
            y=y,
            gain_B=gain_B,
            beta=torch.zeros_like,
            remainder=lambda g: torch.zeros_like,
            pull=pull,
            own_push=own_push,
            own_gram=own_gram,
            affine=True,
            rounding_B=rounding_B,
        )

    def push(self, v: Tensor) -> Tensor:
        """Return J v (C, B, *y) for v (C, B, *x)."""
        if self.own_push is not None:
            return self.own_push(v)
        g = self.y.new_zeros(len(v), *self.y.shape)  # any point serves, because J^T g is linear in g
        return torch.func.vjp(self.pull, g)[1](v)[0]

    @property
    def rounding(self) -> Tensor:
        """`rounding_B`, infinite where nothing is known."""
        return torch.full_like(self.gain_B, torch.inf) if self.rounding_B is None else self.rounding_B

    def gram(self, v: Tensor) -> Tensor:
        """Return J J^T v for v (C, B, *y)."""
        return self.push(self.pull(v)) if self.own_gram is None else self.own_gram(v)


Expand = Callable[[Tensor], Expansion]
"""Maps x (B, ...), clean inputs, to the second order around them."""
Node = tuple[Layer, Expand]
"""One step of a model's chain: its first-order rule and its second order."""
Error = Callable[[Tensor, Tensor], Tensor]  # r (B,), e (B,) -> e (B,)


@dataclass(frozen=True)
class Precision:
    """Unit round-offs: u of the served type, a (`sums`) of its sums."""

    u: float
    sums: float = 2.0**-24

    def gamma(self, k: int) -> float:
        """Return the relative error of a sum with k roundings."""
        return gamma(k, self.sums)


@dataclass(frozen=True)
class Rounded:
    """The rounding of one module around a clean batch.

    `rows` bounds the error of a single row, the last axis of y, where a separate bound is known.
    """

    y: Tensor
    radius: Bound
    error: Error
    rows: Error | None = None

    def row_error(self, r: Tensor, e: Tensor) -> Tensor:
        """Return a bound of the error of every single row."""
        return (self.rows or self.error)(r, e)


Rounding = Callable[[Tensor], Rounded]
"""Maps x (B, ...), clean inputs, to how far the served module may be from the float64 one around them."""
