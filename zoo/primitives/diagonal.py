"""Maps that scale and shift every entry by itself: factors, constants, and batch normalisation in eval mode.

    y = w x + b,        J = diag(w),        ||J|| = max |w|

    BatchNorm (Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167): w = gamma / sqrt(var + eps), b = beta - w mean

Proof: docs/proofs.md#primitives. Letters: B images, C channels.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT, U
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer, Precision, Rounded, Rounding
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.primitives import factors, plus
from zoo.bounds.rounding import composed
from zoo.bounds.rule_table import ModuleRules, NoRule, register

FEW = 8 * U  # a quotient, a root, a sum and two products, each within an ulp or two


class Diagonal(nn.Module):
    """weight x + bias, or x / weight + bias, of the shape of one image or broadcast to it: (B, ...) -> (B, ...)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, divides: bool = False) -> None:
        super().__init__()
        self.divides = divides
        self.register_buffer("weight", weight.clone())
        self.register_buffer("bias", bias.clone())
        self.shapes = (tuple(weight.shape), tuple(bias.shape))

    def forward(self, x: Tensor) -> Tensor:
        return (x / self.weight if self.divides else x * self.weight) + self.bias


Weights = Callable[[Tensor], Tensor]
"""Maps x (B, ...) to w, which broadcasts to its shape."""


def diagonal_layer(module: nn.Module, gain: float) -> Layer:
    """Return the rule max |w| r. An input that is broadcast would enter the output many times, and is refused."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        y = module(x)
        if y.shape != x.shape:
            raise NoRule(
                module, f"it maps {tuple(x.shape[1:])} to {tuple(y.shape[1:])}; entries must stay by themselves"
            )
        return y, lambda r: gain * r

    return layer


def diagonal_expansion(module: nn.Module, gain: float, weights: Weights) -> Expand:
    """Expand w x + b: J is symmetric, and every product with it rounds once, besides the rounding of w."""
    layer = diagonal_layer(module, gain)

    def expand(x: Tensor) -> Expansion:
        (y, _), w = layer(x), weights(x)
        gain_B = x.new_full((len(x),), gain)

        def times_j(v: Tensor) -> Tensor:
            return w * v

        return Expansion.without_remainder(
            y=y,
            gain_B=gain_B,
            pull=times_j,
            own_push=times_j,
            rounding_B=2 * FEW * gain_B,
        )

    return expand


def diagonal_weight(module: Diagonal) -> Tensor:
    """Return w."""
    weight = module.weight.detach().double()
    return 1 / weight if module.divides else weight


def diagonal_gain(module: Diagonal) -> float:
    """Return max |w|, rounded up where it is a quotient."""
    gain = float(diagonal_weight(module).abs().max())
    if not gain < math.inf:
        raise NoRule(module, "it divides by 0")
    return gain * OUT if module.divides else gain


def diagonal_shapes(module: Diagonal) -> Shapes:
    """Return the shapes that the module was created with."""
    return dict(zip(("weight", "bias"), module.shapes, strict=True))


def diagonal_rounding(module: Diagonal, precision: Precision) -> Rounding:
    """Bound a product and a sum with rounded constants."""
    weight, bias = diagonal_weight(module), module.bias.detach().double()
    return composed([factors(weight, 2, precision), plus(lambda x: x + bias, precision)])


# batch normalisation --------------------------------------------------------------------------------------------------

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d


def batch_norm_weight(module: BatchNorm) -> Tensor:
    """Return w (C,) in float64. Raises NoRule without running statistics: the images of a batch would then mix."""
    if module.running_var is None or module.running_mean is None or not module.eps > 0:
        raise NoRule(module, "without running statistics images depend on each other; set track_running_stats=True")
    variance = module.running_var.detach().double()
    if not bool((variance >= 0).all()):
        raise NoRule(module, "its running_var is negative somewhere; certify an earlier checkpoint")
    weight = 1.0 if module.weight is None else module.weight.detach().double()
    return weight / (variance + module.eps).sqrt()


def batch_norm_gain(module: BatchNorm) -> float:
    """Return max |w|, rounded up."""
    return float(batch_norm_weight(module).abs().max()) * (1 + FEW) * OUT


def _by_channel(module: BatchNorm) -> Weights:
    weight_C = batch_norm_weight(module)
    return lambda x: weight_C.view(-1, *(1,) * (x.ndim - 2))


def batch_norm_rounding(module: BatchNorm, precision: Precision) -> Rounding:
    """Bound x w and its sum with b, w and b computed by a few operations; the size of b is that of its terms."""
    weights, mean = _by_channel(module), module.running_mean
    assert mean is not None
    bias = torch.zeros_like(mean) if module.bias is None else module.bias

    def around(x: Tensor) -> Rounded:
        shape = (-1, *(1,) * (x.ndim - 2))
        w = weights(x)
        parts = [
            plus(lambda t: t - mean.double().view(shape), precision),
            factors(w, 6, precision),
            plus(lambda t: t + bias.double().view(shape), precision),
        ]
        return composed(parts)(x)

    return around


def batch_norm_shapes(module: BatchNorm) -> Shapes:
    """Return one number a channel, and the counter of batches, which eval mode does not read."""
    names = ("weight", "bias", "running_mean", "running_var")
    return {**dict.fromkeys(names, (module.num_features,)), "num_batches_tracked": None}


register(
    Diagonal,
    ModuleRules(
        rule=lambda module: diagonal_layer(module, diagonal_gain(module)),
        expansion=lambda module: diagonal_expansion(module, diagonal_gain(module), lambda x: diagonal_weight(module)),
        rounding=diagonal_rounding,
        shapes=diagonal_shapes,
    ),
)
BATCH_NORM = ModuleRules[BatchNorm](
    rule=lambda module: diagonal_layer(module, batch_norm_gain(module)),
    expansion=lambda module: diagonal_expansion(module, batch_norm_gain(module), _by_channel(module)),
    rounding=batch_norm_rounding,
    shapes=batch_norm_shapes,
)
register(nn.BatchNorm1d, BATCH_NORM)
register(nn.BatchNorm2d, BATCH_NORM)
KINDS = (Diagonal, nn.BatchNorm1d, nn.BatchNorm2d)
