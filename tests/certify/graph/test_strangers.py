"""Models as they are found elsewhere: certified, or refused in one line that says what to do."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from certify import certified_radius
from certizoo import UserError

SHAPE = (3, 4, 4)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).eval()


def called(model: nn.Module) -> nn.Module:
    """Call it with gradients, as in training."""
    model(torch.rand(1, *SHAPE))
    return model


def with_weight_norm() -> nn.Module:
    model = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[1])
    return called(model)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: nn.Module = torch.jit.trace(plain(), torch.rand(1, *SHAPE))
    return found


def compiled_part() -> nn.Module:
    model = plain()
    model.add_module("2", torch.compile(nn.Identity()))  # type: ignore[arg-type]
    return model


class Model(nn.Module):
    """A linear layer, and a forward that may use it."""

    def __init__(self, forward: Callable[["Model", Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.fc, self.own = nn.Linear(48, 3), forward
        for name, part in parts.items():
            setattr(self, name, part)

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(x.flatten(1))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def caching() -> Model:
    """Return a model that computes a constant once, as LeViT does its biases."""

    def forward(model: Any, x: Tensor) -> Tensor:
        if "cpu" not in model.cache:
            model.cache["cpu"] = model.fc.bias.flip(0)
        found: Tensor = model.logits(x) + model.cache["cpu"]
        return found

    return Model(forward, cache={})


def in_half(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.logits(x)
    return found.float()


def through_a_list(model: Any, x: Tensor) -> Tensor:
    """Use a layer that model.double() does not reach."""
    found: Tensor = model.more[0](model.logits(x))
    return found


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "the older weight_norm": (with_weight_norm, r"1\.weight keeps the result .* call remove_weight_norm"),
    "a kept result": (lambda: called(caching()), r"cache keeps the result .* clear it and call the model under torch"),
    "a lazy layer that was never called": (
        lambda: Model(Model.logits, extra=nn.LazyLinear(5)),
        "extra.weight has no numbers yet; call the model once",
    ),
    "TorchScript": (scripted, "certify the model it was made from"),
    "a compiled part": (compiled_part, "2 is compiled; .* 2._orig_mod"),
    "layers in a list": (
        lambda: Model(through_a_list, more=[nn.Linear(3, 3)]),
        r"does not run in float64: .* register every weight .*nn\.ModuleList",
    ),
    "a branch on a weight": (
        lambda: Model(lambda model, x: model.logits(x) if model.fc.weight.sum() > 0 else -model.logits(x)),
        "decides by the values of a tensor.* take the decision in __init__",
    ),
    "autocast inside": (lambda: Model(in_half), "without torch.autocast"),
    "images of another size": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(7, 3)),
        r"does not take images of \(3, 4, 4\).* pass images of its size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(UserError, match=words) as refused:
        certified_radius(make().eval(), torch.rand(2, *SHAPE), torch.tensor([0, 1]), method="lofast")
    assert "\n" not in str(refused.value)


@torch.no_grad()
def test_a_constant_that_is_kept_is_certified() -> None:
    model, x = caching().eval(), torch.rand(2, *SHAPE)
    assert certified_radius(model, x, model(x).argmax(-1), method="lofast").min() > 0


HELD: dict[str, Callable[[], nn.Module]] = {
    "traced by torch.fx": lambda: fx.symbolic_trace(plain()),
    "in DataParallel": lambda: nn.DataParallel(plain()),
    "a lazy layer that was called": lambda: called(nn.Sequential(nn.Flatten(), nn.LazyLinear(3))),
}


@pytest.mark.parametrize("name", HELD)
@torch.no_grad()
def test_it_has_the_radius_of_the_plain_model(name: str) -> None:
    model, x, plainly = HELD[name]().eval(), torch.rand(2, *SHAPE), plain()
    if name.startswith("a lazy"):
        model.load_state_dict(plainly.state_dict())
    y = plainly(x).argmax(-1)
    expected = certified_radius(plainly, x, y, method="lofast", nonce="strangers")
    assert expected.min() > 0
    torch.testing.assert_close(certified_radius(model, x, y, method="lofast", nonce="strangers"), expected)
