"""Hypotheses of the proofs: shapes that torch would broadcast are refused, and scaling does not enlarge a radius."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify import certified_radius
from certify.api import certifier, radius_of
from certify.shared.bake import bake
from certify.shared.certificate import Analysis
from certizoo import UserError
from tests.tools.small_models import distinct, labelled, small_model
from zoo.arithmetic import length
from zoo.attention.masked import MaskedAttention
from zoo.attention.theory.softmax_row import norm_upper
from zoo.bounds import lanczos
from zoo.bounds import rule_table as table
from zoo.bounds.first_order import trunk
from zoo.bounds.integrity import modules_of, own_tensors
from zoo.layers.mlp import SLL, ConstrainedMlp, Mlp
from zoo.layers.norms import CenterNorm, LayerProject
from zoo.layers.patches import PatchProjection
from zoo.models.overview import tiny_options
from zoo.primitives import PRIMITIVES
from zoo.rules import ModuleRules, NoRule, expansion_of, layer_of, register, rules_of, types_where

METHODS = ("lofast", "adjoint", "image", "best")
STATED = [kind for kind in types_where(lambda rules: rules.shapes) if kind not in PRIMITIVES]

# shapes ---------------------------------------------------------------------------------------------------------------


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    return bake(zoo.create_model(name, **tiny_options(name)).eval())


@pytest.fixture(scope="module")
def sites() -> dict[tuple[type[nn.Module], str], tuple[nn.Module, nn.Module]]:
    """Return (type, name) -> a model of the zoo and a module of that type with a parameter or buffer of that name."""
    found: dict[tuple[type[nn.Module], str], tuple[nn.Module, nn.Module]] = {}
    for name in (*distinct(), "stem", "masked"):
        model = tiny(name) if name in distinct() else small_model("stem", 0).double()
        if name == "masked":
            for block in model.blocks:
                block.attn = MaskedAttention(block.attn, torch.rand(1, 4, 4).double())
        trunk(model)  # models of the zoo pass: every shape is stated and right
        for _, module in modules_of(model):
            for key, _ in own_tensors(module):
                found.setdefault((type(module), key), (model, module))
    return found


def broadcast(tensor: Tensor) -> Iterator[Tensor]:
    """Return the same numbers, or one of them for all, in other shapes that torch may accept."""
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


@pytest.mark.slow
def test_every_shape_but_the_stated_one_is_refused(
    sites: dict[tuple[type[nn.Module], str], tuple[nn.Module, nn.Module]],
) -> None:
    """Whole models refuse them, in one line that names parameter and shapes."""
    assert {kind for kind, _ in sites} == set(STATED), "every type with tensors of its own is met in a model"
    tries = 0
    for (_, key), (model, module) in sites.items():
        stated = rules_of(module).shapes
        assert stated is not None
        if stated(module)[key] is None:  # no forward pass reads it
            continue
        kept: dict[str, Any] = vars(module)["_parameters" if key in module._parameters else "_buffers"]
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
    """Return patches of one channel, added to 16 of every position."""
    model.patch_embed.proj = PatchProjection(1, 1, 4, 4)


def narrow_gamma(model: Any) -> None:
    model.norm = CenterNorm(16)
    model.norm.weight = nn.Parameter(model.norm.weight[:1])


def flat_gamma(model: Any) -> None:
    model.norm = CenterNorm(16)
    model.norm.weight = nn.Parameter(model.norm.weight[None])


def column_of_q(model: Any) -> None:
    """Use as many units as tokens."""
    model.blocks[0].mlp = SLL(16, 4)
    model.blocks[0].mlp.log_q = nn.Parameter(torch.tensor([[5.0], [-5.0], [0.0], [1.0]]))


def narrow_branch(model: Any) -> None:
    """Return a branch of one channel, added to 16."""
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
    with pytest.raises(UserError, match=r"shape|width") as refused:
        certified_radius(model, *labelled(model, 2, 0), method=method)
    assert "\n" not in str(refused.value)


class Shift(nn.Module):
    """x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b


def test_a_type_that_states_no_shapes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))
    register(Shift, ModuleRules(rule=lambda module: lambda x: (module(x), lambda r: r)))
    model = small_model("standard", 0)
    model.norm = Shift()
    with pytest.raises(NoRule, match=r"norm: .*its b has the shape \(16,\), but its rules state none"):
        trunk(model)
    model.norm = nn.RMSNorm(16)
    with pytest.raises(NoRule, match=r"norm: .*RMSNorm.*its weight has the shape \(16,\)"):
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


