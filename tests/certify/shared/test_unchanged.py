"""A certifier holds for the model as it was when it was made: once the model changes, it refuses to answer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from certify import certify
from certify.api import certifier, radius_of
from certify.methods import METHODS
from certify.methods.served import ServedAdjoint, ServedImage, ServedLoFAST
from certify.shared.certificate import Certifier
from certify.shared.unchanged import Snapshot
from certizoo import UserError
from tests.tools.small_models import labelled, small_model

MAKE: dict[str, Callable[[nn.Module], Certifier]] = {
    **{name: partial(certifier, method=name, nonce="a") for name in METHODS},
    "served by adjoint": lambda model: ServedAdjoint(model, torch.float32, "a"),
    "served by image": lambda model: ServedImage(model, torch.float32, "a"),
    "served by lofast": lambda model: ServedLoFAST(model, torch.float32),
}


def negate(model: Any) -> None:
    model.head.weight.mul_(-1)


def negate_data(model: Any) -> None:
    model.head.weight.data.mul_(-1)


def negate_numbers(model: Any) -> None:
    model.head.weight.detach().numpy()[:] *= -1


def other_weight(model: Any) -> None:
    model.head.weight = nn.Parameter(-model.head.weight)


def other_module(model: Any) -> None:
    model.head = nn.Linear(model.head.in_features, model.head.out_features)


def one_more(model: Any) -> None:
    model.blocks.append(model.blocks[0])


def one_less(model: Any) -> None:
    del model.blocks[1]


def narrowed(model: Any) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def other_option(model: Any) -> None:
    model.blocks[0].attn.num_heads = 1


SEEN: dict[str, Callable[[Any], None]] = {
    f.__name__: f for f in (negate, other_weight, other_module, one_more, one_less, narrowed, other_option)
}
CHANGES = SEEN | {f.__name__: f for f in (negate_data, negate_numbers)}  # and without torch noticing
PARTS: dict[str, Callable[[Any, Any], Any]] = {
    "given": lambda model, made: model,
    "baked": lambda model, made: made.baked,
    "served": lambda model, made: getattr(made, "model", None) or made.certifiers[0].model.served,
}


@pytest.mark.hostile
@pytest.mark.parametrize("method", MAKE)
@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_every_method_checks(method: str, part: str) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    made = MAKE[method](model)
    analysis = made.analyse(x, y)
    changed = PARTS[part](model, made)
    negate(getattr(changed, "served", changed))
    for ask in (lambda: made.analyse(x, y).at(0.0), lambda: analysis.at(0.0)):
        with pytest.raises(UserError, match=r"the weights of head\.weight changed .* create a new certifier"):
            ask()
    if part == "given":
        assert float(radius_of(MAKE[method](model).analyse(x, y)).max()) == 0  # its answer would have been false


@pytest.mark.hostile
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_every_change_is_seen(change: str) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    made = certifier(model, "lofast")
    analysis = made.analyse(x, y)
    CHANGES[change](model)
    with pytest.raises(UserError, match="changed since this certifier was made"):
        made.analyse(x, y)
    if change in SEEN:
        with pytest.raises(UserError, match="changed since this certifier was made"):
            analysis.at(0.01)


@torch.no_grad()
def test_what_leaves_the_numbers_alone_is_no_change() -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    made = certifier(model, "lofast")
    before = radius_of(made.analyse(x, y))
    model.load_state_dict(model.state_dict())
    model.train()
    model.head.weight = nn.Parameter(model.head.weight.clone())
    model.double().float()
    assert torch.equal(radius_of(made.analyse(x, y)), before)
    del model
    assert torch.equal(radius_of(made.analyse(x, y)), before)


@torch.no_grad()
def test_weights_that_were_made_in_inference_mode_are_held_by_their_numbers() -> None:
    with torch.inference_mode():
        model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    made = certifier(model, "lofast")
    made.analyse(x, y)
    with torch.inference_mode():
        negate(model)
    with pytest.raises(UserError, match=r"head\.weight changed"):
        made.analyse(x, y)


@torch.no_grad()
def test_images_and_labels_that_are_written_over_change_no_analysis() -> None:
    """Analyses are computed lazily, piece by piece."""
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    x, expected = x.double(), certify(model, x, y, 0.01, "best", nonce="a")
    analysis = certifier(model, "best", nonce="a").analyse(x, y)
    x.zero_()
    y.zero_()
    assert torch.equal(analysis.at(0.01).loss_B, expected.loss_B)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_snapshot_holds_every_number(dtype: torch.dtype) -> None:
    """One changed bit of any tensor is detected, whatever its type and shape."""
    model = zoo.create_model("cert_gpsa_vit_c10").to(dtype)
    snapshot = Snapshot.of(model)
    for tensor in (*model.parameters(), *model.buffers()):
        bits = tensor.data.reshape(-1).view(torch.uint8)
        bits[-1] ^= 1
        with pytest.raises(UserError, match="changed since"):
            snapshot.require(digests=True)
        bits[-1] ^= 1
        snapshot.require(digests=True)
