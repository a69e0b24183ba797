"""Decide whether a model keeps a class on a box of images: proved, refuted by an image, or unknown when time is over.

An attack comes first, then linear bounds and branch and bound (branch.py).

Letters: S starts of the attack.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certify.linear.backward import Bounds
from certify.linear.branch import Search
from certify.linear.enclosures.steps import Box
from certify.linear.program import Program
from certify.shared.certificate import margin_rows

STARTS, STEPS = 8, 40
PROVED, REFUTED, UNKNOWN = "proved", "refuted", "unknown"


@dataclass(frozen=True)
class Verdict:
    """The answer, the image (1, C, H, W) of another class if refuted, and the number of parts that were bounded."""

    answer: str
    image: Tensor | None
    parts: int


def decide(
    model: nn.Module,
    program: Program,
    images: Box,
    label: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Verdict:
    """Decide one property.

    Args:
        model: the float64 model.
        program: its program for one image (certify/linear/capture.py).
        images: a box of images, (1, C, H, W).
        label: the class.
        seconds: the time limit.
        clock: by which it is measured.
    """
    until = clock() + seconds
    found = attacked(model, images, label)
    if found is not None:
        return Verdict(REFUTED, found, 0)
    with torch.no_grad():
        box = Box(images.lower.unsqueeze(1), images.upper.unsqueeze(1))
        classes = int(program.result.shape[-1]) if program.result is not None else 0
        rivals = [j for j in range(classes) if j != label]
        rows = margin_rows(torch.tensor([label]), images.lower.new_empty(classes))[0, rivals]
        search = Search(Bounds.on(program, box), rows)
        proved = bool(search.run(until, clock).all())
    return Verdict(PROVED if proved else UNKNOWN, None, search.parts)


def attacked(model: nn.Module, images: Box, label: int, steps: int = STEPS) -> Tensor | None:
    """Return an image (1, C, H, W) of the box that is not of the class, by gradient descent of the margin, or None."""
    generator = torch.Generator(images.lower.device).manual_seed(0)
    lower, upper = images.lower, images.upper
    share = torch.rand(STARTS, *lower.shape[1:], generator=generator, dtype=lower.dtype, device=lower.device)
    share[0] = 0.5
    x, size = lower + share * (upper - lower), upper - lower
    for step in range(steps):
        x.requires_grad_(True)
        with torch.enable_grad():
            logits_SJ = model(x)
            rival_S = logits_SJ.index_fill(1, torch.tensor([label], device=x.device), -torch.inf).amax(1)
            margin_S = logits_SJ[:, label] - rival_S
            if bool((margin_S < 0).any()):
                return x[margin_S.argmin()].detach().unsqueeze(0)
            (slope,) = torch.autograd.grad(margin_S.sum(), x)
        x = x.detach() - (0.5 if step < steps // 2 else 0.1) * size * slope.sign()
        x = torch.minimum(torch.maximum(x, lower), upper)
    return None
