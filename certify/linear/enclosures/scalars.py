"""Functions of one number, enclosed between two lines on an interval.

    a z + b <= f(z) <= a' z + b'        for l <= z <= u

A slope a is free; the best b is the minimum of f(z) - a z. On a grid l = z_0 < ... < z_G = u that contains the kinks,

    f(z) - a z  >=  min_k (f(z_k) - a z_k) - h^2 / 8 sup |f''|,      h = (u - l) / K for K equal parts,

as a function on a cell is never below its chord by more than h^2 / 8 sup f''. Without curvature between kinks this is
exact. Slopes are those of the chord, of the lines through either end that touch f, and of the tangent at the centre;
the one with the least area is taken, which for ReLU is CROWN's choice. A convex f has its chord and a tangent.

Proof: docs/proofs.md#linear-bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certify.linear.enclosures.steps import TINY, Back, Box, Free, Shape, inner, inner_of_rows, rounding_of
from zoo.arithmetic import OUT, U

PARTS = 32  # of an interval on which f is curved
LIBM = 160 * U  # of activations, relative to the larger of |z| and |f| (zoo/bounds/float_error.py)


@dataclass(frozen=True)
class Scalar:
    """The known facts of f: its slopes lie in `slopes`, its kinks at `kinks`, elsewhere |f''| <= curvature."""

    f: Callable[[Tensor], Tensor]
    slopes: tuple[float, float]
    kinks: tuple[float, ...] = ()
    curvature: float = 0.0


@dataclass(frozen=True)
class Convex:
    """A convex f >= 0 with its derivative, computed to LIBM |f|. If it is not monotone, its minimum is f(0) = 0."""

    f: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    monotone: bool = True


@dataclass(frozen=True)
class Lines:
    """Both lines of every entry, (B, *shape); without curvature, the points on which the shift of any slope depends."""

    lower: tuple[Tensor, Tensor]
    upper: tuple[Tensor, Tensor]
    box: Box
    grid: "Grid | None" = None

    @cached_property
    def size(self) -> Tensor:
        (a, b), (c, d) = self.lower, self.upper
        return torch.maximum(a.abs(), c.abs()) * self.box.size + torch.maximum(b.abs(), d.abs())

    def free(self, batch: int, rows: int) -> Free:
        """Return the place of both slopes within those of f."""
        if self.grid is None:
            return ()
        least, most = self.grid.slopes
        places = [(line[0] - least) / (most - least) for line in (self.lower, self.upper)]
        return tuple(place.unsqueeze(1).expand(batch, rows, *place.shape[1:]).clone() for place in places)

    def gap(self, a: Tensor, z: Tensor, y: Tensor, free: Free) -> Tensor:
        """Return what the bound of a y leaves at y = f(z), entry by entry; a (B, *shape), parameters (B, 1, *shape)."""
        assert self.grid is not None
        slope, shift = (t.squeeze(1) for t in self.grid.line(a.unsqueeze(1), *free))
        return a * (y - slope * z - shift)

    def back(self, a: Tensor, free: Free = ()) -> Back:
        if self.grid is not None and free:
            slope, shift = self.grid.line(a, *free)
            return Back((a * slope,), inner_of_rows(a, shift), rounding_of(a, self.grid.size, 2))
        above, below = a.clamp(min=0), a.clamp(max=0)
        (slope, shift), (slope_u, shift_u) = self.lower, self.upper
        part = above * slope.unsqueeze(1) + below * slope_u.unsqueeze(1)
        return Back((part,), inner(above, shift) + inner(below, shift_u), rounding_of(a, self.size, 0))


@dataclass(frozen=True)
class Grid:
    """Ends and kinks z_k, f(z_k), the rounding of both, (B, *shape [, K]), and the range of the slopes."""

    z: Tensor
    y: Tensor
    off: Tensor
    slopes: tuple[float, float]

    def line(self, a: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return slopes and shifts of lines below f where a >= 0 and above it elsewhere, (B, R, *shape)."""
        least, most = self.slopes
        below = a >= 0
        slope = least + (most - least) * torch.where(below, low, high)
        rest = self.y.unsqueeze(1) - slope.unsqueeze(-1) * self.z.unsqueeze(1)
        off = self.off.unsqueeze(1)
        return slope, torch.where(below, rest.amin(-1) - off, rest.amax(-1) + off)

    @cached_property
    def size(self) -> Tensor:
        """Above the sum of the moduli of a line's terms."""
        steep = max(map(abs, self.slopes))
        return 2 * steep * self.z.abs().amax(-1) + self.y.abs().amax(-1) + self.off


@dataclass(frozen=True)
class Elementwise:
    """y = f(x), entry by entry."""

    inputs: tuple[int, ...]
    shape: Shape
    f: Scalar | Convex
    tight: bool = True

    def value(self, *xs: Tensor) -> Tensor:
        return self.f.f(xs[0])

    def box(self, *boxes: Box) -> Box:
        return _range(self.f, boxes[0]) if isinstance(self.f, Scalar) else _convex_range(self.f, boxes[0])

    def needs(self, box: Box) -> Tensor:
        """Return all entries, or those with a kink inside if f is linear elsewhere."""
        if isinstance(self.f, Convex) or self.f.curvature:
            return torch.ones_like(box.lower, dtype=torch.bool)
        inside = [~((kink <= box.lower) | (kink >= box.upper)) for kink in self.f.kinks]
        return torch.stack(inside).any(0)

    def formed(self, pixels: int, *boxes: Box) -> tuple[int, Tensor] | None:
        return None

    def relaxed(self, *boxes: Box) -> Lines:
        return _lines(self.f, boxes[0]) if isinstance(self.f, Scalar) else _convex_lines(self.f, boxes[0])


