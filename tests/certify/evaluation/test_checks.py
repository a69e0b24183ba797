"""The attack checks flag models that hide their gradients, by name, and do not flag a plain trained model."""

from collections.abc import Callable, Mapping

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from certify.evaluation import checks
from certify.evaluation.evaluate_block import in_dtype
from certizoo.attacks import AttackConfig
from certizoo.attacks.attack import Attack
from certizoo.attacks.auto import AutoAttack

CLASSES, SIDE = 4, 6


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    """Return a small trained classifier of four noisy patterns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 32), nn.GELU(), nn.Linear(32, CLASSES))
    images, labels = samples(256)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def samples(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    patterns = torch.rand(CLASSES, 3, SIDE, SIDE, generator=generator)
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    noise = 0.2 * torch.randn(n, 3, SIDE, SIDE, generator=generator)
    return (patterns[labels] + noise).clamp(0, 1), labels


def case(model: nn.Module) -> checks.Case:
    """Return correctly classified images and the ball in which the checks attack them."""
    images, labels = samples(24)
    right = model(images).argmax(1) == labels
    return checks.Case(model, images[right], labels[right], "linf", 0.03)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module, change: Callable[[Tensor], Tensor], before: bool = False) -> None:
        super().__init__()
        self.model, self.change, self.before = model, change, before

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.change(x)) if self.before else self.change(self.model(x))


def quantised(x: Tensor) -> Tensor:
    return (8 * x).round() / 8


def names(model: nn.Module) -> set[str]:
    return {flag.name for flag in checks.of_model(case(model))}


def test_a_plain_model_is_not_flagged(plain: nn.Module) -> None:
    assert len(case(plain).labels_B) >= 20
    assert names(plain) == set()


def test_quantised_activations_and_saturated_logits_are_flagged(plain: nn.Module) -> None:
    """The masked model combines both faults; each fault is also tested alone."""
    stairs = Wrapped(plain, quantised, before=True)
    assert {"zero_gradients", "large_ball_leaves_accuracy"} <= names(Wrapped(stairs, lambda z: 1e4 * z))
    assert {"zero_gradients", "large_ball_leaves_accuracy"} <= names(stairs)
    assert "zero_gradients" in names(Wrapped(plain, lambda z: 1e4 * z))


def test_square_beats_an_attack_without_gradients(plain: nn.Module) -> None:
    images, labels = samples(24)
    stairs = Wrapped(plain, quantised, before=True)
    right = stairs(images).argmax(1) == labels
    asked = checks.Case(stairs, images[right], labels[right], "linf", 0.3)
    assert list(checks.black_box_beats_white_box(asked))


def test_randomness_probabilities_and_precision_are_flagged(plain: nn.Module) -> None:
    assert "random_answers" in names(Wrapped(plain, lambda z: z + 1e-3 * torch.randn_like(z)))
    assert "softmax_outputs" in names(Wrapped(plain, lambda z: z.softmax(1)))
    assert "lower_precision" in names(in_dtype(plain, "bfloat16"))


class Trap(nn.Module):
    """A margin that falls where u, the mean change in units of 0.03, passes 0.66.

    A dip from 0.2 to 0.28 lies on the way. Steps of 0.125 may jump over it; steps of 0.025 cannot.
    """

    def forward(self, x: Tensor) -> Tensor:
        u = (x - 0.5).flatten(1).mean(1, keepdim=True) / 0.03
        rise = torch.where(u < 0.2, u, torch.where(u < 0.28, 0.4 - u, u - 0.16))
        return torch.cat([0.5 - rise, torch.zeros_like(u)], 1)


def test_steps_that_are_caught_on_the_way_are_flagged() -> None:
    grey = checks.Case(Trap(), torch.full((24, 3, 4, 4), 0.5), torch.zeros(24, dtype=torch.long), "linf", 0.03)
    (said,) = checks.more_steps_raise_accuracy(grey)
    assert "leaves 24 of 24 images" in said


def test_no_images_no_flags(plain: nn.Module) -> None:
    images, labels = samples(2)
    assert checks.of_model(checks.Case(plain, images[:0], labels[:0], "l2", 0.5)) == []


def test_every_check_says_why_it_is_there() -> None:
    assert len({check.__name__ for check in checks.CHECKS}) == len(checks.CHECKS) == 7


@pytest.mark.parametrize(
    ("broken_by", "flagged"),
    [
        ({"pgd20": [0], "pgd100": [0], "auto": [0, 1]}, []),
        ({"pgd20": [0, 1], "pgd100": [0], "auto": [0, 1]}, ["pgd20 breaks 1 images that pgd100 does not: b"]),
        ({"pgd20": [0], "pgd100": [0, 1], "auto": [0, 2]}, ["pgd100 breaks 1 images that auto does not: b"]),
        ({"pgd20": [0], "pgd100": [0], "other": [0, 1, 2]}, []),
    ],
)
def test_attacks_the_wrong_way_round_are_flagged(broken_by: Mapping[str, list[int]], flagged: list[str]) -> None:
    known: dict[str, Attack] = {
        "pgd20": AttackConfig(norm="l2", eps=0.5, steps=20),
        "pgd100": AttackConfig(norm="l2", eps=0.5, steps=100),
        "auto": AutoAttack(norm="l2", eps=0.5),
        "other": AttackConfig(norm="linf", eps=0.5, steps=1),
    }
    attacks = {name: known[name] for name in broken_by}
    table = pd.DataFrame({"key": ["a", "b", "c", "d"]})
    for name, broken in broken_by.items():
        table[f"survives.{name}"] = [i not in broken for i in range(4)]
    assert [flag.message for flag in checks.of_table(table, attacks)] == flagged
