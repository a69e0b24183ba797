"""The linearised-margin objective follows its formula, and lowers the first-order term of the adjoint certificate."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zoo
from tests.tools.objective_oracles import batch, probe_of, slow_lmce, small_vit
from trainers.objectives import OBJECTIVES
from trainers.objectives.lmce import margin_slopes, rivals


def test_loss_and_gradient_are_those_of_the_equation() -> None:
    model, (images, labels) = small_vit().double(), batch()
    images = images.double()
    loss = OBJECTIVES["lmce"](probe_of(model, eps=0.7), images, labels)["loss"]
    weights = list(model.parameters())
    grads = torch.autograd.grad(loss.double(), weights)
    expected = slow_lmce(model, images, labels, 0.7)
    assert abs(float(loss.detach()) - float(expected.detach())) <= 1e-6  # cross-entropy is taken in float32
    for got, wanted in zip(grads, torch.autograd.grad(expected, weights), strict=True):
        assert (got - wanted).norm() <= 1e-5 * (1 + wanted.norm())
    plain = F.cross_entropy(model(images), labels)
    assert loss > plain + 0.01, "the slopes count"


def test_eps_is_ramped() -> None:
    model, (images, labels) = small_vit(), batch()

    def loss(progress: float) -> float:
        probe = probe_of(model, progress, eps=0.7, ramp=0.2)
        return float(OBJECTIVES["lmce"](probe, images, labels)["loss"])

    assert loss(0.0) == pytest.approx(float(F.cross_entropy(model(images), labels)), abs=1e-6)
    assert loss(0.0) < loss(0.1) < loss(0.2) == loss(0.9)


def test_rivals_are_the_runner_up_or_any_wrong_class() -> None:
    logits, labels = torch.randn(4000, 5), torch.randint(0, 5, (4000,))
    runner_up = rivals(logits, labels, 0.0)
    others = logits.clone()
    others[torch.arange(4000), labels] = -1e9
    assert torch.equal(runner_up, others.argmax(1))
    drawn = rivals(logits, labels, 1.0)
    assert (drawn != labels).all()
    shares = torch.bincount((drawn - labels) % 5, minlength=5)[1:] / 4000
    assert (shares - 0.25).abs().max() < 0.05
    mixed = rivals(logits, labels, 0.4)
    assert 0.6 < float((mixed == runner_up).float().mean()) < 0.8  # a quarter of random answers agree


def test_a_model_that_ignores_its_input_has_a_gradient() -> None:
    """The loss must have a gradient where ||grad||, being 0, has no derivative."""
    model, (images, labels) = small_vit(), batch()
    nn.init.zeros_(model.get_parameter("patch_embed.proj.weight"))
    OBJECTIVES["lmce"](probe_of(model, eps=0.7), images, labels)["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_it_lowers_the_slopes_of_digits() -> None:
    """Train the same steps on the same images, with eps = 0 and with eps = 0.5."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images[:256] / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target[:256])

    def trained(eps: float) -> tuple[float, float]:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "embed_dim": 16,
            "depth": 1,
            "num_heads": 2,
            "patch_size": 4,
            "img_size": 8,
            "in_chans": 1,
        }
        model = zoo.create_model("dp_vit_ti", num_classes=10, global_pool="avg", init="orthogonal", **sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(60):
            terms = OBJECTIVES["lmce"](probe_of(model, eps=eps), images, labels)
            optimizer.zero_grad()
            terms["loss"].backward()
            optimizer.step()
        logits, slopes = margin_slopes(model, images, labels, 0.0)
        return float((logits.argmax(1) == labels).float().mean()), float(slopes.mean())

    (accuracy, slope), (plain_accuracy, plain_slope) = trained(0.5), trained(0.0)
    assert min(accuracy, plain_accuracy) > 0.8
    assert slope < 0.5 * plain_slope
