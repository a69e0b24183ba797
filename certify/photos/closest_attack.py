"""The nearest image of another class that an attack finds, an upper bound that complements the certified radius.

    radius  <=  distance to the nearest image of another class  <=  distance found here.

PGD runs in growing balls until it fools, then in balls between the last failure and the success, and finally along the
straight line back to the image. The result proves nothing: a nearer image may exist, down to the radius.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from certizoo.attacks import AttackConfig
from certizoo.attacks.norms import distance

GROWTH = 1.5  # factor from ball to ball
FIRST = 1.02  # first ball relative to the certified radius, inside which nothing is searched
LEAST = {"l2": 0.02, "linf": 0.25 / 255}  # where the search begins if nothing is certified
CLOSE = 1.02  # ratio of a bracket's ends at which the search stops
HALVINGS = 6
POINTS = 12  # halvings on the line back


def closest_attack(
    model: nn.Module, image_CHW: Tensor, label: int, radius: float, attack: AttackConfig, draws: Callable[[], Generator]
) -> Tensor | None:
    """Return the image (C, H, W), or None if no ball up to grey images contains one.

    `attack` gives the norm and the steps.
    """
    x_BCHW, label_B = image_CHW[None], torch.tensor([label], device=image_CHW.device)
    largest = 0.5 if attack.norm == "linf" else 0.5 * image_CHW.numel() ** 0.5

    def tried(eps: float) -> Tensor | None:
        found_BCHW = replace(attack, eps=eps).run(model, x_BCHW, label_B, [draws()])
        return found_BCHW if _fools(model, found_BCHW, label) else None

    low, eps = radius, min(max(FIRST * radius, LEAST[attack.norm]), largest)
    while (found := tried(eps)) is None:
        if eps >= largest:
            return None
        low, eps = eps, min(GROWTH * eps, largest)
    for _ in range(HALVINGS):
        high = float(distance(found, x_BCHW, attack.norm))
        if high <= CLOSE * max(low, radius, LEAST[attack.norm] / 100):
            break
        middle = (max(low, high / 8) * high) ** 0.5
        nearer = tried(middle)
        low, found = (middle, found) if nearer is None else (low, nearer)
    return _back(model, x_BCHW, found, label)[0]


def _back(model: nn.Module, x_BCHW: Tensor, found_BCHW: Tensor, label: int) -> Tensor:
    """Return the last point on the line towards the image that still fools, by halving."""
    right, wrong, last_BCHW = 0.0, 1.0, found_BCHW
    for _ in range(POINTS):
        share = (right + wrong) / 2
        point_BCHW = x_BCHW + share * (found_BCHW - x_BCHW)
        if _fools(model, point_BCHW, label):
            wrong, last_BCHW = share, point_BCHW
        else:
            right = share
    return last_BCHW


def _fools(model: nn.Module, x_BCHW: Tensor, label: int) -> bool:
    with torch.no_grad():
        return int(model(x_BCHW).argmax(-1)) != label
