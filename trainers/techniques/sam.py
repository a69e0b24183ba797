"""Sharpness-aware minimisation (Foret et al. 2021, https://arxiv.org/abs/2010.01412, eq. 2-3).

    w <- w - lr grad L( w + e ),     e = rho g / ||g||,  g = grad L(w)

Each rank and each micro-batch has its own e (the paper's m-sharpness, section 4.1), so nothing is communicated.
Penalties on weights do not enter g; they are evaluated at w + e. SAM costs a second forward and backward pass, and a
second attack if there is one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

TINY = 1e-12


@contextmanager
def ascended(model: nn.Module, loss: Tensor, rho: float) -> Iterator[None]:
    """Move the weights to w + e in the block and restore w afterwards, bit by bit.

    `loss` is L(w) of whole weights: ZeRO 0-2.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    pairs = [(weight, grad) for weight, grad in zip(weights, grads, strict=True) if grad is not None]
    norm = torch.stack([grad.float().norm() for _, grad in pairs]).norm().clamp_min(TINY)
    before = [weight.detach().clone() for weight, _ in pairs]
    with torch.no_grad():
        for weight, grad in pairs:
            weight.add_(grad * (rho / norm))
    try:
        yield
    finally:
        with torch.no_grad():
            for (weight, _), value in zip(pairs, before, strict=True):
                weight.copy_(value)
