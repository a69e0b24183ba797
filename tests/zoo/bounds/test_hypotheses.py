"""What proofs assume of numbers: shapes that torch would broadcast are refused, and scale does not make a radius grow."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify import certified_radius
from certify.api import certifier
from certify.methods.bake import bake
from certizoo import UserError
from tests.tools.small_models import distinct, labelled, small_model
from zoo.bounds import lanczos
from zoo.bounds.genuine import modules_of, own_tensors
from zoo.bounds.rules import trunk
from zoo.layers.convolution import CellConv2d
from zoo.layers.mlp import SLL, ConstrainedMlp
from zoo.layers.norms import CenterNorm
from zoo.layers.patches import PatchProjection
from zoo.models.overview import tiny_options
from zoo.rules import Facts, NoRule, facts_of, layer_of, register, types_where

METHODS = ("lofast", "adjoint", "image", "best")
STATED = types_where(lambda facts: facts.shapes)

# shapes ---------------------------------------------------------------------------------------------------------------


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    return bake(zoo.create_model(name, **tiny_options(name)).eval())


@pytest.fixture(scope="module")
def sites() -> dict[tuple[type[nn.Module], str], tuple[nn.Module, nn.Module]]:
    """(type, name) -> a model of the zoo, and a module of that type with a parameter or buffer of that name."""
    found: dict[tuple[type[nn.Module], str], tuple[nn.Module, nn.Module]] = {}
    for name in (*distinct(), "stem"):
        model = small_model("stem", 0).double() if name == "stem" else tiny(name)
        trunk(model)  # what the zoo makes is not refused: every shape is stated, and as stated
        for _, module in modules_of(model):
            for key, _ in own_tensors(module):
                found.setdefault((type(module), key), (model, module))
    return found


def broadcast(tensor: Tensor) -> Iterator[Tensor]:
    """The same numbers, or one of them for all, in the other shapes that torch may take."""
    yield tensor.flatten()[0]
    yield tensor.flatten()[:1]
    yield tensor[None]
    yield tensor.unsqueeze(-1)
    yield tensor.flatten()
    yield tensor.expand(4, *tensor.shape).clone()
    yield torch.cat([tensor, tensor])
    for axis in range(tensor.ndim):
        yield tensor.narrow(axis, 0, 1).clone()
        yield tensor.movedim(axis, 0).clone()


def test_every_shape_but_the_stated_one_is_refused(
    sites: dict[tuple[type[nn.Module], str], tuple[nn.Module, nn.Module]],
) -> None:
    """By whole models, in one line that names parameter and shapes."""
    assert {kind for kind, _ in sites} == set(STATED), "every type with tensors of its own is met in a model"
    tries = 0
    for (kind, key), (model, module) in sites.items():
        stated = facts_of(module).shapes
        assert stated is not None
        if stated(module)[key] is None:  # no forward pass reads it
            continue
        kept = module._parameters if key in module._parameters else module._buffers
        tensor = kept[key]
        assert tensor is not None
        for other in broadcast(tensor.detach()):
            if other.shape == tensor.shape:
                continue
            kept[key] = nn.Parameter(other, requires_grad=False) if key in module._parameters else other
            words = (
                rf"{key} has the shape {re.escape(str(tuple(other.shape)))}, .*{re.escape(str(tuple(tensor.shape)))}"
            )
            with pytest.raises(NoRule, match=words) as refused:
                trunk(model)
            assert "\n" not in str(refused.value)
            tries += 1
        kept[key] = tensor
        trunk(model)
    assert tries > 200


def wider_positions(model: Any) -> None:
    """Patches of one channel, added to 16 of every position."""
    model.patch_embed.proj = PatchProjection(1, 1, 4, 4)


def narrow_gamma(model: Any) -> None:
    model.norm = CenterNorm(16)
    model.norm.weight = nn.Parameter(model.norm.weight[:1])


def flat_gamma(model: Any) -> None:
    model.norm = CenterNorm(16)
    model.norm.weight = nn.Parameter(model.norm.weight[None])


def column_of_q(model: Any) -> None:
    """As many units as tokens."""
    model.blocks[0].mlp = SLL(16, 4)
    model.blocks[0].mlp.log_q = nn.Parameter(torch.tensor([[5.0], [-5.0], [0.0], [1.0]]))


def narrow_branch(model: Any) -> None:
    """One channel, added to 16."""
    model.blocks[0].mlp = ConstrainedMlp(16, 8)
    model.blocks[0].mlp.fc2 = nn.Linear(8, 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "spoil", [wider_positions, narrow_gamma, flat_gamma, column_of_q, narrow_branch], ids=lambda spoil: spoil.__name__
)
def test_models_that_broadcast_a_weight_are_refused(spoil: Any, method: str) -> None:
    model = small_model("standard", 0)
    spoil(model)
    model.eval()
    with pytest.raises(UserError, match="shape|width") as refused:
        x, y = labelled(model, 2, 0)  # torch runs all of them but the last
        certified_radius(model, x, y, method=method)
    assert "\n" not in str(refused.value)


class Shift(nn.Module):
    """x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b


def test_a_type_that_states_no_shapes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.bounds import facts as table

    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))
    register(Shift, Facts(rule=lambda module: lambda x: (module(x), lambda r: r)))
    model = small_model("standard", 0)
    model.norm = Shift()
    with pytest.raises(NoRule, match=r"norm: .*its b has the shape \(16,\), and its facts state none"):
        trunk(model)
    model.norm = nn.BatchNorm1d(16)
    with pytest.raises(NoRule, match=r"norm: .*BatchNorm1d.*its weight has the shape \(16,\)"):
        trunk(model)


# the range of numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil", [lambda w: w * 2.0**140, lambda w: w * 2.0**-160, lambda w: w.index_fill(0, torch.tensor(0), 1e-60)]
)
def test_weights_beyond_float32_are_refused(spoil: Any) -> None:
    model = small_model("standard", 0).double()
    trunk(model)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.copy_(spoil(model.blocks[0].mlp.fc1.weight))
    with pytest.raises(NoRule, match=r"blocks.0.mlp.fc1: .*its weight holds .*which float32 does not hold"):
        trunk(model)


def test_options_beyond_float32_are_refused() -> None:
    model = small_model("standard", 0)
    model.norm.eps = 1e-60
    with pytest.raises(NoRule, match="its eps is 1e-60, which float32 does not hold"):
        trunk(model)
    model.norm.eps, model.blocks[0].attn.scale = 1e-6, 1e80
    with pytest.raises(NoRule, match=r"its scale is 1e\+80"):
        trunk(model)
