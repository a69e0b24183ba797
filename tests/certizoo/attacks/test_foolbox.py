"""foolbox as oracle: our PGD reaches its accuracy from the same start, our minimal-norm attacks find its points.

benchmarks/bench_attacks.py compares their speeds.
"""

from typing import Any

import eagerpy
import foolbox
import pytest
import torch
from torch import Generator, Tensor, nn

from certizoo.attacks import AttackConfig, make, pgd
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


def theirs(options: dict[str, Any]) -> Any:
    """Return foolbox's attack with our options; its search ends early where the sum over a batch does not fall."""
    own = {key: value for key, value in options.items() if key != "kind"}
    if options["kind"] == "deepfool":
        return foolbox.attacks.L2DeepFoolAttack(**own)
    own = {"steps": 100, "binary_search_steps": 1, **own}
    lr, c = own.pop("lr", 0.01), own.pop("c", 1.0)
    return foolbox.attacks.L2CarliniWagnerAttack(stepsize=lr, initial_const=c, abort_early=False, **own)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "cw_l2", "c": 10.0},
        {"kind": "cw_l2", "binary_search_steps": 4, "c": 10.0},
        {"kind": "cw_l2", "binary_search_steps": 10, "steps": 20, "lr": 0.05},
        {"kind": "cw_l2", "c": 10.0, "confidence": 0.5},
        {"kind": "deepfool"},
        {"kind": "deepfool", "candidates": 2, "steps": 3},
    ],
    ids=str,
)
def test_the_points_of_foolbox(subject: tuple[nn.Module, Tensor, Tensor], options: dict[str, Any]) -> None:
    """Carlini & Wagner of foolbox returns a black image where it finds nothing; ours returns the image."""
    model, images, labels = subject
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).nonzero()[:60, 0]
    images, labels = images[right], labels[right]
    with probing(model):
        found = theirs(options).run(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), images, labels)
    ours = make(options).run(model, images, labels)
    found = torch.where(found.flatten(1).any(1)[:, None, None, None], found, images)
    with torch.no_grad():
        fooled = model(found).argmax(1) != labels
    assert fooled.float().mean() > 0.5
    torch.testing.assert_close(ours[fooled], found[fooled], rtol=0, atol=1e-5)
    assert torch.equal(ours[~fooled], images[~fooled])
