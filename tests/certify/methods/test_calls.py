"""Meaningless calls end with one line of one kind; calls that can mean only one thing are accepted."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from certify import certified_radius, certify, evaluate
from certizoo import UserError
from tests.tools.cases import mostly_slow
from tests.tools.small_models import labelled, small_model

Call = Callable[[Any, Tensor, Tensor], Any]  # model, images, labels
X: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "list": (lambda x: x.tolist(), "images are a list"),
    "array": (lambda x: x.numpy(), "images are a ndarray"),
    "None": (lambda x: None, "images are a NoneType"),
    "bytes": (lambda x: (x > 0.5).to(torch.uint8), r"images are torch\.uint8"),
    "integers": (lambda x: (x > 0.5).long(), r"images are torch\.int64"),
    "bools": (lambda x: x > 0.5, r"images are torch\.bool"),
    "half": (lambda x: x.half(), r"images are torch\.float16"),
    "complex": (lambda x: x + 0j, r"images are torch\.complex64"),
    "sparse": (lambda x: x.to_sparse(), "no dense numbers"),
    "meta": (lambda x: x.to("meta"), "no dense numbers"),
    "NaN": (lambda x: x.index_fill(0, torch.tensor([1]), torch.nan), r"in \[0,1\]"),
    "infinite": (lambda x: x / 0, r"in \[0,1\]"),
    "bytes as floats": (lambda x: x * 255, r"in \[0,1\]"),
    "normalised": (lambda x: x - 0.5, r"in \[0,1\]"),
    "no batch": (lambda x: x[0], r"\(B, C, H, W\)"),
    "empty": (lambda x: x[:0], r"\(B, C, H, W\)"),
    "fewer": (lambda x: x[:2], r"\(B, C, H, W\)"),
    "three channels": (lambda x: x.repeat(1, 3, 1, 1), "does not take images of"),
    "another size": (lambda x: x[..., :4], "does not take images of"),
    "channels last": (lambda x: x.permute(0, 2, 3, 1), "does not take images of|channels"),
}
Y: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "list": (lambda y: y.tolist(), "labels are a list"),
    "array": (lambda y: y.numpy(), "labels are a ndarray"),
    "one": (lambda y: 1, "labels are a int"),
    "floats": (lambda y: y + 0.7, r"labels are torch\.float32"),
    "bools": (lambda y: y > 0, r"labels are torch\.bool"),
    "one-hot": (lambda y: torch.eye(4)[y].long(), r"labels \(B,\)"),
    "a column": (lambda y: y[:, None], r"labels \(B,\)"),
    "scalar": (lambda y: y[0], r"labels \(B,\)"),
    "negative": (lambda y: y - 4, r"0\.\.3"),
    "too large": (lambda y: y + 4, r"0\.\.3"),
    "too large for their type": (lambda y: (y + 252).to(torch.uint8), r"0\.\.3"),
}
EPS: dict[str, Any] = {
    "NaN": torch.nan, "negative": -0.1, "infinite": torch.inf, "text": "0.1", "None": None, "bool": True,
    "list": [0.1], "complex": 0.1j, "two for four": torch.tensor([0.1, 0.2]),
    "a NaN among them": torch.full((4,), torch.nan),
    "a matrix": torch.zeros(4, 4), "bools": torch.ones(4, dtype=torch.bool), "complex tensor": torch.zeros(4) * 1j,
}  # fmt: skip
METHOD: dict[str, Any] = {"unknown": "hope", "None": None, "number": 3, "list": ["lofast"], "function": certify}
MODEL: dict[str, Any] = {"function": lambda x: x, "class": torch.nn.Linear, "None": None, "state dict": {"w": 1}}
TABLE: dict[str, dict[str, Any]] = {
    "one eps": {"eps": 0.1}, "text eps": {"eps": "0.1"}, "no eps": {"eps": []}, "an eps twice": {"eps": [0.1, 0.1]},
    "NaN among eps": {"eps": [0.1, torch.nan]}, "keys": {"eps": [0.1], "keys": ["a"]},
    "attack": {"eps": [0.1], "attack": "pgd"},
}  # fmt: skip
CALLS: dict[str, Call] = {
    "certify": lambda model, x, y: certify(model, x, y, eps=0.1, method="lofast"),
    "certified_radius": lambda model, x, y: certified_radius(model, x, y, "lofast"),
    "evaluate": lambda model, x, y: evaluate(model, x, y, eps=[0.1]),
}
WRONG: dict[str, tuple[Any, str]] = (
    {
        f"{call}, images: {name}": (lambda m, x, y, call=call, f=f: CALLS[call](m, f(x), y), words)
        for call in CALLS
        for name, (f, words) in X.items()
    }
    | {
        f"{call}, labels: {name}": (lambda m, x, y, call=call, f=f: CALLS[call](m, x, f(y)), words)
        for call in CALLS
        for name, (f, words) in Y.items()
    }
    | {
        f"{call}, model: {name}": (lambda m, x, y, call=call, bad=bad: CALLS[call](bad, x, y), "the model is a")
        for call in CALLS
        for name, bad in MODEL.items()
    }
    | {f"eps: {name}": (lambda m, x, y, e=e: certify(m, x, y, eps=e), "eps=") for name, e in EPS.items()}
    | {
        f"method: {name}": (lambda m, x, y, bad=bad: certify(m, x, y, eps=0.1, method=bad), "no certification method")
        for name, bad in METHOD.items()
    }
    | {
        f"evaluate: {name}": (lambda m, x, y, o=o: evaluate(m, x, y, **o), "eps=|keys|attack")
        for name, o in TABLE.items()
    }
)


@pytest.mark.hostile
@pytest.mark.parametrize("name", mostly_slow(WRONG, *list(WRONG)[::4]))
def test_a_call_that_means_nothing_is_refused_in_one_line(name: str) -> None:
    call, words = WRONG[name]
    model = small_model("standard", 0)
    x, y = labelled(model, 4, 0)
    with pytest.raises(UserError, match=words) as refused:
        call(model, x, y)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


class Answering(Tensor):
    """A tensor that overrides torch functions with its own answers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("it was asked")