def _grid(f: Scalar, box: Box) -> tuple[Tensor, Tensor, Tensor]:
    """Return z_k and f(z_k) along a new last axis, and by how much f may leave a cell's chord, rounding included."""
    low, high = box.lower.unsqueeze(-1), box.upper.unsqueeze(-1)
    parts = PARTS if f.curvature else 1
    share = torch.arange(parts + 1, dtype=low.dtype, device=low.device) / parts
    kinks = [low.new_tensor(kink).clamp(low, high) for kink in f.kinks]
    z = torch.cat([low + (high - low) * share[:-1], high, *kinks], -1)
    z = torch.minimum(torch.maximum(z, low), high).sort(-1).values
    y = f.f(z)
    cell = ((high - low) / parts + 4 * U * torch.maximum(high.abs(), low.abs())).square() * (f.curvature / 8 * OUT)
    rounding = LIBM * torch.maximum(z.abs(), y.abs()).amax(-1, keepdim=True)
    return z, y, (cell + rounding).squeeze(-1) + TINY


def _range(f: Scalar, box: Box) -> Box:
    _, y, off = _grid(f, box)
    return Box(y.amin(-1) - off, y.amax(-1) + off)


def _lines(f: Scalar, box: Box) -> Lines:
    z, y, off = _grid(f, box)
    steep = max(map(abs, f.slopes))
    off = off + 4 * U * steep * box.size
    from_low = _slopes(z[..., 1:] - z[..., :1], y[..., 1:] - y[..., :1], f.slopes)
    from_high = _slopes(z[..., -1:] - z[..., :-1], y[..., -1:] - y[..., :-1], f.slopes)
    middle = z.shape[-1] // 2
    around = slice(max(middle - 1, 0), middle + 2)
    tangent = _slopes(z[..., around].diff(), y[..., around].diff(), f.slopes)[1]
    (least_l, most_l), (least_u, most_u) = from_low, from_high
    chord = _slopes(z[..., -1:] - z[..., :1], y[..., -1:] - y[..., :1], f.slopes)[0]
    below = [_shifted(z, y, off, slope) for slope in (chord, least_l, most_u, tangent)]
    above = [_shifted(z, -y, off, -slope) for slope in (chord, most_l, least_u, tangent)]
    (a, b), (c, d) = _best(below), _best(above)
    return Lines((a, b), (-c, -d), box, None if f.curvature else Grid(z, y, off, f.slopes))


def _slopes(run: Tensor, rise: Tensor, within: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return the least and the largest quotient; any slope of f where there is none."""
    quotient = rise / run
    low = torch.where(run > 0, quotient, torch.inf).amin(-1).clamp(*within)
    return low, torch.where(run > 0, quotient, -torch.inf).amax(-1).clamp(*within)


def _shifted(z: Tensor, y: Tensor, off: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a slope, the b of a line below f with it, and the area between them."""
    rest = y - slope.unsqueeze(-1) * z
    b = rest.amin(-1) - off
    width = z[..., 1:] - z[..., :-1]
    return slope, b, ((rest[..., 1:] + rest[..., :-1]) / 2 * width).sum(-1) - b * (z[..., -1] - z[..., 0])


def _best(lines: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    slope, b, area = (torch.stack(parts) for parts in zip(*lines, strict=True))
    best = area.nan_to_num(torch.inf).argmin(0, keepdim=True)
    return slope.gather(0, best).squeeze(0), b.gather(0, best).squeeze(0)


def _convex_range(f: Convex, box: Box) -> Box:
    at_l, at_u = f.f(box.lower), f.f(box.upper)
    high = torch.maximum(at_l, at_u)
    low = torch.minimum(at_l, at_u)
    if not f.monotone:
        low = torch.where((box.lower <= 0) & (box.upper >= 0), 0.0, low)
    return Box((low - LIBM * low.abs() - TINY).clamp_min(0), high + LIBM * high.abs() + TINY)


def _convex_lines(f: Convex, box: Box) -> Lines:
    """Return the tangent at the centre and the chord."""
    low, high, m = box.lower, box.upper, box.centre
    at_l, at_u, at_m = f.f(low), f.f(high), f.f(m)
    a, wide = f.slope(m), high > low
    off = 4 * LIBM * (at_m.abs() + a.abs() * (box.reach + m.abs())) + TINY
    c = torch.where(wide, (at_u - at_l) / torch.where(wide, high - low, 1.0), a)
    d = torch.maximum(at_l - c * low, at_u - c * high)
    off_u = 4 * LIBM * (torch.maximum(at_l.abs(), at_u.abs()) + c.abs() * box.size) + TINY
    return Lines((a, at_m - a * m - off), (c, d + off_u), box)
