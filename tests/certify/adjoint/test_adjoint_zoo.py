"""The adjoint certificate covers the zoo: every model, shrunk with its own parts, is certified and never beaten."""

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from certify.adjoint.adjoint import Adjoint
from certify.shared.bake import bake
from tests.tools.ascent import ascend
from tests.tools.cases import mostly_slow
from tests.tools.covered_models import COVERED, MODELS, QUICK, REFUSED
from zoo.bounds.curvature import trunk_of
from zoo.models.factory import model_options
from zoo.models.overview import rules_refusal, tiny_options

FEW = ("conv_4c3f", "l2_certvit_c10", "lips_convit_b", "lofast_vit_c10", "lofast_vit_c10_smooth")


@pytest.mark.slow
def test_every_model_is_covered_or_named() -> None:
    assert sorted(name for names in MODELS.values() for name in names) == zoo.list_models()
    for first, names in MODELS.items():
        refused = rules_refusal(first, "adjoint")
        assert {REFUSED.get(name, "") for name in names} == {refused}


@pytest.mark.parametrize("name", mostly_slow(COVERED, *QUICK))
def test_grams_are_there_and_back_again(name: str) -> None:
    """J J^T of the embedding is computed by a short cut."""
    options = model_options(name, **tiny_options(name))
    torch.manual_seed(0)
    model = bake(zoo.create_model(name, **tiny_options(name)).eval())
    x = torch.rand(2, options["in_chans"], options["img_size"], options["img_size"], dtype=torch.float64)
    with torch.no_grad():
        embedding = trunk_of(model)[0][0][1](x)
        v = torch.randn(3, *embedding.y.shape, dtype=torch.float64)
        torch.testing.assert_close(embedding.gram(v), embedding.push(embedding.pull(v)))


@pytest.mark.parametrize("name", mostly_slow(COVERED, *FEW))
def test_no_ascent_beats_the_certificate(name: str) -> None:
    """The smallest margin falls no further than the losses allow, and a small enough eps is certified."""
    options = model_options(name, **tiny_options(name))
    torch.manual_seed(0)
    model: Any = zoo.create_model(name, **tiny_options(name)).eval()
    x = torch.rand(2, options["in_chans"], options["img_size"], options["img_size"])
    with torch.no_grad():
        y = model(x).argmax(-1)
    analysis, baked = Adjoint(model).analyse(x, y), bake(model)
    inner: Any = analysis.parts[0][1]

    def fall(z: Tensor) -> Tensor:
        logits, labels = baked(z), y.repeat(len(z) // len(y))
        own = torch.nn.functional.one_hot(labels, logits.shape[-1]).bool()
        return logits.masked_fill(own, -torch.inf).amax(-1) - logits.gather(1, labels[:, None]).squeeze(1)

    assert analysis.at(1e-6).certified_B.all()
    for eps in (1e-3, 0.03):
        eps_B = torch.full((2,), eps).double()
        loss_BJ, _ = inner.losses(inner.radii(eps_B))
        found_B = ascend(fall, x.double(), eps_B, steps=10, starts=2)
        assert (-found_B >= (analysis.clean.margin_BJ - loss_BJ).amin(-1) - 1e-12).all()
        assert not ((found_B >= 0) & analysis.at(eps).certified_B).any()