def scaled_branches(k: int) -> Any:
    """Scale W_1, b_1 and W_V by 2^k and divide W_2 and W_O by it.

    The function stays the same, because ReLU and values pass a factor through.
    """
    model = small_model("standard", 0).double()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.act = nn.ReLU()
            fc1, qkv = block.mlp.fc1, block.attn.qkv
            for weight in (fc1.weight, fc1.bias, qkv.weight[32:], qkv.bias[32:]):
                weight.mul_(2.0**k)
            for weight in (block.mlp.fc2.weight, block.attn.proj.weight):
                weight.mul_(2.0**-k)
    return model


def scaled_depth(k: int) -> Any:
    """Return six layers, the first three times 2^k, the others divided by it."""
    torch.manual_seed(0)
    layers = ((4, 3, 1, 1), (4, 3, 2, 1), (6, 3, 1, 1))
    model: Any = zoo.create_model(
        "conv_4c3f", layers=layers, hidden=(12, 10), theta=None, img_size=8, in_chans=1, num_classes=4
    )
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        for i, weight in enumerate(weights):
            weight.mul_(2.0 ** (k if i < 3 else -k))
    return model.double().eval()


SCALES = (-990, -480, -110, -49, 110, 480, 990)
SLOW = ("image", "best")  # half a minute each


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("method", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in METHODS])
@pytest.mark.parametrize("make", [scaled_branches, scaled_depth], ids=lambda make: make.__name__)
def test_a_scale_and_its_inverse_cost_no_less(
    make: Any, method: str, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any scale the losses at a radius are at least those of scale 1, or the model is refused."""
    monkeypatch.setattr(lanczos, "seed_of", lambda model, nonce: b"one for all")  # random starts depend on the weights
    x, y = labelled(make(0).float(), 2, 0)

    def analysis(k: int) -> Analysis:
        return certifier(make(k), method, "n", norm).analyse(x.double(), y)

    radius_B = radius_of(analysis(0))
    assert (radius_B > 0).all()
    plain_B, refused = analysis(0).at(radius_B).loss_B, []
    for k in SCALES:
        try:
            loss_B = analysis(k).at(radius_B).loss_B
        except UserError:
            refused.append(k)
            continue
        assert (loss_B >= plain_B * (1 - 1e-6)).all(), k
    assert {-990, -480, 480, 990} <= set(refused) <= {k for k in SCALES if abs(k) > 100}


@pytest.mark.parametrize("kind", ["mlp", "gelu", "relu", "layerproject"])
def test_radii_beyond_the_range_are_no_smaller_than_their_bounds(kind: str) -> None:
    """Remainders of 2^250 must not become those of 1e100, nor those of 2^-600 vanish."""
    torch.manual_seed(0)
    modules: dict[str, nn.Module] = {
        "mlp": Mlp(8, 16),
        "gelu": nn.GELU(),
        "relu": nn.ReLU(),
        "layerproject": LayerProject(8),
    }
    module = modules[kind].double()
    x, g = torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(3, 2, 4, 8, dtype=torch.float64)
    layer, expansion = layer_of(module, local=True), expansion_of(module)(x)
    for bound in (layer(x)[1], expansion.beta, expansion.remainder(g)):
        sizes = [bound(torch.full((2,), 2.0**k, dtype=torch.float64)) for k in (-600, -201, -200, 0, 200)]
        assert all(bool((less <= more).all()) for less, more in pairwise(sizes))
        assert (sizes[0] == sizes[2]).all()
        assert (sizes[2] > 0).all() or kind in ("relu", "layerproject")  # between kinks there is no remainder
        for beyond in (2.0**201, 2.0**400, torch.inf):
            assert (bound(torch.full((2,), beyond, dtype=torch.float64)) == torch.inf).all()
        assert (bound(torch.zeros(2, dtype=torch.float64)) == 0).all()


def test_lengths_and_norms_whose_squares_vanish_are_rounded_up() -> None:
    for size in (1.0, 1e-100, 1e-150, 1e-170, 1e-250, 0.0):
        a = torch.randn(50, 6, 9, dtype=torch.float64)
        scale = torch.tensor(2.0, dtype=torch.float64) ** torch.tensor(size).log2().round().clamp_min(-1000)
        a = a * scale if size else 0 * a
        true = torch.linalg.vector_norm(a / scale, dim=-1) * scale if size else 0 * a[..., 0]
        assert (length(a) >= true * (1 - 1e-14)).all()
        assert (length(a) <= 3 * true).all()
        norm = torch.linalg.matrix_norm(a / scale, 2) * scale if size else 0 * a[:, 0, 0]
        assert (norm_upper(a) >= norm * (1 - 1e-12)).all()
        assert (norm_upper(a) <= 8 * norm).all()