SAME: dict[str, Call] = {
    "images that answer for themselves": lambda m, x, y: (m, x.as_subclass(Answering), y),
    "labels that answer for themselves": lambda m, x, y: (m, x, y.as_subclass(Answering)),
    "float64 images": lambda m, x, y: (m, x.double(), y),
    "images that need a gradient": lambda m, x, y: (m, x.clone().requires_grad_(), y),
    "images of another layout": lambda m, x, y: (m, x.to(memory_format=torch.channels_last), y),
    "bytes for labels": lambda m, x, y: (m, x, y.to(torch.uint8)),
    "int32 labels": lambda m, x, y: (m, x, y.to(torch.int32)),
}


@pytest.mark.parametrize("name", mostly_slow(SAME, *list(SAME)[::3]))
def test_what_can_mean_one_thing_only_is_taken(name: str) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 4, 0)
    again = SAME[name](model, x, y)
    of_lofast = partial(certified_radius, method="lofast")
    torch.testing.assert_close(of_lofast(*again), of_lofast(model, x, y), rtol=1e-6, atol=0)
    table, same = evaluate(model, x, y, eps=[0.1], method="lofast"), evaluate(*again, eps=[0.1], method="lofast")
    assert list(table["pgd.0.1"]) == list(same["pgd.0.1"])


@pytest.mark.parametrize(
    "eps", [0, 1, np.float32(0.25), torch.tensor(0.25), torch.tensor([0.0, 0.1, 0.2, 3.0])], ids=str
)
def test_an_eps_is_any_number_or_one_an_image(eps: Any) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 4, 0)
    certificate = certify(model, x, y, eps=eps, method="lofast")
    expected = torch.as_tensor(eps, dtype=torch.float64).expand(4)
    assert torch.equal(certificate.eps_B, expected)
    assert torch.equal(certificate.certified_B, certified_radius(model, x, y, "lofast") >= expected)


SEEDS = (1, 2, 5)


def nearly_tied(seed: int) -> tuple[Any, Tensor]:
    """Return a model whose two best classes float32 cannot tell apart, and the image."""
    model = small_model("standard", seed)
    x, _ = labelled(model, 1, seed)
    exact = small_model("standard", seed).double()
    with torch.no_grad():
        for _ in range(4):
            exact.head.bias.copy_(model.head.bias)
            first, second = exact(x.double())[0].topk(2).indices
            model.head.bias[first] -= (exact(x.double())[0, first] - exact(x.double())[0, second]).float()
    return model, x


@pytest.mark.hostile
@pytest.mark.parametrize("method", mostly_slow(("lofast", "adjoint", "best"), "lofast"))
def test_a_label_that_the_given_model_does_not_give_is_never_certified(method: str) -> None:
    """At near ties the float64 function and the given model disagree; each alone could mislead."""
    differ = 0
    for seed in SEEDS:
        model, x = nearly_tied(seed)
        with torch.no_grad():
            served = model(x).argmax(-1)
            exact = copy.deepcopy(model).double()(x.double()).argmax(-1)
        differ += int((served != exact).any())
        for y in (served, exact):
            certificate = certify(model, x, y, eps=0.0, method=method)
            assert not certificate.certified_B.any() or bool(((served == y) & (exact == y)).all())
            assert not (certified_radius(model, x, y, method=method)[served != y] > 0).any()
    assert differ, "no tie that float32 decides otherwise: the test says nothing"
