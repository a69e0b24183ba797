"""Models of strangers that mislead a capture: what they compute elsewhere is certified, or they are refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certify import certified_radius
from certify.api import certifier
from certizoo import UserError
from tests.tools.ascent import ascend, margin_loss
from zoo.rules import NoRule

SHAPE = (3, 8, 8)
Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    mean: Tensor
    ones: Tensor
    bias: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.own = nn.Linear(192, 3), forward
        for name, numbers in (("mean", [0.0, 0.0, 0.0]), ("ones", [1.0, 1.0, 1.0]), ("bias", [1.0, 2.0, 3.0])):
            self.register_buffer(name, torch.tensor(numbers))

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(x.flatten(1))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def radius(forward: Forward, method: str = "adjoint") -> tuple[Model, Tensor, Tensor, Tensor]:
    model = Model(forward).eval()
    x = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = model(x.clone()).argmax(-1)
    return model, x, y, certified_radius(model, x, y, method=method, nonce="tricks")


def negative_when_bright(model: Model, x: Tensor) -> Tensor:
    bright = (x.mean((1, 2, 3)) > 0.9)[:, None]
    return torch.where(bright, -model.logits(x), model.logits(x))


def floor_of_the_bright(model: Model, x: Tensor) -> Tensor:
    length = x.flatten(1).norm(dim=1).clamp_min(1e-3)[:, None, None, None]
    gate = F.relu(x.mean((1, 2, 3), keepdim=True) - 0.9)
    return model.logits(x + gate * torch.div(x, length, rounding_mode="floor"))


REFUSED: dict[str, tuple[Forward, str]] = {
    "an image alone is another case": (
        lambda model, x: negative_when_bright(model, x) if len(x) == 1 else model.logits(x),
        "computes other logits than its captured graph",
    ),
    "the brightest image is another case": (
        lambda model, x: (
            -model.logits(x) if not torch.compiler.is_compiling() and bool((x == 1).all()) else model.logits(x)
        ),
        "computes other logits than its captured graph",
    ),
    "it writes to its images": (
        lambda model, x: model.logits(x.sub_(F.relu(x - F.relu(0.5 - 10 * (x - 0.5))))),
        "writes to its images",
    ),
    "a rounded quotient by lengths": (floor_of_the_bright, "div"),
    "a batch norm of three axes": (
        lambda model, x: model.logits(F.batch_norm(x.unsqueeze(2), model.mean, model.ones)),
        "a batch norm of more than two axes",
    ),
    "a power of the image": (lambda model, x: model.logits(2**x), "an exponent that depends on the image"),
    "the mean of the batch": (lambda model, x: model.logits(x - x.mean()), "over the images of a batch"),
    "the sum of the batch": (lambda model, x: model.logits(x - x.sum()), "over the images of a batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name: str) -> None:
    forward, words = REFUSED[name]
    with pytest.raises((UserError, NoRule), match=words) as refused:
        radius(forward)
    assert "\n" not in str(refused.value)


HELD: dict[str, Forward] = {
    "a batch norm with a bias alone": lambda model, x: model.logits(
        F.batch_norm(x, model.mean, model.ones, None, model.bias)
    ),
    "less the mean of an image": lambda model, x: model.logits(x - x.mean((1, 2, 3), keepdim=True)),
    "times the mean of an image": lambda model, x: model.logits(x * x.flatten(1).mean(1)[:, None, None, None]),
    "a sum within a sum": lambda model, x: model.logits(x + F.relu(x + F.relu(x - 0.4))),
    "an operation in place behind the first": lambda model, x: model.logits(F.relu(x - 0.5, inplace=True)),
}


@pytest.mark.parametrize("name", HELD)
def test_no_attack_beats_its_radius(name: str) -> None:
    model, x, y, radius_B = radius(HELD[name])
    assert (radius_B > 1e-4).all()
    loss = margin_loss(model.double(), y)
    assert (ascend(loss, x.double(), radius_B, 50, 4) < 0).all()


def test_a_mask_of_truth_values_that_is_added_is_added() -> None:
    """It adds 1 where it is true, and leaves no key out."""

    def attend(model: Model, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        q, k, v = tokens @ model.turn[0], tokens @ model.turn[1], tokens @ model.turn[2]  # type: ignore[index]
        weights = (q @ k.mT + model.mask).softmax(-1)  # type: ignore[operator]
        return model.fc((weights @ v).flatten(1))

    model = Model(attend)
    model.turn = nn.Parameter(torch.eye(3).repeat(3, 1, 1))
    model.register_buffer("mask", torch.arange(64) % 2 == 0)
    x = torch.rand(2, *SHAPE)
    with torch.no_grad():
        y = model.eval()(x).argmax(-1)
    radius_B = certified_radius(model, x, y, method="lofast_local", nonce="tricks")
    loss = margin_loss(model.double(), y)
    assert (ascend(loss, x.double(), radius_B, 50, 4) < 0).all()


class Turned(nn.Module):
    """-fc(x), and fc(x) in every copy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.sign = nn.Linear(192, 3), -1.0

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"sign": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.sign * self.fc(x.flatten(1))
        return found


def test_a_copy_that_is_another_model_is_refused() -> None:
    model, x = Turned().eval(), torch.rand(2, *SHAPE)
    with pytest.raises(UserError, match="does not reproduce the model's margins"):
        certified_radius(model, x, torch.tensor([0, 1]), method="adjoint")


def test_a_model_keeps_its_modes() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).train()
    model[2].eval()
    certified_radius(model, torch.rand(2, *SHAPE), torch.tensor([0, 1]), method="lofast")
    assert [module.training for module in model.modules()] == [True, True, True, False, True]


def test_a_certifier_is_for_one_size() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    images, labels = torch.rand(2, *SHAPE), torch.tensor([0, 1])
    prover = certifier(model.eval(), "adjoint", batch=(images, labels))
    with pytest.raises(UserError, match="captured for images of"):
        prover.analyse(torch.rand(2, 3, 16, 16), labels)
