"""Search for counter-examples: projected gradient ascent over the ball ||Gamma||_F <= r or over a box, in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

STEPS, STARTS = 40, 3


def ascend(objective: Callable[[Tensor], Tensor], x: Tensor, r_B: Tensor, steps: int, starts: int) -> Tensor:
    """Return max of objective(x + Gamma) found over ||Gamma||_F <= r for each image: (B, ...) -> (B,).

    The result is a lower bound. All starts are one batch. Every step is a normalised ascent step, large at first and
    small at the end, projected on the ball; the best point of the whole path counts.
    """
    ones = (1,) * (x.ndim - 1)
    x, r_B = x.repeat(starts, *ones), r_B.repeat(starts)
    r = r_B.view(-1, *ones)

    def unit(g: Tensor) -> Tensor:
        return g / g.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, *ones)

    def moved(gamma: Tensor, g: Tensor, step: int) -> Tensor:
        gamma = gamma + (1.0 if step < steps // 2 else 0.2) * r * unit(g)
        return gamma * (r / gamma.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, *ones)).clamp(max=1)

    return _best(objective, x, unit(_starts(x)) * r, moved, steps).view(starts, -1).amax(0)


def ascend_box(objective: Callable[[Tensor], Tensor], x: Tensor, eps_B: Tensor, steps: int, starts: int) -> Tensor:
    """Return max of objective(x + Gamma) found over |Gamma_i| <= eps for each image: (B, ...) -> (B,).

    The result is a lower bound. Starts are corners and inner points; steps follow the sign of the gradient and the
    gradient itself, projected on the box, and shrink. The best point of the whole path counts.
    """
    ones = (1,) * (x.ndim - 1)
    count = 2 * starts
    x, eps_B = x.repeat(count, *ones), eps_B.repeat(count)
    eps = eps_B.view(-1, *ones)
    by_sign = (torch.arange(len(x)) < len(x) // 2).view(-1, *ones)
    start = _starts(x)

    def moved(gamma: Tensor, g: Tensor, step: int) -> Tensor:
        largest = g.flatten(1).abs().amax(1).clamp_min(1e-300).view(-1, *ones)
        move = torch.where(by_sign, g.sign(), 4 * g / largest)
        return (gamma + (2.0 if step == 0 else 1.0 if step < steps // 2 else 0.2) * eps * move).clamp(-eps, eps)

    gamma = torch.where(by_sign, start.sign(), start.clamp(-1, 1)) * eps
    return _best(objective, x, gamma, moved, steps).view(count, -1).amax(0)


def _best(
    objective: Callable[[Tensor], Tensor],
    x: Tensor,
    gamma: Tensor,
    moved: Callable[[Tensor, Tensor, int], Tensor],
    steps: int,
) -> Tensor:
    """Return the largest value along gamma -> moved(gamma, gradient, step): (B,)."""
    best_B = torch.full((len(x),), -torch.inf, dtype=gamma.dtype)
    for step in range(steps + 1):
        gamma.requires_grad_(True)
        value_B = objective(x + gamma)
        best_B = torch.maximum(best_B, value_B.detach())
        (g,) = torch.autograd.grad(value_B.sum(), gamma)
        gamma = moved(gamma.detach(), g, step)
    return best_B


def rival_loss(model: Callable[[Tensor], Tensor], label_B: Tensor, rival_B: Tensor) -> Callable[[Tensor], Tensor]:
    """Return minus the margin over one class of each image, as a function of a batch that repeats the images."""

    def loss(x: Tensor) -> Tensor:
        logits, many = model(x), len(x) // len(label_B)
        own, other = label_B.repeat(many)[:, None], rival_B.repeat(many)[:, None]
        return (logits.gather(1, other) - logits.gather(1, own))[:, 0]

    return loss


def margin_loss(model: torch.nn.Module, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return max_{j != y} logit_j - logit_y, which is positive where the class has changed."""

    def loss(x: Tensor) -> Tensor:
        logits = model(x)
        label = y.repeat(len(x) // len(y))[:, None]
        return logits.scatter(1, label, -torch.inf).amax(1) - logits.gather(1, label).squeeze(1)

    return loss


def _starts(x: Tensor) -> Tensor:
    """Draw Gaussian directions, half of them in a single token, where token-wise maps have their worst cases."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    if x.ndim != 3:
        return start
    token = torch.randint(x.shape[1], (len(x),), generator=generator)
    alone = torch.rand(len(x), generator=generator) < 0.5
    mask = torch.nn.functional.one_hot(token, x.shape[1]).to(x)[:, :, None]
    return torch.where(alone.view(-1, 1, 1), start * mask, start)


def largest_change(
    f: Callable[[Tensor], Tensor], x: Tensor, r_B: Tensor, steps: int = STEPS, starts: int = STARTS
) -> Tensor:
    """Return max ||f(x + Gamma) - f(x)|| found for each instance of the batch x (B, ...): (B,)."""
    with torch.no_grad():
        y = f(x).flatten(1).repeat(starts, 1)
    return ascend(lambda z: (f(z).flatten(1) - y).norm(dim=1), x, r_B, steps, starts)
