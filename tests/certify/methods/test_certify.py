"""The whole certificate: no attack beats it, it is monotone, and it refuses what it does not know."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zoo
from certify import certified_radius, certify, evaluate, explain
from certify.adjoint.adjoint import Adjoint
from certify.api import TOLERANCE, certifier, radius_of
from certify.methods import CHEAP, choices, image_shape, named, products
from certify.methods.lofast import LoFAST
from certify.methods.served import SERVED_METHODS
from certify.shared.bake import bake, logit_differences
from certify.shared.batching import CorrectImages
from certify.shared.certificate import UnsoundCertificate
from certify.stage.settings import Settings
from certizoo import UserError
from certizoo.attacks import AttackConfig, pgd
from tests.tools.ascent import ascend, margin_loss
from tests.tools.cases import mostly_slow
from tests.tools.small_models import THREE_HEADS
from zoo.bounds.rule_table import NoRule

STANDARD_LN: dict[str, Any] = {"norm": {"name": "layernorm", "eps": 0.1}}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("lofast_vit_c10", {}),
    ("lofast_vit_c10_smooth", {}),
    ("spec_vit_digits", {}),
    ("dp_vit_ti", STANDARD_LN | {"global_pool": "avg"}),
    ("dp_vit_ti", STANDARD_LN),
]


def random_model(seed: int) -> Any:
    """Return a seeded model of one family, with its initial weights moved and scaled at random."""
    name, options = FAMILIES[seed % len(FAMILIES)]
    torch.manual_seed(seed)
    statistics = {"mean": [0.5], "std": [0.5]}
    model = zoo.create_model(name, **(THREE_HEADS | statistics | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1).mul_(float(torch.empty(()).uniform_(0.5, 2)))
    return model


def easy_batch(model: Any, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, model(x).argmax(-1)  # the model's own answers, correct by construction


@pytest.mark.slow
@pytest.mark.parametrize("group", range(10))
def test_no_attack_beats_the_certified_radius(group: int) -> None:
    """Attack the baked function at the largest certified radius of each image.

    200 seeded random models (20 in each group), 4 images each; PGD on the margin with 100 steps and 5 restarts.
    """
    certified = 0
    for seed in range(20 * group, 20 * group + 20):
        model = random_model(seed)
        x, y = easy_batch(model, 4, seed)
        radius_B = certified_radius(model, x, y, "lofast")
        certified += int((radius_B > 1e-4).sum())
        found_B = ascend(margin_loss(bake(model), y), x.double(), radius_B, steps=100, starts=5)
        assert (found_B <= 0)[radius_B > 0].all(), f"model {seed}: a certificate was beaten"
    assert certified >= 20, "too little was certified for the test to mean anything"


@pytest.mark.parametrize("seed", mostly_slow(range(5), 0, 1))
def test_the_margin_never_falls_by_more_than_the_loss(seed: int) -> None:
    """For every pair of classes the drop that an attack finds stays below the bound, certified or not."""
    model = random_model(seed)
    x, y = easy_batch(model, 8, seed)
    baked = bake(model)
    for eps in (0.05, 0.5, 2.0):
        analysis: Any = LoFAST(model).analyse(x, y).parts[0][1]
        loss_BJ = analysis.weight_BJ * analysis.radius(torch.full((8,), eps, dtype=torch.float64))[:, None]
        adversarial = pgd(baked, x.double(), y, AttackConfig("l2", eps, steps=50, loss="margin"))
        with torch.no_grad():
            before, after = baked(x.double()), baked(adversarial)
        drop_BJ = (before.gather(1, y[:, None]) - before) - (after.gather(1, y[:, None]) - after)
        assert (drop_BJ <= loss_BJ + 1e-9).all()


def test_bounds_shrink_with_eps_and_radius_is_where_the_proof_ends() -> None:
    model = random_model(0)
    x, y = easy_batch(model, 16, 0)
    analysis = certifier(model, "lofast").analyse(x, y)
    losses = torch.stack([analysis.at(eps).loss_B - analysis.at(eps).margin_B for eps in (0.0, 1e-4, 1e-2, 0.1, 1.0)])
    assert (losses.diff(dim=0) >= -1e-12).all()
    radius_B = radius_of(analysis)
    assert analysis.at(radius_B).certified_B[radius_B > 0].all()
    assert not analysis.at(radius_B * (1 + TOLERANCE) + 1e-9).certified_B.any()


def test_misclassified_images_get_nothing() -> None:
    model = random_model(0)
    x, y = easy_batch(model, 8, 0)
    wrong = (y + 1) % 4
    assert not certify(model, x, wrong, eps=0.0, method="lofast").certified_B.any()
    assert not certify(model, x, wrong, eps=0.0, method="lofast").correct_B.any()
    assert (certified_radius(model, x, wrong, "lofast") == 0).all()


def test_batching_does_not_matter() -> None:
    model = random_model(1)
    x, y = easy_batch(model, 6, 1)
    together = certified_radius(model, x, y, "lofast")
    alone = torch.cat([certified_radius(model, x[i : i + 1], y[i : i + 1], "lofast") for i in range(6)])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-12)


def test_an_overflowing_bound_is_unknown_never_certified() -> None:
    torch.manual_seed(0)
    model: Any = zoo.create_model("dp_vit_ti", **THREE_HEADS).eval()
    x, y = easy_batch(model, 4, 0)
    certificate = certify(model, x, y, eps=1e300, method="lofast")
    assert certificate.unknown_B.all()
    assert not certificate.certified_B.any()
    constant = nn.init.zeros_(model.head.weight)  # a constant classifier: margins 0 * inf must not become NaN
    assert not constant.any()
    assert not certify(model, x, torch.zeros(4, dtype=torch.long), eps=1e300).certified_B.any()


def test_a_nan_is_never_certified() -> None:
    model = random_model(0)
    x, y = easy_batch(model, 2, 0)
    with torch.no_grad():
        model.head.bias[1] = torch.nan
    with pytest.raises(UserError, match=r"head\.bias holds NaN"):
        certify(model, x, y, eps=0.01, method="lofast")


def test_bake_folds_without_touching_the_model() -> None:
    model = random_model(0).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    baked: Any = bake(model)
    assert model.training
    assert not any("parametrizations" in name for name, _ in baked.named_parameters())
    assert all(parameter.dtype == torch.float64 for parameter in baked.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    x, _ = easy_batch(model.eval(), 4, 0)
    assert logit_differences(model, baked, x).max() < 1e-4
    with torch.no_grad():
        baked.head.weight.mul_(2)
    with pytest.raises(UserError, match="does not reproduce"):
        logit_differences(model, baked, x)


def test_uncertifiable_models_and_methods_are_refused() -> None:
    model = random_model(0)
    x, y = easy_batch(model, 2, 0)
    with pytest.raises(UserError, match="nearest: "):
        certify(model, x, y, eps=0.1, method="hope")
    with pytest.raises(UserError, match="in \\[0,1\\]"):
        certify(model, x * 255, y, eps=0.1, method="lofast")
    with pytest.raises(UserError, match="labels"):
        certify(model, x, y + 10, eps=0.1, method="lofast")
    for eps in (-0.1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="eps"):
            certify(model, x, y, eps=eps, method="lofast")
    handle = model.blocks[0].attn.qkv.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(NoRule, match="hook"):
        certify(model, x, y, eps=0.1, method="lofast")
    handle.remove()
    certify(model, x, y, eps=0.1, method="lofast")
    replaced, model.blocks[0].attn.proj = model.blocks[0].attn.proj, nn.Sequential(model.blocks[0].attn.proj)
    with pytest.raises(NoRule, match="Sequential"):
        certify(model, x, y, eps=0.1, method="lofast")
    model.blocks[0].attn.proj = replaced
    model.blocks[0].mlp = nn.Softsign()
    with pytest.raises(NoRule, match="Softsign"):
        certify(model, x, y, eps=0.1, method="lofast")
    with pytest.raises(NoRule, match="Conv2d"):
        certify(nn.Conv2d(1, 4, 8), x, y, eps=0.1)


def test_evaluate_answers_clean_attack_and_proof_together() -> None:
    model = random_model(2)
    x, y = easy_batch(model, 6, 2)
    table = evaluate(model, x, y, eps=(1e-3, 0.1), method="lofast")
    assert list(table["key"]) == [str(i) for i in range(6)]
    assert table["correct"].all()
    np.testing.assert_array_equal(table["radius.lofast"], certified_radius(model, x, y, "lofast"))
    for eps in ("0.001", "0.1"):
        assert (table.loc[table[f"certified.{eps}"] == "certified", f"pgd.{eps}"]).all()


def test_a_refuted_certificate_stops_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted rule claims that nothing moves; the attack refutes it, and no result is reported."""
    model = random_model(0)
    x, y = easy_batch(model, 16, 0)
    honest = LoFAST.analyse

    def wrong(self: LoFAST, *args: torch.Tensor) -> CorrectImages:
        analysis = honest(self, *args)
        inner: Any = analysis.parts[0][1]
        return replace(analysis, parts=[(analysis.parts[0][0], replace(inner, radius=lambda r: 0 * r))])

    monkeypatch.setattr(LoFAST, "analyse", wrong)
    with pytest.raises(UnsoundCertificate, match="image"):
        evaluate(model, x, y, eps=(20.0,), method="lofast")


