"""Whole certificates of networks whose queries, keys and values are normalised, against ascent over the image."""

import pytest
import torch

import zoo
from certify.image.image import Image, ImageAnalysis
from tests.tools.cases import mostly_slow
from tests.tools.image_stages import analysed, beaten, formed_losses, stage_of
from tests.tools.small_models import AVG, SMALL

OPTIONS = SMALL | AVG | {"norm": {"name": "layernorm", "eps": 1.0}, "mlp": "gelu", "block": "prenorm", "stem": (6,)}
SIZES = {"ln": 0.2, "scsa": 0.5}  # of the weights
EPS = 0.02


def analysis_of(attention: str, norm: str, seed: int) -> tuple[Image, ImageAnalysis]:
    torch.manual_seed(seed)
    model = zoo.create_model(f"{attention}_vit_ti", **OPTIONS | {"depth": 1}).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn_like(p) * SIZES[attention] * (1 + seed) * p.shape[-1] ** -0.5)
    return analysed(model, 4, norm)


@pytest.mark.parametrize(
    ("attention", "norm"), mostly_slow([(a, n) for a in SIZES for n in ("l2", "linf")], ("ln", "l2"))
)
@pytest.mark.parametrize("seed", mostly_slow((0, 1), 1))
def test_ascent_finds_no_image_that_loses_more(attention: str, norm: str, seed: int) -> None:
    """Attack the image method's own bound, without the adjoint's help; it is finite."""
    certifier, analysis = analysis_of(attention, norm, seed)
    stage = stage_of(analysis, EPS)
    label_B1 = analysis.clean.label_B[:, None]
    assert torch.isfinite(formed_losses(stage, stage.most_B).scatter(1, label_B1, 0.0)).all()
    assert not beaten(certifier, analysis, stage, (EPS, 0.1 * EPS))
