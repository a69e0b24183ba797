"""One record for each module type: registered once, with tests of every field, and sufficient to add a module."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock, SwinTransformerStage
from torch import Tensor, nn

import zoo
from certify import certified_radius
from certify.graph.model import Captured
from certify.methods.served import ServedAdjoint
from tests.tools import attention_cases, attention_variants, curvature_cases, first_order_cases, served_modules
from tests.tools.ascent import largest_change
from tests.tools.expansions import tightness
from tests.tools.small_models import AVG, SMALL, labelled
from zoo.attention.conv_mixing import ConvMixing
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.attention.lofast import lofast
from zoo.attention.masked import MaskedAttention
from zoo.attention.softmax.module import QKVAttention
from zoo.attention.window import WindowAttention
from zoo.bounds import rule_table as table
from zoo.layers.block import NormFirstBlock, PostNormBlock, PreNormBlock
from zoo.layers.mlp import Mlp
from zoo.models.convnet import ConvNet
from zoo.models.swin import Swin
from zoo.models.vit import ViT
from zoo.primitives import PRIMITIVES
from zoo.rules import (
    Layer,
    ModuleRules,
    NoRule,
    affine,
    exact_module,
    layer_of,
    qkv_split,
    register,
    scaled,
    softmax_rules,
    types_where,
)

VARIANTS = {type(make(1.0)) for make, _, _ in attention_variants.CASES.values()} - {GPSA, WindowAttention}
BLOCKS = {PreNormBlock, PostNormBlock, NormFirstBlock, SwinTransformerBlock, SwinTransformerStage, PatchMerging}
# field -> the types whose tests attack it
ATTACKED: dict[str, set[type[nn.Module]]] = {
    "rule": set(first_order_cases.CASES) - BLOCKS - {nn.Sequential, Mlp},
    "chain": BLOCKS | {nn.Sequential, Mlp},
    # test_first_order.py enumerates the table itself
    "residual": {DotProductAttention, GPSA, MaskedAttention, ConvMixing},
    "local": set(attention_cases.MIXTURES) | VARIANTS,
    "local_residual": {DotProductAttention, GPSA, MaskedAttention},
    "trunk": {ViT, Swin, ConvNet, Captured},  # models of the zoo: test_adjoint_zoo.py; captured: test_capture.py
    "expansion": {
        *curvature_cases.CASES, *curvature_cases.AFFINE, *curvature_cases.IDENTITIES,
        *attention_cases.MIXTURES, *VARIANTS,
    },
    "activation": {type(module) for _, module in curvature_cases.DERIVATIVES} | {nn.ReLU},
    "rounding": {type(make(1.0)) for make in served_modules.MODULES.values()}
    | {type(module) for module in served_modules.CHOICES.values()}
    | {nn.Identity, nn.Dropout, DropPath},
    "split": VARIANTS | {DotProductAttention},
    # Enumerated by test_hypotheses.py in models of the zoo.
    "shapes": set(types_where(lambda rules: rules.shapes)) - set(PRIMITIVES),
    "mixing": {DotProductAttention},  # inside windows and gated positions: attention_cases.MIXTURES
}  # fmt: skip


def test_every_fact_has_a_line_here() -> None:
    assert {field.name for field in fields(ModuleRules)} == set(ATTACKED)


@pytest.mark.parametrize("name", ATTACKED)
def test_every_fact_of_every_type_is_attacked(name: str) -> None:
    """Primitives are attacked by tests/zoo/primitives."""
    assert set(types_where(lambda rules: getattr(rules, name))) - set(PRIMITIVES) == ATTACKED[name]


def test_a_type_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"nn\.modules\.linear\.Linear is registered already"):
        register(nn.Linear, ModuleRules())


class Half(nn.Module):
    """x / 2."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def half(module: Half) -> Layer:
    """||x' / 2 - x / 2|| = ||x' - x|| / 2."""
    return scaled(module, 0.5)


@pytest.fixture
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the table after a test that registers types."""
    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))


@pytest.fixture
def halved() -> Any:
    """Return a model with one unknown module."""
    torch.manual_seed(0)
    model: Any = zoo.create_model("dp_vit_ti", **(SMALL | AVG | {"depth": 1, "norm": "smoothproject"})).eval()
    model.norm = Half()
    return model


class Third(nn.Module):
    """x / 3."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 3


@pytest.mark.usefixtures("own_table")
def test_all_modules_without_a_rule_are_listed_at_once(halved: Any) -> None:
    halved.blocks[0].mlp.act = Third()
    x, y = labelled(halved, 1, 0)
    with pytest.raises(NoRule, match=r"2 modules, .*blocks\.0\.mlp\.act: .*Third.*; .*norm: .*Half"):
        certified_radius(halved, x, y, "lofast")
    register(Half, ModuleRules())
    register(Third, ModuleRules())
    for method in ("lofast", "adjoint"):
        with pytest.raises(NoRule, match=r"2 modules, .*Third.*; .*Half") as refused:
            certified_radius(halved, x, y, method)
        assert len(refused.value.lacking) == 2


@pytest.mark.usefixtures("own_table")
def test_a_module_is_added_by_one_registration(halved: Any) -> None:
    """It works in a whole model, for every method and for served types."""
    x, y = labelled(halved, 3, 0)
    with pytest.raises(NoRule, match="Half"):
        certified_radius(halved, x, y, "lofast")
    register(Half, ModuleRules(rule=half, expansion=affine, rounding=exact_module))
    radii = [certified_radius(halved, x, y, method=method) for method in ("lofast", "lofast_local", "adjoint")]
    assert all(bool((radius_B > 0).all()) for radius_B in radii)
    assert ServedAdjoint(halved, torch.float32).analyse(x, y).at(1e-6).certified_B.all()


@pytest.mark.usefixtures("own_table")
def test_a_module_with_a_rule_of_first_order_alone_is_left_to_lofast(halved: Any) -> None:
    x, y = labelled(halved, 3, 0)
    register(Half, ModuleRules(rule=half))
    with pytest.raises(NoRule, match="Half"):
        certified_radius(halved, x, y, "adjoint")
    assert torch.equal(certified_radius(halved, x, y, "best"), certified_radius(halved, x, y, "lofast"))


class Lukewarm(QKVAttention):
    """Dot-product attention at half the usual scale."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.scale = 0.5 * (dim // num_heads) ** -0.5

    def scores(self, q_BHNO: Tensor, k_BHNO: Tensor, v_BHNO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q_BHNO, k_BHNO, v_BHNO


def lukewarm(module: Lukewarm) -> Layer:
    """Return the rule; Theorem 1 of LoFAST holds for any scale."""
    return lofast(module, module, residual=False)


@pytest.mark.usefixtures("own_table")
def test_a_softmax_attention_is_added_by_a_rule_and_its_split() -> None:
    """Local and second-order rules follow, also in windows and with gated positions."""
    register(Lukewarm, softmax_rules(lukewarm, qkv_split))
    torch.manual_seed(0)
    for around in (lambda content: content, GPSA, lambda content: WindowAttention(content, (2, 2))):
        module = attention_cases.random_(around(Lukewarm(attention_cases.D, attention_cases.H)), 1.0)
        case = attention_cases.instance(module, tokens=4)
        found = tightness([case], steps=10, starts=1)  # an error if a bound is beaten
        assert found["remainder"].numel()
        bounds = [layer_of(module, local=local)(case.x)[1](case.r_B) for local in (False, True)]
        most = largest_change(module, case.x, case.r_B, 10, 1)
        assert all(bool((bound_B >= most * (1 - 1e-9)).all()) for bound_B in bounds)
