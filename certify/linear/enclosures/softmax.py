"""The softmax of a row of scores, enclosed between planes on a box of scores (Wei et al. 2023, arXiv 2303.01713).

    p_i = 1 / y,     y = sum_j e^{t_j},     t_j = s_j - s_i in [lo_j, hi_j],   t_i = 0

From below: y <= sum_j chord_j(t_j), and 1/y is convex, so its tangent at any y_0 > 0 bounds it. From above: log p_i =
-log y is concave and lies between its values at the corners, where e^. is below its chord; then -log y is below its
tangent at the centre. As sum_i p_i = 1,

    sum_i a_i p_i = c + sum_i (a_i - c) p_i

for any c; of three choices of c the one with the larger bound on the box is taken.

Letters: N scores of a row, i the weight, j the score.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certify.linear.enclosures.steps import TINY, Back, Box, Free, Shape, inner, rounding_of
from zoo.arithmetic import OUT, U, gamma

OPEN, MOST = 1.5e-7, 2**25  # uncertain share of the sum 1 for each slope of a form; most slopes


@dataclass(frozen=True)
class Softmax:
    """p = softmax(s) over the last axis."""

    inputs: tuple[int, ...]
    shape: Shape
    tight: bool = True

    def value(self, *xs: Tensor) -> Tensor:
        return xs[0].softmax(-1)

    def box(self, *boxes: Box) -> Box:
        """Return the exact range of every weight: its own score at one end, all others at the other end."""
        return _range(*_differences(boxes[0]))

    def needs(self, box: Box) -> Tensor:
        return torch.ones_like(box.lower, dtype=torch.bool)

    def formed(self, pixels: int, *boxes: Box) -> tuple[int, Tensor] | None:
        p = self.box(*boxes)
        return whose(self.inputs[0], p.upper - p.lower, pixels * boxes[0].lower[0].numel())

    def relaxed(self, *boxes: Box) -> "Planes":
        return _planes(boxes[0])


def whose(number: int, open_: Tensor, slopes: int) -> tuple[int, Tensor] | None:
    """Return for which images weights are open by so much that a form of so many slopes pays, beside its number."""
    pays_B = open_.sum(-1).flatten(1).mean(1) > OPEN * slopes
    return (number, pays_B) if len(pays_B) * slopes <= MOST and bool(pays_B.any()) else None


def _range(lo: Tensor, hi: Tensor) -> Box:
    off = gamma(3 * lo.shape[-1] + 200)
    return Box(((1 - off) / hi.exp().sum(-1) - TINY).clamp_min(0), ((1 + off) / lo.exp().sum(-1) + TINY).clamp_max(1))


def _differences(s: Box) -> tuple[Tensor, Tensor]:
    """Return lo and hi (..., N_i, N_j), rounded outwards; 0 for j = i."""
    own = torch.eye(s.lower.shape[-1], dtype=torch.bool, device=s.lower.device)
    out = 4 * U * (s.size.unsqueeze(-1) + s.size.unsqueeze(-2))
    lo = s.lower.unsqueeze(-2) - s.upper.unsqueeze(-1) - out
    hi = s.upper.unsqueeze(-2) - s.lower.unsqueeze(-1) + out
    if s.form is not None:
        low, high = s.form.differences()
        lo, hi = torch.fmax(lo, low), torch.fmin(hi, high)
    return lo.masked_fill(own, 0), hi.masked_fill(own, 0)


@dataclass(frozen=True)
class Planes:
    """Planes p_i >= at_i + sum_j slope_ij (s_j - centre_j), and <= with those of `upper`; (B, ..., N_i [, N_j])."""

    box: Box
    lower: tuple[Tensor, Tensor]
    upper: tuple[Tensor, Tensor]

    @cached_property
    def _size(self) -> Tensor:
        """(B, ..., N_i): of the terms of both planes, and of the weight itself."""
        far = (self.box.size + self.box.centre.abs()).unsqueeze(-1)
        (at, slope), (at_u, slope_u) = self.lower, self.upper
        steep = torch.maximum(slope.abs(), slope_u.abs())
        return torch.maximum(at.abs(), at_u.abs()) + (steep @ far).squeeze(-1) + 1

    def free(self, batch: int, rows: int) -> Free:
        """Return the place of c around the best of three, by rows of scores."""
        shape = (batch, rows, self.box.lower[0, ..., 0].numel(), 1)
        return (self.box.lower.new_full(shape, 0.5),)

    def back(self, a: Tensor, free: Free = ()) -> Back:
        n, count = a.shape[-1], len(self.box.lower)
        rows = a.reshape(*a.shape[:2], -1, n).transpose(1, 2)  # (B, L, R, N), L rows of scores: a matrix product each
        at, at_u, reach = (t.reshape(count, -1, n) for t in (self.lower[0], self.upper[0], self.box.reach))
        slope, slope_u = (t.reshape(count, -1, n, n) for t in (self.lower[1], self.upper[1]))
        reach = reach.unsqueeze(2)
        middle = (at + at_u).unsqueeze(2)
        shares = middle / middle.sum(-1, keepdim=True)
        low, high, mean = rows.amin(-1, True), rows.amax(-1, True), (rows * shares).sum(-1, True)
        by_lower, by_upper = rows @ slope, rows @ slope_u
        least, most = slope.sum(-2).unsqueeze(2), slope_u.sum(-2).unsqueeze(2)
        above = (rows - mean).clamp(min=0)
        at, at_u = at.unsqueeze(2), at_u.unsqueeze(2)
        c, part, const = _better(
            reach,
            (low, by_lower - low * least, ((rows - low) * at).sum(-1, True)),
            (high, by_upper - high * most, ((rows - high) * at_u).sum(-1, True)),
            (
                mean,
                by_upper - mean * most + above @ (slope - slope_u),
                (above * (at - at_u) + (rows - mean) * at_u).sum(-1, True),
            ),
        )
        if free:
            c = c.detach() + (2 * free[0].transpose(1, 2) - 1) * (high - low)
            above = (rows - c).clamp(min=0)
            part = by_upper - c * most + above @ (slope - slope_u)
            const = (above * (at - at_u) + (rows - c) * at_u).sum(-1, True)
        part = part.transpose(1, 2).reshape(a.shape)
        total = (const + c).sum((1, 3)) - inner(part, self.box.centre)
        moduli = (rows.abs() + c.abs()).transpose(1, 2)
        return Back((part,), total, rounding_of(moduli, self._size, 8 * n))


def _better(reach: Tensor, *tried: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the shift, slopes and constant of the largest bound on the box, row by row."""
    worth = torch.stack([const + c - (part.abs() * reach).sum(-1, keepdim=True) for c, part, const in tried])
    best = worth.nan_to_num(-torch.inf).argmax(0)
    return tuple(
        torch.where(best == 0, first, torch.where(best == 1, second, third))
        for first, second, third in zip(*tried, strict=True)
    )


