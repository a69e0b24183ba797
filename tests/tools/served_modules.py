"""Modules in served types, and the largest share of their rounding bounds that is found."""

from typing import Any

import torch
from torch import Tensor, nn

from certify.shared.bake import bake
from tests.tools.attention_cases import masked
from tests.tools.first_order_cases import norm_with_affine, scaled_
from zoo.attention.conv_mixing import ConvMixing
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.attention.l2 import L2Attention
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.scsa import ScaledCosineAttention
from zoo.attention.window import WindowAttention
from zoo.bounds.rounding import PRECISIONS, roundings_of
from zoo.layers.convolution import CellConv2d, CircularConv2d
from zoo.layers.mlp import SLL, ConstrainedMlp, Mlp
from zoo.layers.monotone import MonotoneGELU
from zoo.layers.norms import CenterNorm, LayerProject, SmoothProject
from zoo.layers.patches import Normalize
from zoo.layers.residual import WeightedResidual
from zoo.models.convnet import ReLUx

N, D, B = 5, 32, 8
POINTS = 8  # tried at once for each image
DTYPES = [torch.float32, torch.bfloat16]


def with_positions(module: GPSA, scale: float) -> GPSA:
    """Draw gates of all kinds and positions that matter."""
    with torch.no_grad():
        module.pos_proj.weight.normal_().mul_(0.3)
        module.gating_param.copy_(torch.linspace(-3, 3, len(module.gating_param)))
    return module


MODULES: dict[str, Any] = {
    "layernorm": lambda s: norm_with_affine(1.0, D),
    "smoothproject": lambda s: SmoothProject(D, s),
    "layerproject": lambda s: LayerProject(D, s),
    "centernorm": lambda s: scaled_(CenterNorm(D), s),
    "linear": lambda s: scaled_(nn.Linear(D, 20), s),
    "mlp": lambda s: scaled_(Mlp(D, 2 * D), s),
    "mlp relu": lambda s: scaled_(Mlp(D, 2 * D, act_layer=nn.ReLU), s),
    "sll": lambda s: scaled_(SLL(D, 2 * D, nn.Tanh), s),
    "constrained mlp": lambda s: scaled_(ConstrainedMlp(D, 2 * D), s),
    "weighted residual": lambda s: WeightedResidual(D, s / 3, 1.0),
    "attention": lambda s: scaled_(DotProductAttention(D, 4), s),
    "l2": lambda s: scaled_(L2Attention(D, 4), s),
    "l2 untied": lambda s: scaled_(L2Attention(D, 4, tied=False), s),
    "scsa": lambda s: scaled_(ScaledCosineAttention(D, 4, nu=1.5, eps=0.1 * s), s),
    "ln": lambda s: scaled_(LipschitzNormAttention(D, 4), s),
    "gpsa": lambda s: with_positions(GPSA(scaled_(DotProductAttention(D, 4), s)), s),
    "gpsa scsa": lambda s: with_positions(GPSA(scaled_(ScaledCosineAttention(D, 4), s)), s),
    "gpsa fused": lambda s: with_positions(GPSA(scaled_(DotProductAttention(D, 4), s)), s),
    "window": lambda s: WindowAttention(scaled_(DotProductAttention(D, 4), s), (2, 2)),
    "window l2": lambda s: WindowAttention(scaled_(L2Attention(D, 4), s), (2, 2)),
    "masked": lambda s: scaled_(masked(s, 4, N, D), s),
    "conv mixing": lambda s: scaled_(ConvMixing(D, 4, kernels=(1, 3, 5, 7)), s),
    "conv": lambda s: scaled_(nn.Conv2d(N, 6, 3, stride=2, padding=1), s),
    "conv by products": lambda s: scaled_(CellConv2d(N, 6, 4, stride=2, padding=1), s),
    "conv around": lambda s: scaled_(CircularConv2d(N, 6, (3, 3)), s),
    "gelu": lambda s: nn.GELU(),
    "tanh gelu": lambda s: nn.GELU("tanh"),
    "monotone gelu": lambda s: MonotoneGELU(),
    "tanh": lambda s: nn.Tanh(),
    "sigmoid": lambda s: nn.Sigmoid(),
    "silu": lambda s: nn.SiLU(),
    "softplus": lambda s: nn.Softplus(beta=2 * s, threshold=40),
    "normalize": lambda s: Normalize((0.4,) * N, (0.25,) * (N - 1) + (0.2 * s,)),
}
CHOICES = {"relu": nn.ReLU(), "relux": ReLUx((N, D), 0.7), "flatten": nn.Flatten()}  # these compute nothing
# What the module sees instead of N tokens: N channels, or a grid.
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("conv", "conv by products", "conv around", "normalize"), (N, 8, 4)),
    **dict.fromkeys(("gpsa", "gpsa scsa", "window", "window l2"), (4, D)),
    "gpsa fused": (81, D),
}


def shape(name: str) -> tuple[int, ...]:
    return SHAPES.get(name, (N, D))


def on_ball(x: Tensor, r_B: Tensor) -> Tensor:
    v = torch.randn_like(x)
    return x + v * (r_B * torch.rand(len(x)) / v.flatten(1).norm(dim=1)).view(-1, *[1] * (x.ndim - 1))


def shares(name: str, dtype: torch.dtype, first_seed: int = 0, rounds: int = 5) -> Tensor:
    """Return (error found) / bound for many points: rounds of random ones, then as many that climb from the worst.

    The axes are module, size of weights, inputs, radius and error of the input. A round is one batch of 8 points for
    each image.
    """
    found = []
    for seed, scale in enumerate((0.25, 1.0, 2.0), first_seed):
        torch.manual_seed(seed)
        served = MODULES[name](scale).to(dtype).eval().requires_grad_(False)
        exact = bake(served)
        room = shape(name)
        x = torch.randn(B, *room).double() * 10 ** torch.empty(B, *[1] * len(room)).uniform_(-1.5, 1).double()
        x = x.repeat(POINTS, *[1] * len(room))
        (rounding,) = roundings_of(exact, PRECISIONS[dtype])
        part = rounding(x)
        for reach, off in ((0.0, 0.0), (1e-3, 1e-6), (0.1, 1e-2), (0.5, 0.0)):
            r, e = (share * x.flatten(1).norm(dim=1) for share in (reach, off))
            best, at = torch.zeros(B).double(), x[:B]
            for k in range(2 * rounds):
                near = at.repeat(POINTS, *[1] * len(room))
                inside = on_ball(x, r) if k < rounds else inwards(on_ball(near, 0.1 * r), x, r)
                seen = (inside + (on_ball(x, e) - x)).to(dtype)  # rounding x^ may exceed e, which is then counted
                true_e = torch.maximum(e, (seen.double() - inside).flatten(1).norm(dim=1))
                share = (served(seen).double() - exact(inside)).flatten(1).norm(dim=1) / part.error(r, true_e)
                found.append(share)
                worst = share.view(POINTS, B).max(dim=0)
                higher = (worst.values > best).view(-1, *[1] * len(room))
                best = torch.maximum(best, worst.values)
                at = torch.where(higher, inside.view(POINTS, B, *room)[worst.indices, torch.arange(B)], at)
    return torch.stack(found)


def inwards(y: Tensor, x: Tensor, r: Tensor) -> Tensor:
    """Project back into the ball."""
    length = (y - x).flatten(1).norm(dim=1)
    return x + (y - x) * (r / length.clamp_min(1e-300)).clamp(max=1 - 1e-12).view(-1, *[1] * (x.ndim - 1))
