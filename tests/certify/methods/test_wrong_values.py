"""For any argument a call ends with an answer or with one line of one kind."""

import decimal
import fractions
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from certify import certified_radius, certify
from certify.api import certifier
from certizoo import UserError
from tests.tools.small_models import labelled, small_model


class Mute:
    """An object without a usable repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


class Named(str):
    """A string that changes when it is read."""

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(1, 8), torch.zeros(2, 8)], layout=torch.jagged)


def quantized(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x, 0.01, 0, torch.quint8)


ANYTHING: list[Any] = [
    Mute(), object(), 10**400, 10**5000, b"bytes", "text\nof two lines", "\ud800", {}, set(), (), [], 1j,
    math.nan, True, lambda: 0, type, torch.float32, nn.Linear(2, 2), np.zeros(3), slice(1),
]  # fmt: skip
MODELS = [*ANYTHING, None, nn.Linear(64, 4), nn.Identity(), nn.Sequential(), nn.ModuleList(), nn.Flatten()]
IMAGES: list[Any] = [
    *ANYTHING, None, nested(), quantized(torch.rand(2, 1, 8, 8)), torch.rand(2, 1, 8, 8).to("meta"),
    torch.rand(2, 1, 8, 8) * 1j, torch.rand(2, 1, 8, 8).to_sparse(), torch.rand(0, 1, 8, 8), torch.rand(2, 0, 8, 8),
    torch.rand(2, 1, 8), torch.rand(2, 3, 8, 8), torch.rand(2, 1, 7, 9), torch.full((2, 1, 8, 8), math.nan),
    torch.full((2, 1, 8, 8), 2.0), torch.full((2, 1, 8, 8), -1e-300, dtype=torch.float64), torch.rand(()),
    torch.rand(2, 1, 8, 8).to(torch.float8_e4m3fn), torch.rand(3, 1, 8, 8),
]  # fmt: skip
LABELS: list[Any] = [
    *ANYTHING, None, 0, [0, 1], torch.tensor([0, 4]), torch.tensor([0, -1]), torch.tensor([0.0, 1.0]),
    torch.tensor([0, 1]).to("meta"), torch.tensor([[0], [1]]), torch.tensor(0), torch.tensor([0]),
    torch.tensor([True, False]), torch.tensor([0, 2**62]), torch.tensor([0, 1]) * 1j, torch.tensor([0, 1]).to_sparse(),
    torch.tensor([0, 1], dtype=torch.uint16),
]  # fmt: skip
EPS: list[Any] = [
    *ANYTHING, None, -1, -1e-300, math.inf, -(10**400), np.longdouble("1e400"), np.float32("nan"), np.str_("1"),
    fractions.Fraction(1, 10), decimal.Decimal("0.1"), torch.tensor([0.1, 0.1, 0.1]), torch.tensor([0.1, math.nan]),
    torch.tensor(1j), torch.tensor(True), torch.tensor(0.1).to("meta"), torch.tensor([0.1, 0.1]).to_sparse(),
    quantized(torch.tensor([0.1, 0.1])), torch.zeros(2, 1), torch.empty(0),
]  # fmt: skip
METHODS = [*ANYTHING, None, "x" * 10_000, 3, "hope", "LOFAST", "", Named("lofast"), ["lofast"]]
NORMS = [*ANYTHING, None, "x" * 10_000, 2, "L2", "l1", "", math.inf, ["l2"]]
NONCES = [*ANYTHING, 5, 0, "", [1], 0.5, "\n", "\0"]

WRONG: dict[str, list[Any]] = {
    "model": MODELS, "images": IMAGES, "labels": LABELS, "eps": EPS, "method": METHODS, "norm": NORMS, "nonce": NONCES,
}  # fmt: skip
CALLS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "certify": (lambda model, images, labels, **a: certify(model, images, labels, **a), set(WRONG)),
    "certified_radius": (
        lambda model, images, labels, **a: certified_radius(model, images, labels, **a),
        set(WRONG) - {"eps"},
    ),
    "certifier": (certifier, {"model", "method", "norm", "nonce"}),
}


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("call", "argument"),
    [(call, argument) for call, (_, taken) in CALLS.items() for argument in WRONG if argument in taken],
)
def test_every_fault_is_one_line(call: str, argument: str) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    right = {"model": model, "images": x, "labels": y, "eps": 0.1, "method": "lofast", "norm": "l2", "nonce": "n"}
    made, taken = CALLS[call]
    made(**{key: right[key] for key in taken})
    for value in WRONG[argument]:
        with pytest.raises(UserError) as refused:
            made(**{key: value if key == argument else right[key] for key in taken})
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 400
        assert refused.value.__class__.__module__.split(".")[0] in ("certizoo", "zoo")


Around = Callable[[Callable[[Any, Tensor], Any], Any, Tensor], Any]  # for a call with model and images, both of these
AROUND: dict[str, tuple[Around, str]] = {
    "vmap": (lambda f, m, x: torch.func.vmap(lambda one: f(m, one[None]))(x), "transform of torch.func"),
    "grad": (lambda f, m, x: torch.func.grad(lambda x: f(m, x).sum())(x), "transform of torch.func"),
    "jvp": (lambda f, m, x: torch.func.jvp(lambda x: f(m, x), (x,), (x,)), "transform of torch.func"),
    "vmap over weights": (
        lambda f, m, x: torch.func.vmap(
            lambda w: torch.func.functional_call(Asked(f, m, x), {"model.head.weight": w}, ())
        )(m.head.weight[None]),
        "transform of torch.func",
    ),
    "a meta device": (lambda f, m, x: under(torch.device("meta"), f, m, x), "the default device is meta"),
    "a meta model": (lambda f, m, x: f(m.to("meta"), x), "no dense numbers"),
    "autocast": (lambda f, m, x: under(torch.autocast("cpu"), f, m, x), "autocast"),
}


class Asked(nn.Module):
    """A call whose weights torch.func may replace."""

    def __init__(self, f: Callable[[Any, Tensor], Any], model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.f, self.model, self.x = f, model, x

    def forward(self) -> Any:
        return self.f(self.model, self.x)


def under(context: Any, f: Callable[[Any, Tensor], Any], model: Any, x: Tensor) -> Any:
    with context:
        return f(model, x)


@pytest.mark.hostile
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("method", ["lofast", "adjoint", "best", "auto"])
def test_unsuitable_surroundings_are_refused_in_one_line(name: str, method: str) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    around, words = AROUND[name]
    asks: tuple[Callable[[Any, Tensor], Any], ...] = (
        lambda model, x: certify(model, x, y[: len(x)], 0.1, method).margin_B,
        lambda model, x: certified_radius(model, x, y[: len(x)], method),
    )
    for ask in asks:
        with pytest.raises(UserError, match=words) as refused:
            around(ask, model, x)
        assert "\n" not in str(refused.value)


@pytest.mark.hostile
def test_radii_inside_a_transform_are_refused_too() -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    with pytest.raises(UserError, match=r"transform of torch\.func"):
        torch.func.vmap(lambda eps: certify(model, x, y, eps).margin_B)(torch.tensor([0.1, 0.2]))
