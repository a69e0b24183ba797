"""Modules, inputs, gradients and radii on which second-order rules are attacked; attention has its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from timm.layers import DropPath
from torch import nn

from tests.tools.cases import mostly_slow
from tests.tools.expansions import Instance
from tests.tools.first_order_cases import norm_with_affine, scaled_
from zoo.attention.conv_mixing import ConvMixing
from zoo.bounds.torch_modules import GELU, SIGMOID, SILU, TANH, TANH_GELU, softplus
from zoo.layers.convolution import CellConv2d, CircularConv2d
from zoo.layers.mlp import SLL, ConstrainedMlp, Mlp
from zoo.layers.monotone import MONOTONE_GELU, MonotoneGELU
from zoo.layers.norms import CenterNorm, LayerProject, SmoothProject
from zoo.layers.patches import Normalize
from zoo.layers.residual import WeightedResidual
from zoo.models.convnet import ReLUx

N, D = 4, 8
MODULES, INPUTS, GRADIENTS = 10, 10, 2
Make = Callable[[float], nn.Module]


@dataclass(frozen=True)
class Case:
    """A module of a random size, with the largest accepted medians of bound / best found for remainder and beta."""

    make: Make
    remainder: float
    beta: float
    shape: tuple[int, ...] = (N, D)


def layer_norm(scale: float) -> nn.Module:
    return norm_with_affine(scale, D)


def mlp(act: Callable[[], nn.Module]) -> Make:
    return lambda scale: scaled_(Mlp(D, 2 * D, act_layer=act), scale)


def sll(scale: float) -> nn.Module:
    layer = scaled_(SLL(D, 2 * D, nn.Tanh), scale)
    with torch.no_grad():
        layer.get_parameter("weight")[:, 0] = 0  # a dead unit
    return layer


CASES: dict[type[nn.Module], list[Case]] = {
    nn.LayerNorm: [Case(layer_norm, 1.5, 1.3), Case(layer_norm, 1.4, 1.2, (1, D))],
    SmoothProject: [Case(lambda s: SmoothProject(D, s * D**0.5), 2.0, 1.2, (2, 2, D))],
    LayerProject: [Case(lambda s: LayerProject(D, s * D**0.5), 1.6, 1.2)],
    nn.GELU: [Case(lambda s: nn.GELU("tanh" if s > 1 else "none"), 1.05, 1.05)],
    nn.Tanh: [Case(lambda s: nn.Tanh(), 1.15, 1.1)],
    nn.Sigmoid: [Case(lambda s: nn.Sigmoid(), 1.2, 1.2)],
    nn.SiLU: [Case(lambda s: nn.SiLU(), 1.2, 1.2)],
    nn.Softplus: [Case(lambda s: nn.Softplus(s, threshold=40), 1.2, 1.2)],
    MonotoneGELU: [Case(lambda s: MonotoneGELU(), 1.2, 1.2)],
    nn.ReLU: [Case(lambda s: nn.ReLU(), 1.5, 1.1)],
    ReLUx: [Case(lambda s: scaled_(ReLUx((N, D), 1.0), s), 3.3, 1.2)],
    Mlp: [
        Case(mlp(nn.GELU), 1.1, 3.1, (1, D)),
        Case(mlp(nn.GELU), 1.8, 3.9),  # one form for all tokens, which are independent here
        Case(mlp(partial(nn.GELU, "tanh")), 1.1, 3.1, (1, D)),
        Case(mlp(nn.Tanh), 1.25, 3.3, (1, D)),
        Case(mlp(nn.SiLU), 1.25, 3.3, (1, D)),
        Case(mlp(partial(nn.Softplus, threshold=40.0)), 1.25, 3.3, (1, D)),
        Case(mlp(nn.ReLU), 1.9, 2.5),
        Case(mlp(nn.ReLU), 1.6, 2.5, (1, D)),
    ],
    SLL: [
        Case(sll, 1.2, 2.4, (1, D)),
        Case(sll, 2.0, 3.0),
        Case(lambda s: scaled_(SLL(D, 2 * D, nn.ReLU), s), 1.9, 2.2),
        Case(lambda s: scaled_(SLL(D, 2 * D, MonotoneGELU), s), 1.2, 2.8, (1, D)),
    ],
    ConstrainedMlp: [Case(lambda s: scaled_(ConstrainedMlp(D, 2 * D, act=nn.Tanh if s > 1 else nn.ReLU), s), 1.9, 3.1)],
}
ACTIVATIONS = ((Mlp, 2), (Mlp, 3), (Mlp, 4), (Mlp, 5), (Mlp, 7), (SLL, 3))  # other cases, of one token, are quick
EVERY = [(kind, i) for kind, cases in CASES.items() for i in range(len(cases))]
HERE = mostly_slow(EVERY, *(case for case in EVERY if case not in ACTIVATIONS))
FEW = mostly_slow(
    EVERY, *((kind, 0) for kind in (nn.LayerNorm, LayerProject, nn.GELU, nn.ReLU, ReLUx, Mlp, SLL, ConstrainedMlp))
)
AFFINE = (
    nn.Linear, nn.Identity, nn.Flatten, CenterNorm, WeightedResidual, ConvMixing, nn.Conv2d, CellConv2d, CircularConv2d,
    Normalize,
)  # fmt: skip
IDENTITIES = (nn.Dropout, DropPath)  # in eval mode


def instances(case: Case, seed: int, modules: int = MODULES) -> Iterator[Instance]:
    """Return inputs of sizes 0.1 to 10 and radii from 0.001 to 0.1 of them; for one module in five 0.1 to 10."""
    torch.manual_seed(seed)
    for i in range(modules):
        module = case.make(2.0 ** (i % 4 - 2)).double().eval().requires_grad_(False)
        size = 10 ** torch.empty(INPUTS).uniform_(-1, 1).double()
        x = torch.randn(INPUTS, *case.shape).double() * size.view(-1, *(1,) * len(case.shape))
        exponents = (-1.0, 1.0) if i % 5 == 4 else (-3.0, -1.0)
        r = x.flatten(1).norm(dim=1) * 10 ** torch.empty(INPUTS).uniform_(*exponents).double()
        yield Instance(module, x, torch.randn(GRADIENTS, *module(x).shape).double(), r)


DERIVATIVES = [
    (GELU, nn.GELU()),
    (TANH_GELU, nn.GELU("tanh")),
    (TANH, nn.Tanh()),
    (SIGMOID, nn.Sigmoid()),
    (SILU, nn.SiLU()),
    (softplus(nn.Softplus(3.0, threshold=40)), nn.Softplus(3.0, threshold=40)),
    (MONOTONE_GELU, MonotoneGELU()),
]