def _planes(s: Box) -> Planes:
    n = s.lower.shape[-1]
    lo, hi = _differences(s)
    own = torch.eye(n, dtype=torch.bool, device=lo.device)
    t, d = (lo + hi) / 2, s.centre.unsqueeze(-2) - s.centre.unsqueeze(-1)
    t = torch.minimum(torch.maximum(t, lo), hi)
    width = hi - lo
    e_lo, e_hi, e_t = lo.exp(), hi.exp(), t.exp()
    eta = gamma(3 * n + 400)
    reach = s.reach.unsqueeze(-2) + s.reach.unsqueeze(-1) + t.abs() + d.abs()
    # from below: chords of e^t, tangent of 1 / y
    rise = torch.where(width > 1, e_hi - e_lo, e_lo * torch.expm1(width.clamp(max=1)))  # without cancellation
    chord = torch.where(width > 0, rise / torch.where(width > 0, width, 1.0), e_t)
    y_0 = (e_lo + chord * (t - lo)).sum(-1)
    steep = (chord / y_0.square().unsqueeze(-1)).masked_fill(own, 0)
    off = 8 * eta * (1 / y_0 + (steep * (reach + width)).sum(-1)) * OUT + TINY
    lower = (1 / y_0 - (steep * (d - t)).sum(-1) - off, _per_score(-steep))
    # from above: chord of e^g, tangent of g = -log y
    y_lo, y_hi, y_t = e_lo.sum(-1), e_hi.sum(-1), e_t.sum(-1)
    ratio = (y_hi / y_lo).log()
    narrow = ratio <= 1e-6
    kappa = torch.where(narrow, 1 / y_lo, (1 / y_lo - 1 / y_hi) / torch.where(narrow, 1.0, ratio))
    # on a narrow range any slope serves, with the larger of the two shifts at the ends
    g_lo, g_hi, g_t = -y_hi.log(), -y_lo.log(), -y_t.log()
    shift = torch.maximum(1 / y_hi - kappa * g_lo, 1 / y_lo - kappa * g_hi)
    steep_u = (kappa.unsqueeze(-1) * e_t / y_t.unsqueeze(-1)).masked_fill(own, 0)
    size = 1 / y_lo + kappa * (g_lo.abs() + g_hi.abs() + g_t.abs() + 1)
    off_u = 8 * eta * (size + (steep_u * (reach + width)).sum(-1)) * OUT + TINY
    upper = (shift + kappa * g_t - (steep_u * (d - t)).sum(-1) + off_u, _per_score(-steep_u))
    whole = _range(lo, hi)
    return Planes(s, _or_constant(*lower, whole.lower), _or_constant(*upper, whole.upper))


def _or_constant(at: Tensor, slope: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the plane, or the end of the range where exponentials overflow."""
    finite = at.isfinite() & slope.isfinite().all(-1)
    return torch.where(finite, at, end), torch.where(finite.unsqueeze(-1), slope, 0.0)


def _per_score(slope: Tensor) -> Tensor:
    """Return slopes in s_j from those in t_j = s_j - s_i, which are 0 for j = i."""
    return slope - torch.diag_embed(slope.sum(-1))
