"""Enclosures hold in exact arithmetic: what is added for rounding covers it, at the points where planes touch."""

from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from mpmath import mp
from torch import Tensor, nn

from certify.linear.enclosures.products import Product
from certify.linear.enclosures.scalars import LIBM, Elementwise
from certify.linear.enclosures.softmax import Softmax
from certify.linear.enclosures.steps import Box, Step
from certify.linear.functions import EXP, RECIPROCAL, RSQRT, SQUARE, known

SEED = 3
Exact = Callable[[list[Any]], Any]


def boxes(n: int, count: int, seed: int, far: float = 6, wide: float = 12) -> Box:
    """Return boxes of widths from 1e-12 to 30 around numbers of up to 10^(far / 2)."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (far * torch.rand(count, 1, generator=generator, dtype=torch.float64) - far / 2)
    lower = scale * torch.randn(count, n, generator=generator, dtype=torch.float64)
    width = 10 ** (1.5 - wide * torch.rand(count, n, generator=generator, dtype=torch.float64))
    return Box(lower, lower + width)


def row(box: Box) -> Box:
    return Box(box.lower.unsqueeze(-2), box.upper.unsqueeze(-2))


def column(box: Box) -> Box:
    return Box(box.lower.unsqueeze(-1), box.upper.unsqueeze(-1))


def points(box: Box, seed: int) -> list[Tensor]:
    """Return the centre, corners and inner points."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(4, *box.lower.shape, generator=generator, dtype=torch.float64)
    share[:2] = share[:2].round()
    inner = [box.lower + s * (box.upper - box.lower) for s in share]
    return [torch.minimum(torch.maximum(x, box.lower), box.upper) for x in (box.centre, *inner)]


def exact_gaps(step: Step, given: tuple[Box, ...], exact: Exact, seed: int) -> list[Any]:
    """Return <a, y> minus its bound in exact arithmetic, for every row and point; exact: all entries of x -> y."""
    generator = torch.Generator().manual_seed(seed)
    count = len(given[0].lower)
    a = torch.randn(count, 1, *step.shape, generator=generator, dtype=torch.float64)
    back = step.relaxed(*given).back(a)
    gaps = []
    for xs in zip(*(points(box, seed) for box in given), strict=True):
        for b in range(count):
            x = [mp.mpf(v) for part in xs for v in part[b].flatten().tolist()]
            slopes = [mp.mpf(v) for part in back.parts for v in part[b].flatten().tolist()]
            y = exact(x)
            bound = mp.fdot(slopes, x) + mp.mpf(float(back.const[b])) - mp.mpf(float(back.rounding[b]))
            gaps.append(mp.fdot([mp.mpf(v) for v in a[b].flatten().tolist()], y) - bound)
    return gaps


def softmax(x: list[Any]) -> list[Any]:
    e = [mp.exp(v - max(x)) for v in x]
    return [v / sum(e) for v in e]


def each(f: Callable[[Any], Any]) -> Exact:
    return lambda x: [f(v) for v in x]


CASES: dict[str, tuple[Step, tuple[Box, ...], Exact]] = {
    "softmax": (Softmax((0,), (4,)), (boxes(4, 40, 0),), softmax),
    "softmax, wide": (Softmax((0,), (3,)), (boxes(3, 20, 1, 5.6, 1),), softmax),
    "product": (Product((0, 1), (3,), False, 1), (boxes(3, 40, 2), boxes(3, 40, 3)), lambda x: [
        x[i] * x[3 + i] for i in range(3)]),
    "weights": (Product((0, 1), (1, 1), True, 4, True), (row(boxes(3, 40, 4)), column(boxes(3, 40, 5))), lambda x: [
        mp.fdot(x[:3], x[3:])]),
    "square": (Elementwise((0,), (3,), SQUARE), (boxes(3, 40, 6),), each(lambda v: v * v)),
    "exp": (Elementwise((0,), (3,), EXP), (boxes(3, 40, 7, 3),), each(mp.exp)),
    "relu": (Elementwise((0,), (3,), known(nn.ReLU())), (boxes(3, 40, 8),), each(lambda v: max(v, mp.mpf(0)))),
    "gelu": (Elementwise((0,), (3,), known(nn.GELU())), (boxes(3, 40, 9),), each(lambda v: v * mp.ncdf(v))),
    "tanh": (Elementwise((0,), (3,), known(nn.Tanh())), (boxes(3, 40, 10),), each(mp.tanh)),
    **{
        name: (
            Elementwise((0,), (3,), f),
            tuple(Box(box.lower.abs() + 1e-3, box.lower.abs() + 1e-3 + (box.upper - box.lower))
                  for box in (boxes(3, 40, 11),)),
            each(g),
        )
        for name, f, g in (("rsqrt", RSQRT, lambda v: 1 / mp.sqrt(v)), ("reciprocal", RECIPROCAL, lambda v: 1 / v))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rounding_is_covered(name: str) -> None:
    step, given, exact = CASES[name]
    with mpmath.workdps(60):
        gaps = exact_gaps(step, given, exact, SEED)
    assert all(gap >= 0 for gap in gaps)
    assert all(mpmath.isfinite(gap) for gap in gaps)


def test_planes_of_a_softmax_cover_their_own_rounding() -> None:
    """Both planes hold in exact arithmetic without the rounding of functionals."""
    box = boxes(4, 60, 12, 4)
    planes = Softmax((0,), (4,)).relaxed(box)
    with mpmath.workdps(60):
        for x, b in ((x, b) for x in points(box, SEED) for b in range(60)):
            weights = softmax([mp.mpf(v) for v in x[b].tolist()])
            far = [mp.mpf(v) - mp.mpf(c) for v, c in zip(x[b].tolist(), box.centre[b].tolist(), strict=True)]
            for i, p in enumerate(weights):
                below, above = (
                    mp.mpf(float(at[b, i])) + mp.fdot([mp.mpf(v) for v in slope[b, i].tolist()], far)
                    for at, slope in (planes.lower, planes.upper)
                )
                assert below <= p <= above


ACTIVATIONS: dict[str, tuple[nn.Module, Callable[[Any], Any]]] = {
    "gelu": (nn.GELU(), lambda v: v * mp.erfc(-v / mp.sqrt(2)) / 2),
    "silu": (nn.SiLU(), lambda v: v / (1 + mp.exp(-v))),
    "tanh": (nn.Tanh(), mp.tanh),
    "sigmoid": (nn.Sigmoid(), lambda v: 1 / (1 + mp.exp(-v))),
    "elu": (nn.ELU(), lambda v: v if v > 0 else mp.expm1(v)),
    "hardswish": (nn.Hardswish(), lambda v: v * min(max(v + 3, 0), 6) / 6),
    "hardsigmoid": (nn.Hardsigmoid(), lambda v: min(max(v + 3, mp.mpf(0)), mp.mpf(6)) / 6),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_computed_well_enough(name: str) -> None:
    """The kernels are within LIBM of the larger of |z| and |f|, also near 0, where an ELU by e^z - 1 would not be."""
    module, exact = ACTIVATIONS[name]
    z = torch.cat([sign * torch.logspace(-18, 2.8, 120, dtype=torch.float64) for sign in (1, -1)])
    near = torch.cat([end + sign * torch.logspace(-15, -1, 15).double() for end in (-3, 3) for sign in (1, -1)])
    z = torch.cat([z, near])
    with mpmath.workdps(60):
        for at, value in zip(z.tolist(), module(z).tolist(), strict=True):
            off = abs(mp.mpf(value) - exact(mp.mpf(at)))
            assert off <= LIBM * max(abs(at), abs(value)) / 4
