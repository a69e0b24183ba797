"""The certificate of the served model: what float32 and bfloat16 really do never exceeds what is reckoned with."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify.api import radius_of
from certify.methods.adjoint import Adjoint
from certify.methods.bake import bake
from certify.methods.correct import OfCorrect
from certify.methods.image import Image, ImageAnalysis
from certify.methods.rung import Rung, Situation
from certify.methods.served import ServedAdjoint, ServedImage
from certizoo import UserError
from tests.certify.methods.test_certify import SMALL
from tests.tools.ascent import ascend
from tests.tools.cases import mostly_slow
from tests.tools.small_models import AVG, PARTS, labelled, small_model
from tests.tools.trials import served_loss
from tests.zoo.bounds.test_rules import norm_with_affine, scaled_
from zoo.attention.dot_product import DotProductAttention
from zoo.bounds.contracts import Precision
from zoo.bounds.facts import NoRule
from zoo.bounds.rounding import PRECISIONS, roundings_of
from zoo.layers.convolution import CellConv2d
from zoo.layers.mlp import SLL, Mlp
from zoo.layers.norms import LayerProject, SmoothProject
from zoo.layers.patches import Normalize

N, D, B = 5, 32, 8
DTYPES = [torch.float32, torch.bfloat16]
MODULES: dict[str, Any] = {
    "layernorm": lambda s: norm_with_affine(1.0, D),
    "smoothproject": lambda s: SmoothProject(D, s),
    "layerproject": lambda s: LayerProject(D, s),
    "mlp": lambda s: scaled_(Mlp(D, 2 * D), s),
    "mlp relu": lambda s: scaled_(Mlp(D, 2 * D, act_layer=nn.ReLU), s),
    "sll": lambda s: scaled_(SLL(D, 2 * D, nn.Tanh), s),
    "attention": lambda s: scaled_(DotProductAttention(D, 4), s),
    "conv": lambda s: scaled_(nn.Conv2d(N, 6, 3, stride=2, padding=1), s),
    "conv by products": lambda s: scaled_(CellConv2d(N, 6, 4, stride=2, padding=1), s),
    "gelu": lambda s: nn.GELU(),
    "tanh": lambda s: nn.Tanh(),
    "relu": lambda s: nn.ReLU(),
    "normalize": lambda s: Normalize((0.4,) * N, (0.25,) * (N - 1) + (0.2 * s,)),
}
# That the module sees, of N channels, in the place of tokens.
IMAGES = dict.fromkeys(("conv", "conv by products", "normalize"), (8, 4))


def on_ball(x: Tensor, r_B: Tensor) -> Tensor:
    v = torch.randn_like(x)
    return x + v * (r_B * torch.rand(len(x)) / v.flatten(1).norm(dim=1)).view(-1, *[1] * (x.ndim - 1))


def shares(name: str, dtype: torch.dtype, first_seed: int = 0) -> Tensor:
    """(error found) / bound of many points: module, size of weights, inputs, radius, error of the input."""
    found = []
    for seed, scale in enumerate((0.25, 1.0, 2.0), first_seed):
        torch.manual_seed(seed)
        served = MODULES[name](scale).to(dtype).eval().requires_grad_(False)
        exact = bake(served)
        x = torch.randn(B, N, D).double() * 10 ** torch.empty(B, 1, 1).uniform_(-1.5, 1).double()
        x = x.view(B, N, *IMAGES.get(name, (D,)))
        (rounding,) = roundings_of(exact, PRECISIONS[dtype])
        part = rounding(x)
        for reach, off in ((0.0, 0.0), (1e-3, 1e-6), (0.1, 1e-2), (0.5, 0.0)):
            r, e = (share * x.flatten(1).norm(dim=1) for share in (reach, off))
            for _ in range(40):
                inside = on_ball(x, r)  # x'
                seen = (inside + (on_ball(x, e) - x)).to(dtype)  # x^: rounding it may leave e, which is then counted
                true_e = torch.maximum(e, (seen.double() - inside).flatten(1).norm(dim=1))
                error_B = (served(seen).double() - exact(inside)).flatten(1).norm(dim=1)
                found.append(error_B / part.error(r, true_e))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(
        product(MODULES, DTYPES), *product(MODULES, DTYPES[:1]), *product(("layernorm", "attention"), DTYPES[1:])
    ),
    ids=str,
)
def test_no_point_is_rounded_by_more_than_the_bound(name: str, dtype: torch.dtype) -> None:
    share = shares(name, dtype)
    assert not torch.isnan(share).any()
    assert share.max() <= 1
    assert share.max() >= 0.02, "too loose to notice a rule that is wrong"


@pytest.mark.parametrize("name", ["layernorm", "mlp", "sll", "attention"])
def test_a_unit_that_is_too_small_is_noticed(name: str) -> None:
    """Rounding is really measured here: with hardly any reckoned with, the served modules break the bound."""
    torch.manual_seed(0)
    served = MODULES[name](1.0).requires_grad_(False)
    exact, x = bake(served), torch.randn(B, N, D)
    (rounding,) = roundings_of(exact, Precision(2.0**-40, 2.0**-60))
    part = rounding(x.double())
    zero = torch.zeros(B).double()
    assert ((served(x).double() - exact(x.double())).flatten(1).norm(dim=1) > part.error(zero, zero)).any()


POST_NORM: dict[str, Any] = AVG | {"norm": {"name": "layernorm", "eps": 1.0}, "mlp": "gelu", "block": "postnorm"}


@pytest.mark.parametrize("parts", mostly_slow((*PARTS, "post norm"), "post norm"))
def test_the_served_margin_never_falls_by_more_than_the_loss(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 logits at the points an ascent finds, at every radius; and certified images keep their class."""
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
    """Planted: nodes that round a thousand times more. Each of the places where that counts lowers the radius."""
    model = small_model("cls", 0)
    x, y = labelled(model, 2, 0)
    ((_, found),) = ServedImage(model, torch.float32, "one").analyse(x, y).parts
    assert isinstance(found, ImageAnalysis)
    most_B = torch.full((2,), 0.1, dtype=torch.float64)

    def around() -> Situation:
        return Situation.of(found.inner, found.images, torch.arange(2), b"a seed")

    g = around().gradients(found.inner.rivals_BR[:, :1].mT)[1]
    before = around()
    found.inner._mus = [lambda r, mu=mu: 1e3 * mu(r) for mu in found.inner._mus]  # type: ignore[attr-defined]
    after = around()
    known, grown = (Rung(here, most_B, None).ellipsoids.joint.noise for here in (before, after))
    for at in known.weights:
        assert (grown.weights[at] * grown.theta.sqrt() > 500 * known.weights[at] * known.theta.sqrt()).all()
    assert (after.rounded(g) > 500 * before.rounded(g)).all()
    assert (before.clean.margin_BJ < found.clean.margin_BJ).sum() == before.clean.margin_BJ.numel() - 2, "but the own"


def held_against_ascent(analysis: OfCorrect, model: Any, x: Tensor, y: Tensor, eps_B: Tensor) -> None:
    certificate = analysis.at(eps_B)
    worst_B = ascend(served_loss(model, y), x.double(), eps_B * (1 - 1e-6), steps=20, starts=3)
    kept_B = certificate.certified_B
    assert (worst_B < 0)[kept_B].all()
    # that class which decides: its margin falls to no less than margin - loss
    assert (-worst_B >= certificate.margin_B - certificate.loss_B - 1e-9)[torch.isfinite(certificate.loss_B)].all()


def test_a_margin_below_the_rounding_is_not_certified() -> None:
    """At eps = 0 the float64 function is right by a hair; the served one need not be."""
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


def test_what_has_no_bound_is_refused() -> None:
    with pytest.raises(NoRule) as refused:
        ServedAdjoint(zoo.create_model("l2_vit_ti", **SMALL), torch.float32)
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="float32, bfloat16"):
        ServedAdjoint(small_model("standard", 0), torch.float16)
