"""The attention-aware loss follows its equation and moves every kind of block."""

from typing import Any

import pytest
import torch
from torch import Generator

import zoo
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.attacks.attention import WEIGHT, loss_of, pull
from certizoo.attacks.losses import ce
from certizoo.attacks.norms import NORMS, distance
from tests.tools.attacked import ROUNDING, images_of, mlp, own_labels, survivors, vit
from tests.tools.small_models import PARTS, SMALL

ATTENTIVE = {
    "dp_vit_ti": PARTS["standard"],
    "l2_vit_ti": PARTS["standard"],
    "scsa_vit_ti": PARTS["standard"],
    "dp_convit_ti": {"patch_size": 2, "embed_dim": 16, "depth": 3, "num_heads": 2},
    "dp_swin_t": {"patch_size": 1, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4},
}


@pytest.mark.parametrize("name", ATTENTIVE)
def test_the_attention_loss_pulls_in_every_kind_of_block(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.create_model(name, **(SMALL | ATTENTIVE[name])).eval()
    images = images_of(3).requires_grad_(True)
    labels = torch.tensor([0, 1, 2])
    before = sum(len(module._forward_pre_hooks) for module in model.modules())
    with loss_of("attention", model) as fool:
        logits = model(images)
        loss_B = fool(logits, labels)
        alone = fool(model(images[1:2]), labels[1:2])
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == before
    pulled_B = (loss_B - ce(logits, labels)) / WEIGHT
    (grad,) = torch.autograd.grad(pulled_B.sum(), images)
    assert grad.flatten(1).norm(dim=1).min() > 0
    assert torch.allclose(alone, loss_B[1:2], atol=1e-4), "an image's loss does not depend on its neighbours"


def test_the_pull_is_its_equation() -> None:
    model = vit().double()
    attention: Any = model.get_submodule("blocks.0.attn")
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    q, k, _ = attention.heads(x)
    slow = torch.zeros(2, 5, dtype=torch.float64)
    for b in range(2):
        for j in range(5):
            for h in range(2):
                for n in range(5):
                    slow[b, j] += attention.scale * (q[b, h, n] @ k[b, h, j]) / (2 * 5)
    assert torch.allclose(pull(attention, x), slow)


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_pgd_on_attention_stays_in_the_ball_and_takes_its_hooks_along(norm: str) -> None:
    model, images = vit(), images_of(6)
    labels, eps = own_labels(model, images), {"linf": 0.1, "l2": 0.8}[norm]
    attack = AttackConfig(norm, eps, steps=8, loss="attention", stop_when_fooled=True)
    found = attack.run(model, images, labels, Generator().manual_seed(0))
    assert distance(found, images, norm).max() <= eps + ROUNDING
    assert not all(survivors(model, found, labels))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    with pytest.raises(AssertionError):
        attack.run(model, images[..., :5], labels)
    assert not any(module._forward_pre_hooks for module in model.modules()), "also after an exception"


def test_the_attention_loss_refuses_a_model_without() -> None:
    with pytest.raises(UserError, match="Sequential has no dot-product attention; use margin"):
        AttackConfig("l2", 0.5, loss="attention").run(mlp(), images_of(2), torch.tensor([0, 1]))
