"""Our PGD and foolbox's take the same steps from the same start and reach the same accuracy.

benchmarks/bench_attacks.py compares their speeds.
"""

from typing import Any

import eagerpy
import foolbox
import pytest
import torch
from torch import Generator, Tensor, nn

from certizoo.attacks import AttackConfig, pgd
from certizoo.attacks.loop import probing
from tests.tools.small_models import SMALL
from tests.tools.trials import trained

IMAGES, STEPS = 1000, 10
KINDS: dict[str, Any] = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD}


class Flat(nn.Module):
    """A model with constant logits, so that PGD returns its start."""

    def forward(self, x: Tensor) -> Tensor:
        return 0 * x.flatten(1)[:, :4]


@pytest.fixture(scope="module")
def subject() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a small trained model and noisy pictures of its four classes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(288, SMALL["num_classes"]))
    prototypes, generator = torch.rand(4, 1, 8, 8), Generator().manual_seed(1)
    model = trained(net, prototypes).eval()
    labels = torch.arange(IMAGES) % 4
    return model, (prototypes[labels] + 0.2 * torch.randn(IMAGES, 1, 8, 8, generator=generator)).clamp(0, 1), labels


@pytest.mark.parametrize("random_start", [False, True])
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.2), ("l2", 1.25)])
def test_the_same_accuracy_as_foolbox(
    subject: tuple[nn.Module, Tensor, Tensor], norm: str, eps: float, random_start: bool
) -> None:
    model, images, labels = subject
    alpha = 2.5 * eps / STEPS

    def start() -> Tensor:
        one = AttackConfig(norm, eps, steps=1)
        return pgd(Flat(), images, labels, one, Generator().manual_seed(0), keep_worst=False)

    theirs = KINDS[norm](abs_stepsize=alpha, steps=STEPS, random_start=random_start)
    theirs.get_random_start = lambda x, epsilon: eagerpy.astensor(start())
    with probing(model):
        found = theirs.run(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), images, labels, epsilon=eps)
    attack = AttackConfig(norm, eps, STEPS, alpha, random_start)
    ours = pgd(model, images, labels, attack, Generator().manual_seed(0), keep_worst=False)
    robust = [(model(x).argmax(1) == labels).float().mean().item() for x in (images, found, ours)]
    assert abs(robust[1] - robust[2]) <= 0.005
    assert 0.05 < robust[1] < robust[0] - 0.05, "an attack that does something, and not all"
