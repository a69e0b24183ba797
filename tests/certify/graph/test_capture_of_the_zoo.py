"""Every model of the zoo can be captured, and the captured model proves nearly what its own rules prove.

Norms of an adjoint certificate are those of matrices in both: a captured model has steps as wide as its images, and
from random starts the small norm of a pooled class token, which hardly depends on the image, would remain unknown.
"""

from typing import Any

import pytest
import torch

import zoo
from certify.adjoint import operator_norms
from certify.api import radius_of
from certify.graph.model import capture, prepared
from certify.methods import METHODS
from certify.shared.bake import model_from
from tests.tools.cases import mostly_slow
from tests.tools.small_models import distinct
from zoo.models.overview import tiny_options

QUICK = [("cert_vit_c10", "lofast_local"), ("l2_vit_s_w768", "lofast"), ("conv_4c3f", "lofast")]
LEAST = {"lofast": 0.98, "lofast_local": 0.98, "adjoint": 0.9}  # share that capture keeps
MOST = {"lofast": 1 + 1e-6, "lofast_local": 1 + 1e-6, "adjoint": 1.02}
NOTHING = 1e-9  # a radius that is rounding


@pytest.mark.parametrize(
    ("name", "method"), mostly_slow([(name, method) for name in distinct() for method in LEAST], *QUICK)
)
def test_capture_proves_what_the_rules_of_modules_prove(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_norms, "DENSE_LIMIT", 1024)
    torch.manual_seed(0)
    options = zoo.model_options(name, **tiny_options(name))
    model: Any = zoo.create_model(name, **tiny_options(name)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight))
        x = torch.rand(2, options["in_chans"], options["img_size"], options["img_size"])
        y = model(x).argmax(-1)
    served = prepared(model)
    exact = capture(served, tuple(x.shape[1:])).exact
    assert exact is not None
    by_modules, by_capture = (
        radius_of(METHODS[method](given, "a", "l2").analyse(x, y))
        for given in (model, model_from(model, served, exact))
    )
    assert (by_capture <= MOST[method] * by_modules + NOTHING).all()
    assert (by_capture >= LEAST[method] * by_modules - NOTHING).all()
