"""100,000 attacks, each at the radius that was certified for its image: none may succeed.

A trial is a model, an image, a method and a start; every start ascends the margin loss of the baked float64 model for
20 steps. Models: two layers of every kind, with random weights of three sizes and trained for a few steps.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from certify import certified_radius
from certify.methods.bake import bake
from tests.certify.methods.test_certify import margin_loss
from tests.tools.ascent import ascend
from tests.tools.small_models import PARTS, SMALL, TINY, labelled, small_model

IMAGES, STARTS, STEPS = 40, 32, 20
METHODS = ("lofast_local", "adjoint", "best")
OTHERS = ("l2_vit_ti", "scsa_vit_ti")  # kinds of attention with rules of their own
KINDS = [(name, weights) for name in (*PARTS, *OTHERS) for weights in ("small", "medium", "large", "trained")]
TRIALS = len(KINDS) * len(METHODS) * IMAGES * STARTS


def trained(model: Any) -> Any:
    """40 steps on four noisy prototypes: margins and gradients of a classifier, not of chance."""
    prototypes, generator = torch.rand(4, 1, 8, 8), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        y = torch.randint(4, (64,), generator=generator)
        x = (prototypes[y] + 0.2 * torch.randn(64, 1, 8, 8, generator=generator)).clamp(0, 1)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


def model_of(name: str, weights: str) -> Any:
    seed = {"small": 0, "medium": 1, "large": 2, "trained": 0}[weights]
    torch.manual_seed(seed)
    if name in PARTS:
        model = small_model(name, seed)
    else:
        model = zoo.create_model(name, **(SMALL | TINY | {"norm": {"name": "layernorm", "eps": 1.0}})).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2.0**seed)
    return trained(model) if weights == "trained" else model


def attacked(baked: Any, x: Tensor, y: Tensor, radius_B: Tensor) -> int:
    """STARTS trials an image; how many of the images have a radius worth an attack."""
    found_B = ascend(margin_loss(baked, y), x.double(), radius_B, steps=STEPS, starts=STARTS)
    beaten_B = (found_B > 0) & (radius_B > 0)
    assert not beaten_B.any(), f"beaten at radii {radius_B[beaten_B].tolist()}"
    return int((radius_B > 1e-4).sum())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_attack_of_a_hundred_thousand_beats_a_certificate() -> None:
    assert TRIALS >= 100_000
    meant = 0
    for name, weights in KINDS:
        model = model_of(name, weights)
        x, y = labelled(model, IMAGES, seed=len(name))
        baked = bake(model)
        for method in METHODS:
            usable = method if name in PARTS else "lofast_local" if method == "adjoint" else method
            meant += attacked(baked, x, y, certified_radius(model, x, y, method=usable))
    assert meant >= 0.5 * len(KINDS) * len(METHODS) * IMAGES, f"only {meant} radii were above 1e-4"


@pytest.mark.slow
def test_the_attack_finds_what_is_there() -> None:
    """The same trials beyond the certificate: at 1.5 times the radius of nearly linear models classes do change, and of
    every model there is a radius, at most 16 times that, at which they do."""
    for name in PARTS:
        model = model_of(name, "trained")
        x, y = labelled(model, IMAGES, seed=len(name))
        radius_B, loss = certified_radius(model, x, y, method="best"), margin_loss(bake(model), y)
        assert (ascend(loss, x.double(), 16 * radius_B, steps=STEPS, starts=4) > 0).float().mean() >= 0.5, name
        if name == "smooth":
            assert (ascend(loss, x.double(), 1.5 * radius_B, steps=STEPS, starts=4) > 0).any()
