"""The certificate of the served model: float32 and bfloat16 never err by more than the allowance."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify.adjoint.adjoint import Adjoint
from certify.api import radius_of
from certify.image.image import Image, ImageAnalysis
from certify.image.radius_stage import RadiusStage
from certify.image.situation import Situation
from certify.methods.lofast import LocalLoFAST, LoFAST
from certify.methods.served import SERVED_METHODS, ServedAdjoint, ServedImage, ServedLocalLoFAST, ServedLoFAST
from certify.shared.bake import bake
from certify.shared.batching import CorrectImages
from certizoo import UserError
from tests.tools.ascent import ascend
from tests.tools.cases import mostly_slow
from tests.tools.served_modules import CHOICES, DTYPES, MODULES, B, D, N, on_ball, shape, shares
from tests.tools.small_models import AVG, PARTS, distinct, labelled, small_model
from tests.tools.trials import served_loss
from zoo.bounds import rule_table as table
from zoo.bounds.contracts import Precision
from zoo.bounds.curvature import trunk_of
from zoo.bounds.elementwise import scalar
from zoo.bounds.rounding import ASSUMPTIONS, PRECISIONS, roundings_of, trunk_roundings
from zoo.bounds.rule_table import NoRule, register, types_where
from zoo.bounds.torch_modules import GELU
from zoo.models.overview import tiny_options
from zoo.models.swin import InWindows
from zoo.primitives import PRIMITIVES

FEW = ("layernorm", "attention", "centernorm", "conv mixing")
QUICK = MODULES.keys() - {
    "l2 untied",
    "gpsa scsa",
    "gpsa fused",
    "window l2",
    "ln",
    "scsa",
    "l2",
}  # whose parts others have too
# Where bounds keep much in hand: of heads that share a quotient, of rows that are normalised, short or long.
LOOSE = {"ln": 2e-4, "scsa": 2e-4, "gpsa scsa": 2e-4}


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(product(MODULES, DTYPES), *product(QUICK, DTYPES[:1]), *product(FEW, DTYPES[1:])),
    ids=str,
)
def test_no_point_is_rounded_by_more_than_the_bound(name: str, dtype: torch.dtype) -> None:
    share = shares(name, dtype)
    print(f"{name} {dtype}: {share.max():.3g} of the bound")
    assert not torch.isnan(share).any()
    assert share.max() <= 1
    assert share.max() >= LOOSE.get(name, 0.01), "too loose to notice a rule that is wrong"


@pytest.mark.parametrize("name", CHOICES)
def test_where_nothing_is_computed_nothing_is_off(name: str) -> None:
    module = CHOICES[name]
    (rounding,) = roundings_of(bake(module), PRECISIONS[torch.float32])
    x = torch.randn(B, N, D)
    zero = torch.zeros(B).double()
    assert (rounding(x.double()).error(zero, zero) == 0).all()
    assert torch.equal(module(x).double(), bake(module)(x.double()))


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_unit_that_is_too_small_is_noticed(name: str) -> None:
    """With almost no allowance for rounding the served modules break the bound, so rounding is really measured."""
    torch.manual_seed(0)
    served = MODULES[name](1.0).requires_grad_(False)
    exact, x = bake(served), torch.randn(B, *shape(name))
    (rounding,) = roundings_of(exact, Precision(2.0**-40, 2.0**-60))
    part = rounding(x.double())
    zero = torch.zeros(B).double()
    assert ((served(x).double() - exact(x.double())).flatten(1).norm(dim=1) > part.error(zero, zero)).any()


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"normalize", "tanh", "sigmoid"}))
def test_numbers_beyond_float32_are_unknown(name: str) -> None:
    """float32 overflows where float64 still computes."""
    torch.manual_seed(0)
    module = bake(MODULES[name](1.0))
    (rounding,) = roundings_of(module, PRECISIONS[torch.float32])
    zero = torch.zeros(B).double()
    error_B = rounding(1e39 * torch.randn(B, *shape(name)).double()).error(zero, zero)
    assert not (error_B < torch.inf).any()


def test_every_type_has_a_bound_of_its_rounding() -> None:
    """A type with its own rules can be served, and so can a chain of such types."""
    ruled = types_where(lambda rules: rules.rule and not (rules.chain and not rules.expansion))
    ruled = [kind for kind in ruled if kind not in PRIMITIVES]
    assert set(ruled) - set(types_where(lambda rules: rules.rounding)) == set()


@pytest.mark.parametrize("name", sorted(distinct()))
def test_every_model_of_the_zoo_has_roundings(name: str) -> None:
    model = bake(zoo.create_model(name, **tiny_options(name)))
    nodes, _ = trunk_of(model)
    assert len(trunk_roundings(model, PRECISIONS[torch.float32])) == len(nodes)


@pytest.mark.parametrize("name", ["l2_swin_b", "dp_swin_b"])
def test_windows_of_an_image_share_a_bound(name: str) -> None:
    """Check the shifted windows of one image together, with their mask."""
    torch.manual_seed(0)
    options = tiny_options(name)
    served: Any = zoo.create_model(name, **options).eval().requires_grad_(False)
    exact: Any = bake(served)
    found = []
    for served_block, block in zip(served.layers[0].blocks, exact.layers[0].blocks, strict=True):
        size = block.input_resolution
        x = torch.randn(B, *size, block.dim)
        (rounding,) = InWindows(block).roundings(PRECISIONS[torch.float32])
        r = 0.1 * x.double().flatten(1).norm(dim=1)
        bound_B = rounding(x.double()).error(r, torch.zeros_like(r))
        for _ in range(40):
            inside = on_ball(x.double(), 0.999 * r).float()
            off = InWindows(served_block)(inside).double() - InWindows(block)(inside.double())
            found.append(off.flatten(1).norm(dim=1) / bound_B)
    share = torch.stack(found).max()
    assert 5e-4 < share <= 1


def test_assumptions_are_sentences() -> None:
    assert all(text and not text.endswith(".") and "\n" not in text for text in ASSUMPTIONS)


POST_NORM: dict[str, Any] = AVG | {"norm": {"name": "layernorm", "eps": 1.0}, "mlp": "gelu", "block": "postnorm"}


@pytest.mark.parametrize("parts", mostly_slow((*PARTS, "post norm"), "post norm"))
def test_the_served_margin_never_falls_by_more_than_the_loss(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check float32 logits at points found by ascent, at every radius; certified images keep their class."""
    monkeypatch.setitem(PARTS, "post norm", POST_NORM)
    model = small_model(parts, 0)
    x, y = labelled(model, 4, 0)
    analysis = ServedAdjoint(model, torch.float32).analyse(x, y)
    radius_B = radius_of(analysis)
    assert (radius_B > 0).any()
    assert (radius_B <= radius_of(Adjoint(model).analyse(x, y)) * (1 + 2e-3)).all()
    for eps_B in (radius_B, 3 * radius_B + 1e-3):
        held_against_ascent(analysis, model, x, y, eps_B)


