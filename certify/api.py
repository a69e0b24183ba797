"""The two questions one asks of a model and some images: certified at eps? and: up to which eps?"""

import math

import torch
from torch import Tensor, nn

from certify.certificate import Analysis, Certificate, Certifier
from certify.methods import METHODS
from certizoo import UserError

MAX_EPS = 2.0**10  # far beyond the diameter of any image's box
BISECTIONS = 14  # a radius is found to within 2^-14 of itself


def certifier(model: nn.Module, method: str) -> Certifier:
    """The certifier of a method; raises UserError for an unknown one and NoRule for an uncertifiable model."""
    if method not in METHODS:
        raise UserError(f"no certification method {method!r}; choose one of {', '.join(METHODS)}")
    return METHODS[method](model)


def certify(model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, eps: float, method: str = "lofast") -> Certificate:
    """Certificates for every image at one L2 radius `eps` in [0,1] pixel space.

    images (B, C, H, W) in [0,1], labels (B,). Returns (B,) tensors margin_B, loss_B, certified_B, correct_B,
    unknown_B. The whole ball is covered, also the part of it outside the [0,1] box.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number >= 0, got {eps}")
    return certifier(model, method).analyse(images_BCHW, labels_B).at(eps)


def certified_radius(model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, method: str = "lofast") -> Tensor:
    """The largest eps proved for each image, rounded down: (B,) float64, 0 where misclassified."""
    return radius_of(certifier(model, method).analyse(images_BCHW, labels_B))


def radius_of(analysis: Analysis) -> Tensor:
    """Bisection on stored terms, without a new forward pass. Sound for any bound, as every answer was tested itself;
    the largest one because bounds are nondecreasing in eps."""
    correct_B = analysis.clean.correct_B
    low_B = torch.zeros(len(correct_B), dtype=torch.float64, device=correct_B.device)
    high_B = torch.full_like(low_B, 2.0**-10)
    for _ in range(round(math.log2(MAX_EPS)) + 10):  # double until the proof fails
        passed_B = analysis.at(high_B).certified_B
        low_B = torch.where(passed_B, high_B, low_B)
        high_B = torch.where(passed_B, 2 * high_B, high_B)
        if not bool(passed_B.any()):
            break
    for _ in range(BISECTIONS):
        middle_B = (low_B + high_B) / 2
        passed_B = analysis.at(middle_B).certified_B
        low_B, high_B = torch.where(passed_B, middle_B, low_B), torch.where(passed_B, high_B, middle_B)
    return torch.where(correct_B, low_B, 0.0)
