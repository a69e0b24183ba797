"""The search for counter-examples: projected gradient ascent on ||f(x + Gamma) - f(x)|| over ||Gamma||_F <= r."""

from collections.abc import Callable

import torch
from torch import Tensor

STEPS, STARTS = 40, 3


def largest_change(
    f: Callable[[Tensor], Tensor], x: Tensor, r_B: Tensor, steps: int = STEPS, starts: int = STARTS, seed: int = 0
) -> Tensor:
    """max ||f(x + Gamma) - f(x)|| found for each instance of the batch x (B, ...): (B,), a lower bound of the truth.

    Every step is a normalised ascent step with a shrinking step size, projected on the ball; the best point counts.
    """
    shape = (-1,) + (1,) * (x.ndim - 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        y = f(x)
    best_B = torch.zeros_like(r_B)

    def unit(g: Tensor) -> Tensor:
        return g / g.flatten(1).norm(dim=1).clamp_min(1e-300).view(shape)

    for _ in range(starts):
        start = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        # every other start in a single token or pixel row, where worst cases of token-wise maps lie
        if x.ndim == 3:
            token = torch.randint(x.shape[1], (len(x),), generator=generator)
            keep = torch.rand(len(x), generator=generator) < 0.5
            mask = torch.nn.functional.one_hot(token, x.shape[1]).to(x)[:, :, None]
            start = torch.where(keep.view(shape), start * mask, start)
        gamma = unit(start) * r_B.view(shape)
        for step in range(steps):
            gamma.requires_grad_(True)
            change_B = (f(x + gamma) - y).flatten(1).norm(dim=1)
            (g,) = torch.autograd.grad(change_B.sum(), gamma)
            best_B = torch.maximum(best_B, change_B.detach())
            size = 1.0 if step < steps // 2 else 0.2
            gamma = (gamma + size * r_B.view(shape) * unit(g)).detach()
            norm = gamma.flatten(1).norm(dim=1)
            gamma = gamma * (r_B / norm.clamp_min(1e-300)).clamp(max=1).view(shape)
    with torch.no_grad():
        return torch.maximum(best_B, (f(x + gamma) - y).flatten(1).norm(dim=1))
