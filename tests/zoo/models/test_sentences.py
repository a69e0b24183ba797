"""Text models: padding in training changes nothing, and certificates see sentences without it."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from certify import certified_radius
from certizoo import UserError
from certizoo.attacks import AttackConfig
from tests.tools.ascent import ascend, margin_loss
from tests.tools.cases import mostly_slow
from zoo.models.overview import tiny_options
from zoo.models.sentences import PADDING, Padded, by_length

NAME = "lofast_text_l3_h4"
TOKENS = 12  # of the tiny model


def text_model(seed: int, **overrides: Any) -> Any:
    """Return the tiny model in float64, with weights large enough for its attention to matter."""
    torch.manual_seed(seed)
    model = zoo.create_model(NAME, **tiny_options(NAME) | overrides)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "words" in name or "head" in name or "pos_embed" in name:
                parameter.copy_(torch.randn_like(parameter))
            elif "bias" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def sentences(lengths: tuple[int, ...], seed: int = 0, padded_to: int = TOKENS) -> Tensor:
    """Return numbers of words, padded."""
    generator = torch.Generator().manual_seed(seed)
    numbers_BT = torch.full((len(lengths), padded_to), PADDING)
    for row, length in zip(numbers_BT, lengths, strict=True):
        row[:length] = torch.randint(1, 16, (length,), generator=generator)
    return numbers_BT


def test_padding_does_not_change_logits_or_gradients() -> None:
    model, numbers_BT = text_model(0), sentences((1, 3, 3, 7, 12))
    x_BCNT = model.patch_embed.embed(numbers_BT).detach().requires_grad_()
    logits_BK = Padded(model, numbers_BT != PADDING)(x_BCNT)
    (grad_BCNT,) = torch.autograd.grad(logits_BK[:, 0].sum(), x_BCNT)
    keys = [str(i) for i in range(5)]
    for own, alone, _ in by_length(model, keys, numbers_BT, torch.zeros(5)):
        rows, length = [int(key) for key in own], alone.shape[2]
        alone.requires_grad_()
        logits = model(alone)
        torch.testing.assert_close(logits_BK[rows], logits, rtol=1e-12, atol=1e-12)
        (grad,) = torch.autograd.grad(logits[:, 0].sum(), alone)
        torch.testing.assert_close(grad_BCNT[rows, :, :length], grad, rtol=1e-10, atol=1e-12)
        assert not grad_BCNT[rows, :, length:].any()


def test_an_attack_moves_words_only_and_uses_its_whole_radius_on_them() -> None:
    model, numbers_BT = text_model(1).float(), sentences((2, 5, 12))
    kept_BT = numbers_BT != PADDING
    x_BCNT = model.patch_embed.embed(numbers_BT).detach()
    padded, attack = Padded(model, kept_BT), AttackConfig("l2", 0.3, 5)
    found_BCNT = attack.run(padded, x_BCNT, torch.tensor([0, 1, 0]), keep_worst=False, disturb=padded.still)
    moved_BCNT = found_BCNT - x_BCNT
    assert not moved_BCNT.transpose(1, 2)[~kept_BT].any()
    assert (moved_BCNT.flatten(1).norm(dim=1) <= 0.3 * (1 + 1e-5)).all()
    assert moved_BCNT.flatten(1).norm(dim=1).min() > 0.1


def test_words_learn() -> None:
    model, numbers_BT = text_model(2), sentences((3, 4))
    Padded(model, numbers_BT != PADDING)(model.patch_embed.embed(numbers_BT)).square().sum().backward()
    used = model.patch_embed.words.grad.abs().sum(1) > 0
    assert set(used.nonzero().flatten().tolist()) == set(numbers_BT.unique().tolist()) - {PADDING}


METHODS = ("lofast", "lofast_local", "adjoint", "image")


@pytest.mark.parametrize(
    ("method", "seed"), mostly_slow(product(METHODS, range(3)), ("lofast", 0), ("lofast_local", 0), ("adjoint", 1))
)
def test_no_ascent_changes_a_class_within_a_certified_radius(method: str, seed: int) -> None:
    """Search from 4 starts, at lengths from one word to the most; far outside of the radius it finds something."""
    model, found = text_model(seed, num_classes=2 + seed), 0.0
    keys, numbers_BT = [str(i) for i in range(5)], sentences((1, 1, 5, 5, 12), seed)
    for _, x_BCNT, _ in by_length(model, keys, numbers_BT, torch.zeros(5)):
        y_B = model(x_BCNT).argmax(1)
        radius_B = certified_radius(model, x_BCNT, y_B, method, nonce="n")
        assert (radius_B > 0).all()
        assert (ascend(margin_loss(model, y_B), x_BCNT, radius_B, 20, 4) < 0).all()
        found = max(found, float(ascend(margin_loss(model, y_B), x_BCNT, 40 * radius_B, 20, 4).max()))
    assert found > 0, "the search finds no adversarial sentence at any radius"


def test_a_padded_sentence_has_the_certificate_of_the_sentence() -> None:
    model, lengths = text_model(3).float(), (2, 5, 5)
    y_B, keys = torch.tensor([0, 1, 1]), ["a", "b", "c"]
    radii = []
    for padded_to in (5, TOKENS):
        parts = by_length(model, keys, sentences(lengths, 4, padded_to), y_B)
        radii.append(torch.cat([certified_radius(model, x, model(x).argmax(1), "lofast") for _, x, _ in parts]))
    assert torch.equal(*radii)
    assert radii[0].min() > 0


def test_a_longer_sentence_than_the_models_is_refused() -> None:
    model = text_model(0)
    x_BCNT = torch.rand(1, 2, TOKENS + 1, TOKENS, dtype=torch.float64)
    with pytest.raises((UserError, RuntimeError)):
        certified_radius(model, x_BCNT, torch.tensor([0]), "lofast")


@pytest.mark.parametrize("numbers", [[[0, 3]], [[3, 0, 4]], [[0, 0]]])
def test_an_empty_sentence_or_one_with_gaps_is_refused(numbers: list[list[int]]) -> None:
    with pytest.raises(UserError, match="is empty or has padding before its end"):
        list(by_length(text_model(0), ["a"], torch.tensor(numbers), torch.tensor([0])))


def test_images_pass_as_they_are() -> None:
    model, x = zoo.create_model("spec_vit_digits"), torch.rand(2, 1, 8, 8)
    ((keys, images, labels),) = by_length(model, ["a", "b"], x, torch.tensor([0, 1]))
    assert keys == ["a", "b"]
    assert images is x
    assert labels.tolist() == [0, 1]


def test_text_models_refuse_what_cannot_skip_padding() -> None:
    for options, words in (
        ({"block": "prenorm"}, "normfirst"),
        ({"global_pool": "cls"}, "avg"),
        ({"in_chans": 1}, "not in"),
    ):
        with pytest.raises(UserError, match=words):
            zoo.create_model(NAME, **options)