@pytest.mark.slow  # radii of `ServedImage` against ascent in the gate: test_trials.py
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_served_margin_on_the_ball_of_images(dtype: torch.dtype) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 1, 0)
    x = x.to(dtype).float()
    analysis = ServedImage(model, dtype, "one").analyse(x, y)
    radius_B, exact_B = radius_of(analysis), radius_of(Image(bake(copy.deepcopy(model).to(dtype)), "one").analyse(x, y))
    by_layers_B = radius_of(ServedAdjoint(model, dtype, "one").analyse(x, y))
    assert (by_layers_B * (1 - 2**-8) <= radius_B).all()
    assert (radius_B <= exact_B * (1 + 2**-8)).all()
    assert dtype == torch.bfloat16 or (radius_B > 1.02 * by_layers_B).any(), "forms take part in it"
    if dtype == torch.float32:
        held_against_ascent(analysis, model, x, y, radius_B)


@pytest.mark.slow  # of defects between nodes: test_image.py
def test_what_nodes_round_is_part_of_the_ball_of_images() -> None:
    """Planted nodes that round a thousand times more lower the radius, at each place where that counts."""
    model = small_model("cls", 0)
    x, y = labelled(model, 2, 0)
    ((_, found),) = ServedImage(model, torch.float32, "one").analyse(x, y).parts
    assert isinstance(found, ImageAnalysis)
    most_B = torch.full((2,), 0.1, dtype=torch.float64)

    def around() -> Situation:
        return Situation.of(found.inner, found.images, torch.arange(2), b"a seed")

    before, r_B = around(), torch.full((2,), 0.3, dtype=torch.float64)
    quiet, kept_BJ = [before.off(node, r_B) for node in range(len(before.tape.of_nodes))], before.kept(r_B)
    weights = RadiusStage(before, most_B, None).ellipsoids.joint.noise.weights
    found.inner._mus = [lambda r, mu=mu: 1e3 * mu(r) for mu in found.inner._mus]  # type: ignore[attr-defined]
    after = around()
    loud = [after.off(node, r_B) for node in range(len(after.tape.of_nodes))]
    assert all(bool((much >= 500 * little).all()) for much, little in zip(loud, quiet, strict=True))
    stage = RadiusStage(after, most_B, None)
    ends = [leaves[-1] for leaves, off_B in zip(after.tape.of_nodes, loud, strict=True) if bool((off_B > 0).any())]
    assert ends
    assert all(bool((stage.ellipsoids.joint.noise.weights[at] > weights[at]).all()) for at in ends)
    assert (kept_BJ > 0).all()


