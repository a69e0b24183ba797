"""A convolution or linear layer with factors of channels around it, such as those of BatchNorm.

    y = w_out (W (w_in x + a) + b) + c,        J = diag(w_out) W diag(w_in),    ||J|| <= max |w_out| ||W|| max |w_in|

The module computes its parts in turn. Its norm is that of the folded weights; the right side is often much larger.
Every folded weight is off by at most 2 FEW of itself; a matrix with such an error, and a symbol of a convolution, by at
most that share of || sum_k |W_k| ||_F, the sum over the k places of a kernel. Proof: docs/proofs.md#primitives.

Letters: C channels in, O channels out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer
from zoo.bounds.curvature import affine_expansion
from zoo.bounds.rule_table import ModuleRules, NoRule, register
from zoo.layers.convolution import norm_on
from zoo.primitives.diagonal import FEW, Diagonal, batch_norm_weight, diagonal_weight
from zoo.spectral import sigma_upper

LAYERS = (nn.Conv2d, nn.Linear)


class Folded(nn.Sequential):
    """Factors, a convolution or linear layer, factors; either factors may be missing."""


def factors_of(module: nn.Module, layer: nn.Module, channels: int) -> Tensor | None:
    """Return w (channels,) of a module that multiplies the channels before or after a layer, else None."""
    places = 2 if isinstance(layer, nn.Conv2d) else 0
    if type(module) is (nn.BatchNorm2d if places else nn.BatchNorm1d):
        found = batch_norm_weight(module)
        return found if len(found) == channels else None
    if type(module) is not Diagonal:
        return None
    weight = diagonal_weight(module)
    if weight.numel() == 1:
        return weight.reshape(1).expand(channels)
    by_channel = weight.ndim > places and weight.numel() == channels == weight.shape[-1 - places]
    return weight.flatten() if by_channel else None


def split(module: Folded) -> tuple[Sequence[nn.Module], nn.Module, Sequence[nn.Module]]:
    """Return the factors before the layer, the layer, and the factors after it. Raises NoRule for other parts."""
    parts = list(module)
    at = [k for k, part in enumerate(parts) if type(part) in LAYERS]
    if len(at) != 1 or at[0] > 1 or len(parts) > at[0] + 2:
        raise NoRule(module, "it holds one convolution or linear layer with at most one factor on either side")
    return parts[: at[0]], parts[at[0]], parts[at[0] + 1 :]


def folded_weight(module: Folded) -> Tensor:
    """Return diag(w_out) W diag(w_in), rounded, in float64. Raises NoRule for factors that are not of channels."""
    before, layer, after = split(module)
    weight = layer.get_parameter("weight").detach().double()
    weight_OCK = weight.reshape(*weight.shape[:2], -1)
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    weight_GOCK = weight_OCK.unflatten(0, (groups, -1))
    for part in after:
        weight_GOCK = weight_GOCK * _given(part, layer, len(weight_OCK)).view(groups, -1, 1, 1)
    for part in before:
        weight_GOCK = weight_GOCK * _given(part, layer, groups * weight_OCK.shape[1]).view(groups, 1, -1, 1)
    return weight_GOCK.reshape(weight.shape)


def _given(part: nn.Module, layer: nn.Module, channels: int) -> Tensor:
    found = factors_of(part, layer, channels)
    if found is None:
        raise NoRule(part, f"its factors are not one for each of {channels} channels")
    return found


def folded(module: Folded) -> Layer:
    """Return the norm of the folded weights times r, with what their rounding adds."""
    _, own, _ = split(module)
    weight = folded_weight(module)
    norm_of = norm_on(own, weight) if isinstance(own, nn.Conv2d) else _norm_of_matrix(weight)
    off = 2 * FEW * weight.abs().reshape(*weight.shape[:2], -1).sum(-1).square().sum().sqrt()

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        y = _computed(module, x)
        gain = (norm_of(y) + off) * OUT
        return y, lambda r: gain * r

    return layer


def _norm_of_matrix(weight: Tensor) -> Callable[[Tensor], Tensor]:
    norm = sigma_upper(weight)
    return lambda y: norm


def _computed(module: Folded, x: Tensor) -> Tensor:
    """Return the output. Factors must keep the shape, and BatchNorm after a linear layer needs vectors."""
    for part in module:
        y = part(x)
        tokens = type(part) is nn.BatchNorm1d and x.ndim != 2
        if tokens or (type(part) not in LAYERS and y.shape != x.shape):
            raise NoRule(part, f"it maps {tuple(x.shape[1:])} to {tuple(y.shape[1:])}; one factor a channel is folded")
        x = y
    return x


def folded_expansion(module: Folded) -> Expand:
    """Expand the affine map; batch normalisation is a product and a sum there, whose w is off by FEW of itself."""
    maps = [_elementary(part) for part in module]
    inner = affine_expansion(lambda x: reduce(lambda y, f: f(y), maps, x), folded(module))

    def expand(x: Tensor) -> Expansion:
        found = inner(x)
        return replace(found, rounding_B=(found.rounding + 4 * FEW * found.gain_B) * OUT)

    return expand


def _elementary(part: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the module; batch normalisation as operations that can be followed (zoo/bounds/float_error.py)."""
    if not isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
        return part
    assert part.running_mean is not None
    bias = torch.zeros_like(part.running_mean) if part.bias is None else part.bias
    over = (-1, 1, 1) if isinstance(part, nn.BatchNorm2d) else (-1,)
    mean, weight, shift = (t.detach().double().view(over) for t in (part.running_mean, batch_norm_weight(part), bias))
    return lambda x: (x - mean) * weight + shift


register(Folded, ModuleRules(rule=folded, expansion=folded_expansion))
KINDS = (Folded,)
