"""The actual change of a map over a ball by projected gradient ascent: a LOWER bound of the largest change.

It complements the upper bounds in comparisons, and proves nothing about a model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

STEPS, STARTS = 40, 3


def largest(
    objective: Callable[[Tensor], Tensor],
    x: Tensor,
    r_B: Tensor,
    steps: int = STEPS,
    starts: int = STARTS,
    seed: int = 0,
) -> Tensor:
    """Return the largest objective (B, ...) -> (B,) found over ||x' - x||_F <= r, image by image.

    All starts are one batch. In the first half of the steps, the next point is the point of the sphere in the direction
    of the gradient (on a linear map that is power iteration). In the second half, a part of it is added to the current
    point, which is then projected on the ball.
    """
    generator = torch.Generator().manual_seed(seed)
    ones = (1,) * (x.ndim - 1)
    x, r = x.repeat(starts, *ones), r_B.repeat(starts).view(-1, *ones)

    def on_sphere(step: Tensor) -> Tensor:
        return r * step / step.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, *ones)

    gamma = on_sphere(torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device))
    best_B = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
    for step in range(steps + 1):
        gamma.requires_grad_(True)
        value_B = objective(x + gamma)
        best_B = torch.maximum(best_B, value_B.detach())
        (slope,) = torch.autograd.grad(value_B.sum(), gamma)
        ahead = on_sphere(slope)
        gamma = (ahead if step < steps // 2 else gamma + 0.2 * ahead).detach()
        gamma = gamma * (r / gamma.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, *ones)).clamp(max=1)
    return best_B.view(starts, -1).amax(0)


def largest_change(
    f: Callable[[Tensor], Tensor], x: Tensor, r_B: Tensor, steps: int = STEPS, starts: int = STARTS, seed: int = 0
) -> Tensor:
    """Return the largest ||f(x') - f(x)||_F found over ||x' - x||_F <= r: x (B, ...), r (B,) -> (B,)."""
    with torch.no_grad():
        y = f(x).flatten(1).repeat(starts, 1)
    return largest(lambda z: (f(z).flatten(1) - y).norm(dim=1), x, r_B, steps, starts, seed)
