"""A class token beside the mean of all tokens: the function, and its bound against the dense Jacobian."""

import pytest
import torch
from torch import nn

from certizoo import UserError
from zoo.bounds.first_order import classifier_of
from zoo.models.vit import ViT


def vit(class_token: bool | None, global_pool: str) -> ViT:
    """Return an affine model without a block: the mean of patches and class token, and a head."""
    torch.manual_seed(0)
    model = ViT(
        block=lambda i, drop: nn.Identity(),
        norm=lambda dim: nn.Identity(),
        img_size=8,
        patch_size=4,
        in_chans=1,
        num_classes=3,
        embed_dim=6,
        depth=0,
        global_pool=global_pool,
        class_token=class_token,
        mean=(0.5,),
        std=(0.25,),
    )
    nn.init.normal_(model.pos_embed)
    if model.cls_token is not None:
        nn.init.normal_(model.cls_token)
    return model.double().eval()


def test_the_mean_is_of_all_tokens() -> None:
    model, x = vit(True, "avg"), torch.rand(2, 1, 8, 8, dtype=torch.float64)
    assert model.cls_token is not None
    patches = model.patch_embed(model.normalize(x))
    total = patches.sum(1) + model.cls_token[0, 0] + model.pos_embed.sum((0, 1))
    torch.testing.assert_close(model.pool(model.forward_features(x)), total / 5)


def test_its_bound_holds_and_is_close() -> None:
    """The class token is constant: of five tokens four move, and the bound counts five, a factor of (5 / 4)^(1/2)."""
    model, x = vit(True, "avg"), torch.rand(1, 1, 8, 8, dtype=torch.float64)

    def pooled(pixels: torch.Tensor) -> torch.Tensor:
        return model.pool(model.forward_features(pixels.view(1, 1, 8, 8)))[0]

    jacobian = torch.autograd.functional.jacobian(pooled, x.flatten())
    true = float(torch.linalg.matrix_norm(jacobian, 2))
    trunk, _ = classifier_of(model)
    _, bound = trunk(x)
    assert true <= float(bound(torch.ones(1, dtype=torch.float64))) <= 1.12 * true


@pytest.mark.parametrize(("class_token", "global_pool", "has"), [(None, "avg", False), (None, "cls", True)])
def test_by_default_there_is_one_where_it_is_pooled(class_token: None, global_pool: str, has: bool) -> None:
    assert (vit(class_token, global_pool).cls_token is not None) == has


def test_what_is_pooled_has_to_be_there() -> None:
    with pytest.raises(UserError, match="class_token"):
        vit(False, "cls")
