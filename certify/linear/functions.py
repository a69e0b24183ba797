"""Functions of one number: what enclosures/scalars.py needs to know of each."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from certify.linear.enclosures.scalars import Convex, Elementwise, Scalar
from certify.linear.program import Lacking, Program, Ref
from zoo.bounds.activations import Hinge, Smooth, activation_of
from zoo.primitives.activations import Kinked

SQUARE = Convex(torch.square, lambda z: 2 * z, monotone=False)
EXP = Convex(torch.exp, torch.exp)
RSQRT = Convex(torch.rsqrt, lambda z: -0.5 * z.rsqrt() / z)
RECIPROCAL = Convex(torch.reciprocal, lambda z: -1 / z.square())


def _positive(f: Convex) -> Convex:
    """Return f on positive numbers, NaN elsewhere."""

    def only(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda z: torch.where(z > 0, g(z), torch.nan)

    return Convex(only(f.f), only(f.slope))


def _scalar(f: Scalar | Convex) -> Callable[..., Ref]:
    def rule(program: Program, target: Any, x: Ref, *_: Any) -> Ref:
        return program.add(Elementwise((x.number,), x.shape, f))

    return rule


square, exp = _scalar(SQUARE), _scalar(EXP)
rsqrt, reciprocal = _scalar(_positive(RSQRT)), _scalar(_positive(RECIPROCAL))


def known(module: nn.Module) -> Scalar:
    """Return what the rules of an activation module say of its slopes, kinks and curvature."""
    activation = activation_of(module)
    smooth: Smooth | None = None
    kinks: tuple[float, ...] = ()
    if isinstance(activation, Smooth):
        smooth = activation
    elif isinstance(activation, Kinked):
        smooth, kinks = activation.smooth, tuple(float(place) for place, _ in activation.kinks)
    elif isinstance(activation, Hinge):
        kinks = (0.0, float(activation.theta))
    else:
        raise Lacking(f"{type(module).__name__} has none")
    curvature = 0.0 if smooth is None else max(abs(value) for _, value in smooth.extrema) + 1e-12
    finite = tuple(place for place in kinks if math.isfinite(place))
    return Scalar(module, activation.slopes, finite, curvature)


def activation_rule(make: Callable[..., nn.Module]) -> Callable[..., Ref]:
    def rule(program: Program, target: Any, x: Ref, *args: Any, **kwargs: Any) -> Ref:
        return program.add(Elementwise((x.number,), x.shape, known(make(*args, **kwargs))))

    return rule


def gelu(program: Program, target: Any, x: Ref, approximate: str = "none") -> Ref:
    if approximate != "none":
        raise Lacking(f"GELU with approximate={approximate!r} has none")
    return program.add(Elementwise((x.number,), x.shape, known(nn.GELU())))


def elu(program: Program, target: Any, x: Ref, alpha: float = 1.0, scale: float = 1.0, rate: float = 1.0) -> Ref:
    if not scale == rate == 1:
        raise Lacking("ELU with factors, such as CELU, has none")
    return program.add(Elementwise((x.number,), x.shape, known(nn.ELU(alpha))))


def clamp(program: Program, target: Any, x: Ref, low: Any = None, high: Any = None) -> Ref:
    if any(isinstance(end, Tensor | Ref) for end in (low, high)):
        raise Lacking("clamp with bounds that are tensors has none")
    ends = tuple(float(end) for end in (low, high) if end is not None)
    f = Scalar(lambda z: z.clamp(low, high), (0.0, 1.0), ends)
    return program.add(Elementwise((x.number,), x.shape, f))