@pytest.mark.slow
def test_evaluate_asks_auto() -> None:
    model = random_model(2)
    assert "radius.best" in evaluate(model, *easy_batch(model, 1, 0), eps=(1e-3,), nonce="one").columns


def test_auto_is_best_where_that_can_be_afforded() -> None:
    small = random_model(2)
    with torch.device("meta"):
        large = zoo.create_model("dp_vit_ti")
    assert (named("auto", small), named("auto", large), named("adjoint", large)) == ("best", "lofast", "adjoint")
    settings = Settings(served_dtype="float32")
    assert (settings.of(small).method, settings.of(large).method) == ("best", "lofast")
    middle = zoo.create_model("dp_vit_ti", img_size=32, patch_size=16)
    words = zoo.create_model("lofast_text_l3_h4", vocabulary=2**15)
    assert named("auto", words) == "best", "words are no part of the certified function"
    assert named("auto", middle) == "adjoint"
    assert choices("auto", nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 2, 2))[0] == "adjoint", "nets are wide"
    assert {"best", "adjoint", "lofast"} <= set(SERVED_METHODS), "which count rounding"
    assert Settings().of(small) == replace(Settings(), method="best")


@pytest.mark.parametrize("name", mostly_slow(zoo.list_models(), "conv_6c2f", "l2_certvit_mnist", "covit_t1"))
def test_auto_is_one_method_with_images_and_without(name: str) -> None:
    """Python and `evaluate` know the images; the stage and the commands know the model alone."""
    options = zoo.model_options(name)
    with torch.device("meta"):
        model = zoo.create_model(name)
    shape = (options["in_chans"], options["img_size"], options["img_size"])
    assert image_shape(model) == shape
    if name.startswith("conv_"):
        assert (choices("auto", model)[0] == "adjoint") == (products(model, shape) <= CHEAP)


@pytest.mark.slow
def test_auto_is_lofast_everywhere_where_a_layer_has_no_second_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.create_model("dp_vit_ti", img_size=32, patch_size=16, depth=3).eval()
    x = torch.rand(1, 3, 32, 32)
    y = model(x).argmax(-1)

    def refuse(self: Adjoint, model: nn.Module, *_: Any) -> None:
        raise NoRule(model, "no remainder is proved for this module type")

    assert explain(model, x, y).auto == Settings().of(model).method == "adjoint"
    monkeypatch.setattr(Adjoint, "__init__", refuse)
    assert isinstance(certifier(model, "auto", batch=(x, y)), LoFAST)
    assert explain(model, x, y).auto == Settings().of(model).method == "lofast"
    assert "radius.lofast" in evaluate(model, x, y, eps=(1e-9,), attack=AttackConfig(norm="l2", steps=1)).columns
    with pytest.raises(NoRule):
        certifier(model, "adjoint", batch=(x, y))
