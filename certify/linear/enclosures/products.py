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
from certify.linear.enclosures.steps import TINY, Back, Box, Free, Shape, inner, inner_of_rows, rounding_of
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
        return whose(self.inputs[1], boxes[0], pixels * boxes[1].lower[0].numel()) if self.weights else None

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

    def relaxed(self, *boxes: Box) -> "MeanPlanes | LowPlanes":
        kind = LowPlanes if self.weights else MeanPlanes
        return kind(boxes[0], boxes[1], self._times, self.matrices, self.terms)


@dataclass(frozen=True)
class Envelope:
    """The planes of a product on two boxes, and the size of all its terms."""

    x: Box
    y: Box
    times: Callable[[Tensor, Tensor], Tensor]
    matrices: bool
    terms: int
    share: float = 0.5

    @cached_property
    def _size(self) -> Tensor:
        return 4 * self.times(self.x.size, self.y.size)

    def free(self, batch: int, rows: int) -> Free:
        """Return the shares s, one of every product of two numbers."""
        x, y = self.x.lower, self.y.lower
        shape = (*x.shape, y.shape[-1]) if self.matrices else x.shape
        shape = torch.Size((batch, rows, *shape[1:]))
        return () if shape.numel() > MOST else (x.new_full(shape, self.share),)

    def by_shares(self, a: Tensor, s: Tensor) -> Back:
        """Return the bound with both planes mixed by the shares (B, R, ...)."""
        (x_l, x_u), (y_l, y_u) = ((box.lower.unsqueeze(1), box.upper.unsqueeze(1)) for box in (self.x, self.y))
        above, below = a.clamp(min=0), a.clamp(max=0)
        if self.matrices:
            part_x, part_y = above @ y_u.mT + below @ y_l.mT, x_u.mT @ a
            x_l, x_u, y_l, y_u = x_l.unsqueeze(-1), x_u.unsqueeze(-1), y_l.unsqueeze(-3), y_u.unsqueeze(-3)
            above, below = above.unsqueeze(-2), below.unsqueeze(-2)
        else:
            part_x, part_y = above * y_u + below * y_l, a * x_u
        first, last = s * above, s * below
        less_x, less_y = (first - last) * (y_u - y_l), (first + last) * (x_u - x_l)
        if self.matrices:
            less_x, less_y = less_x.sum(-1), less_y.sum(-3)
        const = inner_of_rows(first, x_u * y_u - x_l * y_l) + inner_of_rows(last, x_u * y_l - x_l * y_u)
        const = const - inner(a.clamp(min=0), self._ends[0]) - inner(a.clamp(max=0), self._ends[1])
        return Back(
            (part_x - less_x, part_y - less_y), const, rounding_of(a, 3 * self._size, 4 * self.terms + s[0, 0].numel())
        )

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        return self.times(self.x.upper, self.y.upper), self.times(self.x.upper, self.y.lower)


@dataclass(frozen=True)
class MeanPlanes(Envelope):
    """The means of both planes on either side."""

    share: float = 0.5

    @cached_property
    def _middle(self) -> tuple[Tensor, Tensor]:
        """The product of the centres and that of the reaches, rounded up."""
        rest = self.times(self.x.reach, self.y.reach) * (1 + gamma(self.terms + 4)) * OUT
        return self.times(self.x.centre, self.y.centre), rest

    def back(self, a: Tensor, free: Free = ()) -> Back:
        if free:
            return self.by_shares(a, *free)
        c_x, c_y = self.x.centre.unsqueeze(1), self.y.centre.unsqueeze(1)
        middle, rest = self._middle
        parts = (a @ c_y.mT, c_x.mT @ a) if self.matrices else (a * c_y, a * c_x)
        return Back(parts, -inner(a, middle) - inner(a.abs(), rest), rounding_of(a, self._size, 2 * self.terms))


@dataclass(frozen=True)
class LowPlanes(Envelope):
    """The planes of p_ij u_ij, through the lower ends of p or with any share of those through the upper ends."""

    def free(self, batch: int, rows: int) -> Free:
        """Return the shares s, one of every weight."""
        return (self.x.lower.new_ones(batch, rows, *self.x.lower.shape[1:]),)

    def back(self, a: Tensor, free: Free = ()) -> Back:
        p_l, p_u = self.x.lower.unsqueeze(1), self.x.upper.unsqueeze(1)
        u_l, u_u = self._sums(a)
        if free:
            s = free[0]
            part, p = u_u - s * (u_u - u_l), p_u - s * (p_u - p_l)
            const = -(s * p_l * u_l + (1 - s) * p_u * u_u).flatten(2).sum(-1)
        else:
            part, p, const = u_l, p_l, -(p_l * u_l).flatten(2).sum(-1)
        return Back((part, p.mT @ a), const, rounding_of(a, self._size, 4 * self.terms + self.x.lower[0].numel()))

    def _sums(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of u, (B, R, ..., I, J)."""
        y_l, y_u, size = (t.mT.unsqueeze(1) for t in (self.y.lower, self.y.upper, self.y.size))
        above, below = a.clamp(min=0), a.clamp(max=0)
        off = gamma(2 * a.shape[-1] + 8) * OUT * (a.abs() @ size) + TINY
        low, high = above @ y_l + below @ y_u - off, above @ y_u + below @ y_l + off
        if self.y.form is None:
            return low, high
        low_f, high_f = self.y.form.sums(a)
        return torch.fmax(low, low_f), torch.fmin(high, high_f)
