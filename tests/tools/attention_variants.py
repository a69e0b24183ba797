"""Other attention (distances, cosines, normalised scores), alone, gated and in windows, with inputs and radii."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from tests.tools.attention_cases import random_
from tests.tools.expansions import Instance
from zoo.attention.gpsa import GPSA
from zoo.attention.l2 import L2Attention
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.scsa import ScaledCosineAttention
from zoo.attention.window import WindowAttention

N, D, H = 4, 12, 3
MODULES, INPUTS = 9, 24


def cosine(scale: float) -> nn.Module:
    return ScaledCosineAttention(D, H, tau=2 * scale, nu=1.5, eps=scale)


# kind: (how to make it, largest accepted medians of bound / best found for remainder and beta)
CASES: dict[str, tuple[Callable[[float], nn.Module], float, float]] = {
    "l2": (lambda s: L2Attention(D, H), 30, 20),
    "l2 untied": (lambda s: L2Attention(D, H, tied=False), 45, 45),
    "scsa": (cosine, 50, 55),
    "ln": (lambda s: LipschitzNormAttention(D, H), 250, 300),
    "window l2": (lambda s: WindowAttention(L2Attention(D, H), (2, 2)), 35, 22),
    "gpsa scsa": (lambda s: GPSA(cosine(s)), 40, 45),
}


def instances(kind: str, modules: int = MODULES, seed: int = 0) -> Iterator[Instance]:
    """Return weights and inputs of all sizes, radii from 1e-3 to 0.5 of the input's size."""
    torch.manual_seed(seed)
    for i in range(modules):
        scale = 2.0 ** (i % 5 - 3)
        module = random_(CASES[kind][0](2.0 ** (i % 3 - 1)), scale)
        x = torch.randn(INPUTS, N, D).double() * 10 ** torch.empty(INPUTS, 1, 1).uniform_(-1, 0.7).double()
        r = x.flatten(1).norm(dim=1) * 10 ** torch.empty(INPUTS).uniform_(-3, -0.3).double()
        yield Instance(module, x, torch.randn(1, INPUTS, N, D).double(), r)
