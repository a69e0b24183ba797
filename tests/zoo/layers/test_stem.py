"""The convolutional stem: its refusals, and no certificate for another grid.

Its function: the oracle of tests/zoo/models/test_models.py. Its certificates: tests/tools/trials.py, where it is one of
the parts.
"""

from typing import Any

import pytest
import torch

import zoo
from certify import certified_radius
from certizoo import UserError

SIZES: dict[str, Any] = {"img_size": 16, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}


@pytest.mark.parametrize(
    ("patch_size", "stem"),
    [(2, ()), (4, (6,)), (8, (6, 5)), (8, ((6, 8, 4, 2),)), (4, ((6, 3, 1, 1), (5, 4, 2, 1))), (4, ((6, 8, 4, 2),))],
)
def test_one_token_a_patch(patch_size: int, stem: Any) -> None:
    model: Any = zoo.create_model("dp_vit_ti", patch_size=patch_size, stem=stem, **SIZES)
    tokens = (16 // patch_size) ** 2
    assert model.patch_embed.num_patches == tokens
    assert model.patch_embed(torch.rand(2, 3, 16, 16)).shape == (2, tokens, 8)
    assert model(torch.rand(2, 3, 16, 16)).shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 4, "stem": ()}, "widths"),
        ({"patch_size": 4, "stem": (6, 6)}, "widths"),
        ({"patch_size": 4, "stem": (0,)}, "stem"),
        ({"patch_size": 4, "stem": (6, (6, 3, 1, 1))}, "stem"),
        ({"patch_size": 4, "stem": ((6, 3, 1),)}, "padding"),
        ({"patch_size": 4, "stem": ((6, 3, 0, 1),)}, "padding"),
        ({"patch_size": 4, "stem": ((6, 3, 2, 0),)}, "7 pixels"),
        ({"patch_size": 4, "stem": ((6, 9, 16, 0),)}, "1 pixels"),
        ({"patch_size": 4, "stem": ((6, 32, 1, 0),)}, "-15 pixels"),
        ({"patch_size": 4, "stem": (6,), "patch_cap": 1.0}, "patch_cap"),
        ({"patch_size": 4, "stem": (6,), "patch_constraint": "aol"}, "patch_constraint"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        zoo.create_model("dp_vit_ti", **SIZES, **options)


def test_an_image_of_another_size_is_refused() -> None:
    """Its single token would be added to every position."""
    model = zoo.create_model("dp_vit_ti", patch_size=4, stem=(6,), global_pool="avg", **SIZES).eval()
    image = torch.rand(1, 3, 4, 4)
    with pytest.raises(UserError, match="1 patches"):
        certified_radius(model, image, model(image).argmax(-1), "adjoint")
