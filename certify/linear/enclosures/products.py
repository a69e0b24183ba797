"""Products of two results, entry by entry or as matrices, by their envelopes (McCormick 1976).

With centres c and reaches r,

    x y  =  c_y x + c_x y - c_x c_y + (x - c_x)(y - c_y),      |(x - c_x)(y - c_y)| <= r_x r_y,

which is the mean of the two planes of the envelope, from either side. With the planes through both ends of x and any
share s of the first,

    x y  >=  s (x_l y + (x - x_l) y_l) + (1 - s) (x_u y + (x - x_u) y_u)
    x y  <=  s (x_l y + (x - x_l) y_u) + (1 - s) (x_u y + (x - x_u) y_l)

A functional of y = P V, where P are weights of a softmax, is a sum of products of two numbers each,

    <A, P V>  =  sum_ij p_ij u_ij,        u_ij = <A_i, v_j>,

and the planes through the lower ends of the weights serve best, because the weights above these share what is left of
their sum 1. The form of V bounds u_ij by less than the boxes of its entries do (forms.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certify.linear.enclosures.softmax import whose
from certify.linear.enclosures.steps import TINY, Back, Box, Free, Shape, rounding_of
from zoo.arithmetic import OUT, gamma

MOST = 2**20  # free shares of one product


@dataclass(frozen=True)
class Product:
    """y = x_1 x_2 (entry by entry, equal shapes), or the matrix product of two tensors with equal leading axes."""

    inputs: tuple[int, ...]
    shape: Shape
    matrices: bool
    terms: int
    weights: bool = False  # whether x_1 are weights of a softmax, of matrices
    tight: bool = False

    def formed(self, pixels: int, *boxes: Box) -> tuple[int, Tensor] | None:
        p, y = boxes
        return whose(self.inputs[1], p.upper - p.lower, pixels * y.lower[0].numel()) if self.weights else None

    @property
    def _times(self) -> Callable[[Tensor, Tensor], Tensor]:
        return torch.matmul if self.matrices else torch.mul

    def value(self, *xs: Tensor) -> Tensor:
        return self._times(xs[0], xs[1])

    def box(self, *boxes: Box) -> Box:
        x, y = boxes
        middle = self._times(x.centre, y.centre)
        spread = (
            self._times(x.reach, y.centre.abs()) + self._times(x.centre.abs(), y.reach) + self._times(x.reach, y.reach)
        )
        off = (spread + gamma(self.terms + 16) * self._times(x.size, y.size)) * OUT + TINY
        found = Box(middle - off, middle + off)
        if self.matrices:
            return found
        corners = torch.stack([a * b for a in (x.lower, x.upper) for b in (y.lower, y.upper)])
        out = gamma(4) * corners.abs().amax(0) + TINY
        return found.meet(Box(corners.amin(0) - out, corners.amax(0) + out))

    def needs(self, box: Box) -> Tensor:
        return torch.ones_like(box.lower, dtype=torch.bool)

    def relaxed(self, *boxes: Box) -> "Sums | Entries":
        share = 1.0 if self.weights else 0.5
        return (Sums if self.matrices else Entries)(boxes[0], boxes[1], self._times, self.terms, share)


@dataclass(frozen=True)
class Envelope:
    """The planes through the lower ends of x with a share, and those through the upper ends with the rest."""

    x: Box
    y: Box
    times: Callable[[Tensor, Tensor], Tensor]
    terms: int
    share: float

    @cached_property
    def _size(self) -> Tensor:
        """Above the sum of all terms."""
        return 4 * self.times(self.x.size, self.y.size)

    def free(self, batch: int, rows: int) -> Free:
        """Return the shares s, one of every product of two numbers."""
        shape = torch.Size((batch, rows, *self.x.lower.shape[1:]))
        return () if shape.numel() > MOST else (self.x.lower.new_full(shape, self.share),)

    def _parts(self, u_l: Tensor, u_u: Tensor, free: Free) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors of x and u in the bound of <x, u>, (B, R, *shape of x), and its constant."""
        x_l, x_u = self.x.lower.unsqueeze(1), self.x.upper.unsqueeze(1)
        s = free[0] if free else self.share
        const = -(s * x_l * u_l + (1 - s) * x_u * u_u).flatten(2).sum(-1)
        return u_u - s * (u_u - u_l), x_u - s * (x_u - x_l), const


@dataclass(frozen=True)
class Entries(Envelope):
    """A product entry by entry: u = a y."""

    def back(self, a: Tensor, free: Free = ()) -> Back:
        one, other = a * self.y.lower.unsqueeze(1), a * self.y.upper.unsqueeze(1)
        part, x, const = self._parts(torch.minimum(one, other), torch.maximum(one, other), free)
        return Back((part, x * a), const, rounding_of(a, self._size, 8 + a[0, 0].numel()))


@dataclass(frozen=True)
class Sums(Envelope):
    """A product of matrices: u_ij = <a_i, y_j>."""

    def back(self, a: Tensor, free: Free = ()) -> Back:
        part, x, const = self._parts(*self._ends(a), free)
        terms = 4 * self.terms + self.x.lower[0].numel()
        return Back((part, x.mT @ a), const, rounding_of(a, self._size, terms))

    def _ends(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of u, (B, R, ..., I, J)."""
        y_l, y_u, size = (t.mT.unsqueeze(1) for t in (self.y.lower, self.y.upper, self.y.size))
        above, below = a.clamp(min=0), a.clamp(max=0)
        off = gamma(2 * a.shape[-1] + 8) * OUT * (a.abs() @ size) + TINY
        low, high = above @ y_l + below @ y_u - off, above @ y_u + below @ y_l + off
        if self.y.form is None:
            return low, high
        low_f, high_f = self.y.form.sums(a)
        return torch.fmax(low, low_f), torch.fmin(high, high_f)
