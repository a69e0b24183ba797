"""Minimal-norm attacks find the distance to a boundary; a transferred attack never queries its target."""

import pytest
import torch
from torch import Generator, Tensor, nn

from certizoo import UserError
from certizoo.attacks import AttackConfig, make
from certizoo.attacks.minimal import CarliniWagner, DeepFool
from certizoo.attacks.norms import distance
from certizoo.attacks.transfer import Transfer
from tests.tools.attacked import images_of, mlp, own_labels, survivors, vit


def linear() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Return logits (<w,x> - b, 0), an image far from the box, and its distance to the boundary <w,x> = b."""
    w = torch.randn(16, generator=Generator().manual_seed(2))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    images = torch.full((1, 1, 4, 4), 0.5)
    with torch.no_grad():
        model.get_submodule("1").get_parameter("weight").copy_(torch.stack([w, torch.zeros(16)]))
        model.get_submodule("1").get_parameter("bias").copy_(torch.tensor([0.4 - 0.5 * w.sum(), 0.0]))
    return model, images, torch.tensor([0]), 0.4 / w.norm()


def test_minimal_attacks_find_the_distance_to_a_hyperplane() -> None:
    model, images, labels, least = linear()
    for attack, within in ((DeepFool(), 1.03), (CarliniWagner(c=10, steps=400), 1.1)):
        found = attack.run(model, images, labels)
        assert least <= distance(found, images, "l2") <= within * least
        assert not any(survivors(model, found, labels))


def test_carlini_wagner_does_not_count_what_is_farther_than_the_threshold() -> None:
    model, images, labels, least = linear()
    for share, counts in ((0.9, False), (1.5, True)):
        found = CarliniWagner(c=10, steps=400, threshold=share * float(least)).run(model, images, labels)
        assert torch.equal(found, images) != counts


def test_minimal_attacks_on_a_zoo_model_are_deterministic() -> None:
    model, images = vit().train(), images_of(4)
    labels = own_labels(model, images)
    for attack in (CarliniWagner(steps=10), DeepFool(steps=5)):
        assert torch.equal(*(attack.run(model.train(), images, labels) for _ in "ab"))


def test_minimal_attacks_refuse_in_words() -> None:
    for options, key in (({"kind": "cw_l2", "steps": 0}, "steps=0"), ({"kind": "cw_l2", "threshold": 0}, "threshold=0"),
                         ({"kind": "deepfool", "candidates": 1}, "candidates")):  # fmt: skip
        with pytest.raises(UserError, match=key):
            make(options)


def test_transfer_perturbs_against_the_source_and_never_asks_the_target() -> None:
    source, images = mlp(), images_of(6)
    labels = own_labels(source, images)
    attack = AttackConfig("l2", 0.5, steps=5, loss="margin")

    class Target(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the target is not the attack's to ask")

    transfer = Transfer(source, attack)
    found = transfer.run(Target(), images, labels, Generator().manual_seed(0))
    assert torch.equal(found, attack.run(source, images, labels, Generator().manual_seed(0)))
    assert (transfer.norm, transfer.eps, transfer.together) == ("l2", 0.5, False)
    assert not all(survivors(source, found, labels))
