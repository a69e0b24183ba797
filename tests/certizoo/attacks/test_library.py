"""The attacks of other libraries keep our promises: they stay in the ball and the box and change nothing else."""

import logging
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from certizoo.attacks import KINDS
from certizoo.attacks.guard import inside
from certizoo.attacks.norms import NORMS, distance
from tests.tools.attacked import ROUNDING, attack_of, images_of, mlp, own_labels, survivors

FOOLING = [kind for kind in KINDS if kind != "corruption"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kind_keeps_box_ball_dtype_and_the_model(kind: str, dtype: torch.dtype) -> None:
    attack, side = attack_of(kind), 32 if kind == "corruption" else 8
    model, images = mlp(side=side).to(dtype), images_of(5, side).to(dtype)
    labels = own_labels(model, images)
    labels[1] = (labels[1] + 1) % 10  # one is already misclassified
    model.train()
    model.get_submodule("1").eval()
    model.get_submodule("1").get_parameter("bias").requires_grad_(False)
    modes = [module.training for module in model.modules()]
    state = [(p.detach().clone(), p.requires_grad, p.grad) for p in model.parameters()]
    before, hidden = images.clone(), _global_state()
    with torch.no_grad():  # as the evaluation calls it
        found = attack.run(model, images, labels, [Generator().manual_seed(i) for i in range(5)])
    assert _global_state() == hidden, "the process' own random numbers, loggers and tracer are not the attack's to use"
    assert found.dtype == dtype
    assert found.shape == images.shape
    assert not found.requires_grad
    assert found.min() >= 0
    assert found.max() <= 1
    if attack.eps is not None:
        assert distance(found, images, attack.norm).max() <= attack.eps + ROUNDING
    assert torch.equal(images, before)
    assert [module.training for module in model.modules()] == modes
    for p, (value, requires_grad, grad) in zip(model.parameters(), state, strict=True):
        assert torch.equal(p, value)
        assert p.requires_grad == requires_grad
        assert p.grad is grad
        assert not p._backward_hooks
    assert attack.norm in (*NORMS, "none")


def _global_state() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    tracer, loggers = sys.gettrace(), logging.root.handlers[:]
    return [torch.get_rng_state().tolist(), random.getstate(), name, list(keys), rest, tracer, loggers]


@pytest.mark.parametrize("kind", FOOLING)
def test_every_kind_fools_and_what_it_does_not_fool_or_was_wrong_comes_back(kind: str) -> None:
    model, images = mlp(), images_of(6)
    labels = own_labels(model, images)
    labels[:2] = (labels[:2] + 3) % 10
    found = attack_of(kind).run(model, images, labels, Generator().manual_seed(0))
    survives = survivors(model, found, labels)
    assert sum(survives) < 4, "nothing was fooled at all"
    assert torch.equal(found[:2], images[:2])
    if kind != "pgd":  # it returns the worst point that it saw
        assert torch.equal(found[survives], images[survives])


@pytest.mark.parametrize("kind", FOOLING)
def test_labels_of_images_that_are_wrong_already_do_not_matter(kind: str) -> None:
    model, images = mlp(), images_of(5)
    right = own_labels(model, images)
    runs = []
    for shift in (1, 4):
        labels = torch.where(torch.arange(5) % 2 == 0, right, (right + shift) % 10)
        draws = [Generator().manual_seed(i) for i in range(5)]
        runs.append(attack_of(kind).run(model, images, labels, draws))
    assert torch.equal(*runs)


@pytest.mark.parametrize("kind", KINDS)
def test_image_by_image_the_same_in_every_batch_unless_it_says_so(kind: str) -> None:
    attack, side = attack_of(kind), 32 if kind == "corruption" else 8
    if attack.together:
        pytest.skip("its outcomes belong to the batch, and it says so")
    model, images = mlp(side=side).double(), images_of(5, side).double()
    labels = own_labels(model, images)

    def attacked(rows: list[int]) -> Tensor:
        return attack.run(model, images[rows], labels[rows], [Generator().manual_seed(row) for row in rows])

    whole = attacked([0, 1, 2, 3, 4])
    for rows in ([3], [4, 1]):
        assert torch.allclose(attacked(rows), whole[rows], rtol=0, atol=1e-5)  # searched in float32


@pytest.mark.parametrize("kind", KINDS)
def test_no_images_no_attack(kind: str) -> None:
    if kind == "corruption":
        pytest.skip("draws images one by one")
    model, images = mlp(), images_of(2)[:0]
    assert attack_of(kind).run(model, images, torch.zeros(0, dtype=torch.int64)).shape == images.shape


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_guard_brings_anything_back_and_leaves_what_is_inside(norm: str) -> None:
    images, eps = images_of(4).double(), 0.2
    wild = images + torch.tensor([0.0, 1e-4, 3.0, float("nan")]).view(4, 1, 1, 1)
    found = inside(wild, images, norm, eps)
    assert found.isfinite().all()
    assert found.min() >= 0
    assert found.max() <= 1
    assert distance(found, images, norm).max() <= eps + ROUNDING
    assert torch.equal(found[1], wild[1].clamp(0, 1))