def held_against_ascent(analysis: CorrectImages, model: Any, x: Tensor, y: Tensor, eps_B: Tensor) -> None:
    certificate = analysis.at(eps_B)
    worst_B = ascend(served_loss(model, y), x.double(), eps_B * (1 - 1e-6), steps=20, starts=3)
    kept_B = certificate.certified_B
    assert (worst_B < 0)[kept_B].all()
    # for the deciding class the margin stays above margin - loss
    assert (-worst_B >= certificate.margin_B - certificate.loss_B - 1e-9)[torch.isfinite(certificate.loss_B)].all()


def test_a_margin_below_the_rounding_is_not_certified() -> None:
    """At eps = 0 the float64 function is right by a tiny margin; the served model need not be."""
    model = small_model("standard", 0)
    x, y = labelled(model, 6, 0)
    with torch.no_grad():
        for _ in range(60):  # until the margin of the first image is 1e-7
            logits = bake(model)(x[:1].double())[0]
            rival = logits.scatter(0, y[0], -torch.inf).argmax()
            model.head.bias[y[0]] -= logits[y[0]] - logits[rival] - 1e-7
    y = bake(model)(x.double()).argmax(-1)
    assert Adjoint(model).analyse(x[:1], y[:1]).at(0.0).certified_B.all()
    assert not ServedAdjoint(model, torch.float32).analyse(x[:1], y[:1]).at(0.0).certified_B.any()


class Unknown(nn.GELU):
    """An activation without a registered rounding rule."""


def test_what_has_no_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))
    register(Unknown, scalar(lambda module: replace(GELU, operations=None)))
    model = small_model("standard", 0)
    model.blocks[0].mlp.act = Unknown()
    Adjoint(model)
    for method in SERVED_METHODS.values():
        with pytest.raises(NoRule) as refused:
            method(model, torch.float32, "n", "l2")
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="float32, bfloat16"):
        ServedAdjoint(small_model("standard", 0), torch.float16)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("parts", mostly_slow(PARTS, "standard"))
def test_the_radius_alone_with_rounding(parts: str, local: bool) -> None:
    """LoFAST of the served model stays below that of the float64 function, and no ascent beats it."""
    model = small_model(parts, 0)
    x, y = labelled(model, 4, 0)
    served, exact = (ServedLocalLoFAST, LocalLoFAST) if local else (ServedLoFAST, LoFAST)
    analysis = served(model, torch.float32).analyse(x, y)
    radius_B, exact_B = radius_of(analysis), radius_of(exact(model).analyse(x, y))
    assert (radius_B <= exact_B * (1 + 2e-3)).all()
    assert (radius_B > 0.5 * exact_B).any()
    held_against_ascent(analysis, model, x, y, radius_B)


def test_a_margin_below_the_rounding_is_not_certified_by_the_radius_alone() -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 6, 0)
    with torch.no_grad():
        for _ in range(60):
            logits = bake(model)(x[:1].double())[0]
            rival = logits.scatter(0, y[0], -torch.inf).argmax()
            model.head.bias[y[0]] -= logits[y[0]] - logits[rival] - 1e-7
    y = bake(model)(x.double()).argmax(-1)
    assert LoFAST(model).analyse(x[:1], y[:1]).at(0.0).certified_B.all()
    assert not ServedLoFAST(model, torch.float32).analyse(x[:1], y[:1]).at(0.0).certified_B.any()
