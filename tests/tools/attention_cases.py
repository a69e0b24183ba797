"""Dot-product attention from diffuse to sharp, alone, gated and in windows, with inputs, gradients and radii."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.tools.expansions import Instance
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.attention.masked import MaskedAttention
from zoo.attention.window import WindowAttention

N, D, H = 5, 12, 3
IMAGES = 14


def random_(module: nn.Module, scale: float) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale * parameter.shape[-1] ** -0.5)
    return module.double().eval().requires_grad_(False)


def trained(steps: int) -> Any:
    """Train each token to fetch the token whose first half is most like its own: attention gets sharp."""
    module = DotProductAttention(D, H)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    itself = torch.eye(N, dtype=torch.bool)
    for _ in range(steps):
        x = torch.randn(64, N, D)
        nearest = (x[..., : D // 2] @ x[..., : D // 2].mT).masked_fill(itself, -math.inf).argmax(-1)
        optimizer.zero_grad()
        (module(x) - x.gather(1, nearest[..., None].expand(-1, -1, D))).square().mean().backward()
        optimizer.step()
    return module.double().eval().requires_grad_(False)


def instance(module: nn.Module, tokens: int = N) -> Instance:
    """Return diffuse to sharp attention, with radii from 1e-3 to 0.5 of the input's size."""
    x = torch.randn(IMAGES, tokens, D).double() * 10 ** torch.empty(IMAGES, 1, 1).uniform_(-1, 0.7).double()
    r = x.flatten(1).norm(dim=1) * 10 ** torch.empty(IMAGES).uniform_(-3, -0.3).double()
    return Instance(module, x, torch.randn(1, IMAGES, tokens, D).double(), r)


def instances() -> Iterator[Instance]:
    """Return 210 instances."""
    torch.manual_seed(0)
    for i in range(12):
        yield instance(random_(DotProductAttention(D, H), 2.0 ** (i % 6 - 3)))
    for steps in (100, 200, 400):
        yield instance(trained(steps))


def masked(scale: float = 0.5, heads: int = H, tokens: int = 4, dim: int = D) -> MaskedAttention:
    """Return attention with numbers on its scores and with keys left out, others for every head; none sees nothing."""
    keep = (torch.rand(heads, tokens, tokens) > 0.15) | torch.eye(tokens).bool()
    bias = scale * torch.randn(heads, tokens, tokens)
    return MaskedAttention(DotProductAttention(dim, heads), bias.masked_fill(~keep, -math.inf))


MIXTURES: dict[type[nn.Module], Callable[[], nn.Module]] = {
    DotProductAttention: lambda: DotProductAttention(D, H),
    GPSA: lambda: GPSA(DotProductAttention(D, H)),
    WindowAttention: lambda: WindowAttention(DotProductAttention(D, H), (2, 2)),
    MaskedAttention: masked,
}


def mixtures(kind: type[nn.Module], modules: int = 15, seed: int = 1) -> Iterator[Instance]:
    torch.manual_seed(seed)
    for i in range(modules):
        yield instance(random_(MIXTURES[kind](), 2.0 ** (i % 6 - 3)), tokens=4)
