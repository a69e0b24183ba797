"""Activations of torch beyond those of zoo/bounds/torch_modules.py, by slopes, curvature and kinks.

    sigma'(z) = a'(z) + sum_k jump_k 1[z > place_k],    a' continuous:    R = R_a + sum_k jump_k R_hinge(z - place_k)

so every bound is the sum of those of `Smooth` and `Hinge` (docs/proofs.md#fused-mlp, docs/proofs.md#kinks). Extrema are
rounded outwards in the last printed decimal. Letters as in zoo/bounds/activations.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bounds.activations import FAR, Hinge, Smooth, slope_range
from zoo.bounds.contracts import Activation, Bound, Expand, Expansion, LambdaMax, Layer, Precision, Rounding
from zoo.bounds.elementwise import elementwise, scalar
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.primitives import function
from zoo.bounds.rule_table import ModuleRules, NoRule, register

HINGE = Hinge()


def _size(jump: Tensor | float) -> Tensor | float:
    return jump.abs() if isinstance(jump, Tensor) else abs(jump)


@dataclass(frozen=True)
class Kinked:
    """A smooth part, None for a linear one, and kinks as (place, jump of the slope); `base` is its slope below them."""

    slopes: tuple[float, float]
    kinks: tuple[tuple[float, Tensor | float], ...]
    smooth: Smooth | None = None
    base: Tensor | float = 0.0
    operations: int | None = 1

    def slope(self, z: Tensor) -> Tensor:
        """Return sigma'(z)."""
        smooth = torch.zeros_like(z) if self.smooth is None else self.smooth.slope(z)
        return reduce(torch.add, [jump * (z > place).to(z) for place, jump in self.kinks], smooth + self.base)

    def remainder(self, z_PNH: Tensor, w_PNH: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """Add up the bounds of the parts."""
        parts = [HINGE.remainder(z_PNH - p, w_PNH * jump, reach_PNH, r_P, lambda_max) for p, jump in self.kinks]
        if self.smooth is not None:
            parts.append(self.smooth.remainder(z_PNH, w_PNH, reach_PNH, r_P, lambda_max))
        return reduce(torch.add, parts)

    def beta(self, z_PNH: Tensor, s_H: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """Add up the bounds of the parts."""
        parts = [HINGE.beta(z_PNH - p, s_H * _size(jump), reach_PNH, r_P, lambda_max) for p, jump in self.kinks]
        if self.smooth is not None:
            parts.append(self.smooth.beta(z_PNH, s_H, reach_PNH, r_P, lambda_max))
        return reduce(torch.add, parts)

    def parabola(self, z: Tensor, w: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Add up the parabolas of the parts."""
        parts = [HINGE.parabola(z - p, w * jump, reach) for p, jump in self.kinks]
        if self.smooth is not None:
            parts.append(self.smooth.parabola(z, w, reach))
        return reduce(torch.add, [c for c, _ in parts]), reduce(torch.add, [s for _, s in parts])

    def chord(self, z: Tensor, reach: Tensor) -> Tensor:
        """Add up the chords of the parts, at most the range of all slopes."""
        parts = [_size(jump) * HINGE.chord(z - p, reach) for p, jump in self.kinks]
        if self.smooth is not None:
            parts.append(self.smooth.chord(z, reach))
        return reduce(torch.add, parts).clamp_max(slope_range(self))


class Abs(nn.Module):
    """|z|, entry by entry."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def leaky_relu(module: nn.LeakyReLU) -> Kinked:
    """Return max(z, 0) + a min(z, 0)."""
    return leaky(float(module.negative_slope))


def leaky(a: float) -> Kinked:
    """Return the slope a below 0 and 1 above."""
    return Kinked((min(a, 1.0), max(a, 1.0)), ((0.0, 1.0 - a),), base=a)


def clipped(module: nn.Hardtanh | nn.ReLU6) -> Kinked:
    """Return min(max(z, low), high)."""
    low, high = float(module.min_val), float(module.max_val)
    return Kinked((0.0, 1.0), ((low, 1.0), (high, -1.0)), operations=0)


def exponential(alpha: float, scale: float, rate: float) -> Smooth | Kinked:
    """Return scale z for z > 0, and scale alpha (e^{rate z} - 1) below.

    The slope jumps at 0 by scale (1 - alpha rate); sigma'' = scale alpha rate^2 e^{rate z} below 0, and 0 above.
    """
    steep = scale * alpha * rate
    most = steep * rate * (1 + 1e-12)
    tails = ((-FAR, 0.0),) if rate < 1 else ()
    smooth = Smooth(
        lambda z: steep * (rate * z.clamp(max=0)).exp(),
        lambda z: torch.where(z < 0, steep * rate * (rate * z.clamp(max=0)).exp(), 0.0),
        ((0.0, most), (0.0, 0.0), *tails),
        (0.0, max(scale, steep) * (1 + 1e-12)),
        operations=3,
    )
    if steep == scale:
        return smooth
    return Kinked(smooth.slopes, ((0.0, scale - steep),), smooth, operations=3)


def elu(module: nn.ELU) -> Smooth | Kinked:
    """Return ELU; its exponential is above 0 only for alpha > 0."""
    return exponential(_positive(module, float(module.alpha)), 1.0, 1.0)


def celu(module: nn.CELU) -> Smooth | Kinked:
    """Return max(z, 0) + min(alpha (e^{z / alpha} - 1), 0), whose slope is continuous."""
    alpha = _positive(module, float(module.alpha))
    found = exponential(alpha, 1.0, 1 / alpha)
    return found.smooth if isinstance(found, Kinked) and found.smooth is not None else found  # alpha / alpha rounds


def _positive(module: nn.Module, alpha: float) -> float:
    if not 0 < alpha < math.inf:
        raise NoRule(module, f"its alpha is {alpha:g}; create it with alpha > 0")
    return alpha


SELU = exponential(1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)


def _gates(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tanh(softplus z), 1 minus its square, and the sigmoid of z."""
    t = F.softplus(z).tanh()
    return t, 1 - t.square(), z.sigmoid()


def _mish_slope(z: Tensor) -> Tensor:
    t, rest, s = _gates(z)
    return t + z * rest * s


def _mish_second(z: Tensor) -> Tensor:
    t, rest, s = _gates(z)
    return rest * s * (2 + z * (1 - s - 2 * t * s))


# z tanh(softplus z): extrema of sigma'' and of sigma' by 40-digit arithmetic; torch's softplus jumps by e^-20 at 20.
MISH = Smooth(
    _mish_slope,
    _mish_second,
    ((-3.2673378468405206, -0.0417320707), (-0.0879344313149142, 0.6442046373), (2.1148425630208771, -0.0590333570)),
    (-0.1125261224, 1.0884981618),
    operations=4,
    steepest=0.5886,
    most_fourth=1.1010,
)


def _hardswish_second(z: Tensor) -> Tensor:
    return torch.where(z.abs() < 3, 1 / 3 * torch.ones_like(z), 0.0)


THIRD = 1 / 3 * (1 + 1e-12)
# z min(max(z + 3, 0), 6) / 6: slope 0, then z / 3 + 1 / 2 between -3 and 3, then 1
HARDSWISH = Kinked(
    (-0.5, 1.5),
    ((-3.0, -0.5), (3.0, -0.5)),
    Smooth(
        lambda z: z.clamp(-3, 3) / 3 + 0.5,
        _hardswish_second,
        ((-3.0, THIRD), (-3.0, 0.0), (3.0, THIRD), (3.0, 0.0)),
        (-0.5, 1.5),
    ),
    base=0.5,
    operations=4,
)
HARDSIGMOID = Kinked((0.0, (1 + 1e-12) / 6), ((-3.0, 1 / 6), (3.0, -1 / 6)), operations=3)


# a slope for every channel --------------------------------------------------------------------------------------------


def prelu_activation(module: nn.PReLU, x: Tensor) -> Activation:
    """Return the kinks of every entry of an image (flat); channels are its first axis."""
    a = module.weight.detach().double()
    if len(a) not in (1, x.shape[1]):
        raise NoRule(module, f"its {len(a)} slopes would be broadcast over {x.shape[1]} channels")
    a_H = a.view(-1, *(1,) * (x.ndim - 2)).expand(x.shape[1:]).flatten()
    return Kinked(_prelu_slopes(module), ((0.0, 1 - a_H),), base=a_H)


def _prelu_slopes(module: nn.PReLU) -> tuple[float, float]:
    least, most = (float(t) for t in module.weight.detach().aminmax())
    return min(least, 1.0), max(most, 1.0)


def prelu(module: nn.PReLU) -> Layer:
    """Return the largest |slope| times r."""
    least, most = _prelu_slopes(module)

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        prelu_activation(module, x)
        return module(x), lambda r: max(-least, most) * r

    return layer


def prelu_expansion(module: nn.PReLU) -> Expand:
    """Expand with one unit an entry."""

    def expand(x: Tensor) -> Expansion:
        return elementwise(module, prelu_activation(module, x))(x)

    return expand


def prelu_rounding(module: nn.PReLU, precision: Precision) -> Rounding:
    """Bound one product an entry."""
    least, most = _prelu_slopes(module)
    return function(module, max(-least, most), 1, precision)


def prelu_shapes(module: nn.PReLU) -> Shapes:
    """Return one slope, or one a channel."""
    return {"weight": (module.num_parameters,)}


_SCALAR: dict[type[nn.Module], Callable[..., Activation]] = {
    Abs: lambda module: Kinked((-1.0, 1.0), ((0.0, 2.0),), base=-1.0, operations=0),
    nn.LeakyReLU: leaky_relu,
    nn.Hardtanh: clipped,
    nn.ReLU6: clipped,
    nn.ELU: elu,
    nn.CELU: celu,
    nn.SELU: lambda module: SELU,
    nn.Mish: lambda module: MISH,
    nn.Hardswish: lambda module: HARDSWISH,
    nn.Hardsigmoid: lambda module: HARDSIGMOID,
}
for _kind, _activation in _SCALAR.items():
    register(_kind, scalar(_activation))
register(nn.PReLU, ModuleRules(rule=prelu, expansion=prelu_expansion, rounding=prelu_rounding, shapes=prelu_shapes))
KINDS = (*_SCALAR, nn.PReLU)
