"""Models and images shared by the tests of attacks."""

from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import zoo
from certizoo.attacks import Attack, make
from tests.tools.small_models import PARTS, SMALL

ROUNDING = 1e-6


def mlp(classes: int = 10, side: int = 8, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 24), nn.Tanh(), nn.Dropout(0.5), nn.Linear(24, classes))


def vit(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = zoo.create_model("dp_vit_ti", **(SMALL | PARTS["standard"] | {"num_classes": 10} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


@torch.no_grad()
def own_labels(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model.eval()(x)
    return logits.argmax(1)


def images_of(count: int, side: int = 8, seed: int = 1) -> Tensor:
    images = torch.rand(count, 1, side, side, generator=Generator().manual_seed(seed))
    images[0] = 0.0  # a corner of the box
    return images


def survivors(model: nn.Module, x: Tensor, labels: Tensor) -> list[bool]:
    right: list[bool] = (own_labels(model, x) == labels).tolist()
    return right


# A cheap setting of every kind: a new kind without one fails tests/certizoo/attacks/test_library.py.
OPTIONS: dict[str, dict[str, Any]] = {
    "pgd": {"norm": "l2", "eps": 0.3, "steps": 3, "stop_when_fooled": True},
    "autoattack": {"norm": "linf", "eps": 0.05, "attacks": ["apgd-ce", "apgd-t"]},
    "cw_l2": {"steps": 20},
    "deepfool": {},
    "corruption": {"name": "gaussian_noise", "severity": 5},
}


def attack_of(kind: str) -> Attack:
    if kind == "corruption":
        pytest.importorskip("imagecorruptions", reason="the extra `corruptions` is not installed")
    return make({"kind": kind} | OPTIONS[kind])
