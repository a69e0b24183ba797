"""The attacks of other libraries keep our promises: every kind, in ball and box, and nothing else is touched."""

import logging
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

import zoo
from attacks import KINDS, Attack, AttackConfig, make
from attacks.attention import WEIGHT, loss_of, pull
from attacks.auto import AutoAttack
from attacks.corruption import COMMON, SEEDED, Corruption
from attacks.guard import inside
from attacks.losses import ce
from attacks.minimal import CarliniWagner, DeepFool
from attacks.norms import NORMS, distance
from attacks.transfer import Transfer
from certizoo import UserError
from tests.small_models import PARTS, SMALL

ROUNDING = 1e-6
# A cheap setting of every kind: a new kind without one fails below.
OPTIONS: dict[str, dict[str, Any]] = {
    "pgd": {"norm": "l2", "eps": 0.3, "steps": 3, "stop_when_fooled": True},
    "autoattack": {"norm": "linf", "eps": 0.05, "attacks": ["apgd-ce", "apgd-t"]},
    "cw_l2": {"steps": 20},
    "deepfool": {},
    "corruption": {"name": "gaussian_noise", "severity": 5},
}
FOOLING = [kind for kind in KINDS if kind != "corruption"]


def mlp(classes: int = 10, side: int = 8, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 24), nn.Tanh(), nn.Dropout(0.5), nn.Linear(24, classes))


def vit(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = zoo.create_model("dp_vit_ti", **(SMALL | PARTS["standard"] | {"num_classes": 10} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


@torch.no_grad()
def own_labels(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model.eval()(x)
    return logits.argmax(1)


def images_of(count: int, side: int = 8, seed: int = 1) -> Tensor:
    images = torch.rand(count, 1, side, side, generator=Generator().manual_seed(seed))
    images[0] = 0.0  # a corner of the box
    return images


def attack_of(kind: str) -> Attack:
    if kind == "corruption":
        pytest.importorskip("imagecorruptions", reason="the extra `corruptions` is not installed")
    return make({"kind": kind} | OPTIONS[kind])


def survivors(model: nn.Module, x: Tensor, labels: Tensor) -> list[bool]:
    right: list[bool] = (own_labels(model, x) == labels).tolist()
    return right


# every kind -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kind_keeps_box_ball_dtype_and_the_model(kind: str, dtype: torch.dtype) -> None:
    attack, side = attack_of(kind), 32 if kind == "corruption" else 8
    model, images = mlp(side=side).to(dtype), images_of(5, side).to(dtype)
    labels = own_labels(model, images)
    labels[1] = (labels[1] + 1) % 10  # one is wrong already
    model.train()
    model.get_submodule("1").eval()
    model.get_submodule("1").get_parameter("bias").requires_grad_(False)
    modes = [module.training for module in model.modules()]
    state = [(p.detach().clone(), p.requires_grad, p.grad) for p in model.parameters()]
    before, hidden = images.clone(), _global_state()
    with torch.no_grad():  # as evaluation calls it
        found = attack.run(model, images, labels, [Generator().manual_seed(i) for i in range(5)])
    assert _global_state() == hidden, "the process' own random numbers, loggers and tracer are not the attack's to use"
    assert found.dtype == dtype
    assert found.shape == images.shape
    assert not found.requires_grad
    assert found.min() >= 0
    assert found.max() <= 1
    if attack.eps is not None:
        assert distance(found, images, attack.norm).max() <= attack.eps + ROUNDING
    assert torch.equal(images, before)
    assert [module.training for module in model.modules()] == modes
    for p, (value, requires_grad, grad) in zip(model.parameters(), state, strict=True):
        assert torch.equal(p, value)
        assert p.requires_grad == requires_grad
        assert p.grad is grad
        assert not p._backward_hooks
    assert attack.norm in (*NORMS, "none")


def _global_state() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    tracer, loggers = sys.gettrace(), logging.root.handlers[:]
    return [torch.get_rng_state().tolist(), random.getstate(), name, list(keys), rest, tracer, loggers]


@pytest.mark.parametrize("kind", FOOLING)
def test_every_kind_fools_and_what_it_does_not_fool_or_was_wrong_comes_back(kind: str) -> None:
    model, images = mlp(), images_of(6)
    labels = own_labels(model, images)
    labels[:2] = (labels[:2] + 3) % 10
    found = attack_of(kind).run(model, images, labels, Generator().manual_seed(0))
    survives = survivors(model, found, labels)
    assert sum(survives) < 4, "nothing was fooled at all"
    assert torch.equal(found[:2], images[:2])
    if kind != "pgd":  # which gives back the worst point it saw
        assert torch.equal(found[survives], images[survives])


@pytest.mark.parametrize("kind", FOOLING)
def test_labels_of_images_that_are_wrong_already_do_not_matter(kind: str) -> None:
    model, images = mlp(), images_of(5)
    right = own_labels(model, images)
    runs = []
    for shift in (1, 4):
        labels = torch.where(torch.arange(5) % 2 == 0, right, (right + shift) % 10)
        draws = [Generator().manual_seed(i) for i in range(5)]
        runs.append(attack_of(kind).run(model, images, labels, draws))
    assert torch.equal(*runs)


@pytest.mark.parametrize("kind", KINDS)
def test_image_by_image_the_same_in_every_batch_unless_it_says_so(kind: str) -> None:
    attack, side = attack_of(kind), 32 if kind == "corruption" else 8
    if attack.together:
        pytest.skip("its outcomes belong to the batch, and it says so")
    model, images = mlp(side=side).double(), images_of(5, side).double()
    labels = own_labels(model, images)

    def attacked(rows: list[int]) -> Tensor:
        return attack.run(model, images[rows], labels[rows], [Generator().manual_seed(row) for row in rows])

    whole = attacked([0, 1, 2, 3, 4])
    for rows in ([3], [4, 1]):
        assert torch.allclose(attacked(rows), whole[rows], rtol=0, atol=1e-5)  # foolbox reckons in float32


@pytest.mark.parametrize("kind", KINDS)
def test_no_images_no_attack(kind: str) -> None:
    if kind == "corruption":
        pytest.skip("draws images one by one")
    model, images = mlp(), images_of(2)[:0]
    assert attack_of(kind).run(model, images, torch.zeros(0, dtype=torch.int64)).shape == images.shape


# guard ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_guard_brings_anything_back_and_leaves_what_is_inside(norm: str) -> None:
    images, eps = images_of(4).double(), 0.2
    wild = images + torch.tensor([0.0, 1e-4, 3.0, float("nan")]).view(4, 1, 1, 1)
    found = inside(wild, images, norm, eps)
    assert found.isfinite().all()
    assert found.min() >= 0
    assert found.max() <= 1
    assert distance(found, images, norm).max() <= eps + ROUNDING
    assert torch.equal(found[1], wild[1].clamp(0, 1))


# AutoAttack -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_model", "norm", "eps"),
    [
        (mlp, "linf", 0.06),
        (mlp, "l2", 0.35),
        (vit, "linf", 0.4),
        (vit, "l2", 1.5),
        pytest.param(mlp, "linf", 0.03, marks=pytest.mark.slow),  # an image comes to Square and its 5000 queries
        pytest.param(mlp, "l2", 0.2, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_autoattack_is_the_authors_image_by_image(make_model: Any, norm: str, eps: float) -> None:
    """The same seed and the same batch; ten classes, so that their version `standard` is as they call it."""
    from pyautoattack import AutoAttack as Authors

    model, images = make_model().eval(), images_of(4)
    labels = own_labels(model, images)
    labels[3] = (labels[3] + 1) % 10
    authors = Authors(model, norm={"linf": "Linf", "l2": "L2"}[norm], eps=eps, seed=5, version="standard")
    theirs, _ = authors.run_standard_evaluation(images, labels, batch_size=4)
    ours = AutoAttack(norm, eps, seed=5).run(model, images, labels)
    assert torch.equal(ours, theirs)
    assert survivors(model, ours, labels) != survivors(model, images, labels), "nothing was fooled at all"


def test_autoattack_of_few_classes() -> None:
    images = images_of(3)
    for classes, too_many, refused in (
        (3, ("apgd-ce", "apgd-t"), r"apgd-t needs 4 classes or more, the model has 3; set attacks to \['apgd-ce'\]"),
        (2, ("apgd-dlr",), "apgd-dlr needs 3 classes or more, the model has 2; set attacks to .'apgd-ce', 'fab-t'"),
    ):
        model = mlp(classes)
        with pytest.raises(UserError, match=refused):
            AutoAttack("linf", 0.1, too_many).run(model, images, own_labels(model, images))
    for classes, attacks in ((4, ("apgd-t", "fab-t")), (3, ("apgd-dlr",)), (2, ("apgd-ce", "fab-t"))):
        model = mlp(classes)
        labels = own_labels(model, images)
        found = AutoAttack("linf", 0.9, attacks).run(model, images, labels)
        assert not all(survivors(model, found, labels))


def test_autoattack_refuses_in_words() -> None:
    wrong: list[tuple[dict[str, object], str]] = [
        ({"norm": "l1"}, "norm=l1"),
        ({"eps": 0}, "eps=0"),
        ({"attacks": ["pgd"]}, "choose some of apgd-ce, apgd-dlr"),
        ({"attacks": []}, "choose some of"),
    ]
    for options, message in wrong:
        with pytest.raises(UserError, match=message):
            make({"kind": "autoattack"} | options)
    small = torch.rand(2, 1, 4, 4)
    with pytest.raises(UserError, match="5 pixels a side"):
        AutoAttack("l2", 0.5, ("square",)).run(mlp(side=4), small, torch.zeros(2, dtype=torch.int64))


def test_autoattack_is_quiet_and_leaves_no_file(tmp_path: Any, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model, images = mlp(), images_of(2)
    AutoAttack("linf", 0.1, ("apgd-ce", "apgd-t")).run(model, images, own_labels(model, images))
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


# foolbox --------------------------------------------------------------------------------------------------------------


def linear() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Logits (<w,x> - b, 0), an image far from the box, and its distance to the boundary <w,x> = b."""
    w = torch.randn(16, generator=Generator().manual_seed(2))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    images = torch.full((1, 1, 4, 4), 0.5)
    with torch.no_grad():
        model.get_submodule("1").get_parameter("weight").copy_(torch.stack([w, torch.zeros(16)]))
        model.get_submodule("1").get_parameter("bias").copy_(torch.tensor([0.4 - 0.5 * w.sum(), 0.0]))
    return model, images, torch.tensor([0]), 0.4 / w.norm()


def test_minimal_attacks_find_the_distance_to_a_hyperplane() -> None:
    model, images, labels, least = linear()
    for attack, within in ((DeepFool(), 1.03), (CarliniWagner(c=10, steps=400), 1.1)):
        found = attack.run(model, images, labels)
        assert least <= distance(found, images, "l2") <= within * least
        assert not any(survivors(model, found, labels))


def test_carlini_wagner_does_not_count_what_is_farther_than_the_threshold() -> None:
    model, images, labels, least = linear()
    for share, counts in ((0.9, False), (1.5, True)):
        found = CarliniWagner(c=10, steps=400, threshold=share * float(least)).run(model, images, labels)
        assert torch.equal(found, images) != counts


def test_minimal_attacks_on_a_zoo_model_are_deterministic() -> None:
    model, images = vit().train(), images_of(4)
    labels = own_labels(model, images)
    for attack in (CarliniWagner(steps=10), DeepFool(steps=5)):
        assert torch.equal(*(attack.run(model.train(), images, labels) for _ in "ab"))


def test_minimal_attacks_refuse_in_words() -> None:
    for options, key in (({"kind": "cw_l2", "steps": 0}, "steps=0"), ({"kind": "cw_l2", "threshold": 0}, "threshold=0"),
                         ({"kind": "deepfool", "candidates": 1}, "candidates")):  # fmt: skip
        with pytest.raises(UserError, match=key):
            make(options)


# transfer -------------------------------------------------------------------------------------------------------------


def test_transfer_perturbs_against_the_source_and_never_asks_the_target() -> None:
    source, images = mlp(), images_of(6)
    labels = own_labels(source, images)
    attack = AttackConfig("l2", 0.5, steps=5, loss="margin")

    class Target(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the target is not the attack's to ask")

    transfer = Transfer(source, attack)
    found = transfer.run(Target(), images, labels, Generator().manual_seed(0))
    assert torch.equal(found, attack.run(source, images, labels, Generator().manual_seed(0)))
    assert (transfer.norm, transfer.eps, transfer.together) == ("l2", 0.5, False)
    assert not all(survivors(source, found, labels))


# corruptions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_corruption_draws_by_image_and_gets_worse(name: str, channels: int) -> None:
    library = pytest.importorskip("imagecorruptions", reason="the extra `corruptions` is not installed")
    assert tuple(library.get_corruption_names()) == COMMON
    smooth = torch.linspace(0.2, 0.8, 32).expand(2, channels, 32, 32).clone()
    labels = torch.zeros(2, dtype=torch.int64)

    def corrupted(severity: int, seed: int, rows: slice = slice(None)) -> Tensor:
        draws = [Generator().manual_seed(seed + i) for i in range(2)][rows]
        return Corruption(name, severity).run(mlp(), smooth[rows], labels[rows], draws)

    mild, hard = corrupted(1, 0), corrupted(5, 0)
    assert torch.equal(hard, corrupted(5, 0))
    assert torch.equal(hard[1:], corrupted(5, 0, slice(1, 2)))
    assert distance(hard, smooth, "l2").mean() >= distance(mild, smooth, "l2").mean() > 0
    assert set(SEEDED) < set(COMMON)


def test_corruptions_refuse_in_words() -> None:
    with pytest.raises(UserError, match="name=rain does not exist; choose one of gaussian_noise"):
        make({"kind": "corruption", "name": "rain"})
    with pytest.raises(UserError, match="severity=6"):
        make({"kind": "corruption", "name": "fog", "severity": 6})
    with pytest.raises(UserError, match="corruption needs name"):
        make({"kind": "corruption"})


def test_without_the_library_of_corruptions_the_mend_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attacks.corruption.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'certizoo\[corruptions\]'"):
        Corruption("fog")


def test_small_images_are_not_corrupted() -> None:
    pytest.importorskip("imagecorruptions", reason="the extra `corruptions` is not installed")
    with pytest.raises(UserError, match="32 pixels a side or more, these have 28x28"):
        Corruption("fog").run(mlp(), torch.rand(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))


# attention ------------------------------------------------------------------------------------------------------------

ATTENTIVE = {
    "dp_vit_ti": PARTS["standard"],
    "l2_vit_ti": PARTS["standard"],
    "scsa_vit_ti": PARTS["standard"],
    "dp_convit_ti": {"patch_size": 2, "embed_dim": 16, "depth": 3, "num_heads": 2},
    "dp_swin_t": {"patch_size": 1, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4},
}


@pytest.mark.parametrize("name", ATTENTIVE)
def test_the_attention_loss_pulls_in_every_kind_of_block(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.create_model(name, **(SMALL | ATTENTIVE[name])).eval()
    images = images_of(3).requires_grad_(True)
    labels = torch.tensor([0, 1, 2])
    before = sum(len(module._forward_pre_hooks) for module in model.modules())
    with loss_of("attention", model) as fool:
        logits = model(images)
        loss_B = fool(logits, labels)
        alone = fool(model(images[1:2]), labels[1:2])
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == before
    pulled_B = (loss_B - ce(logits, labels)) / WEIGHT
    (grad,) = torch.autograd.grad(pulled_B.sum(), images)
    assert grad.flatten(1).norm(dim=1).min() > 0
    assert torch.allclose(alone, loss_B[1:2], atol=1e-4), "an image's loss does not depend on its neighbours"


def test_the_pull_is_its_equation() -> None:
    model = vit().double()
    attention: Any = model.get_submodule("blocks.0.attn")
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    q, k, _ = attention.heads(x)
    slow = torch.zeros(2, 5, dtype=torch.float64)
    for b in range(2):
        for j in range(5):
            for h in range(2):
                for n in range(5):
                    slow[b, j] += attention.scale * (q[b, h, n] @ k[b, h, j]) / (2 * 5)
    assert torch.allclose(pull(attention, x), slow)


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_pgd_on_attention_stays_in_the_ball_and_takes_its_hooks_along(norm: str) -> None:
    model, images = vit(), images_of(6)
    labels, eps = own_labels(model, images), {"linf": 0.1, "l2": 0.8}[norm]
    attack = AttackConfig(norm, eps, steps=8, loss="attention", stop_when_fooled=True)
    found = attack.run(model, images, labels, Generator().manual_seed(0))
    assert distance(found, images, norm).max() <= eps + ROUNDING
    assert not all(survivors(model, found, labels))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    with pytest.raises(AssertionError):
        attack.run(model, images[..., :5], labels)
    assert not any(module._forward_pre_hooks for module in model.modules()), "also after an exception"


def test_the_attention_loss_refuses_a_model_without() -> None:
    with pytest.raises(UserError, match="Sequential has no dot-product attention; use margin"):
        AttackConfig("l2", 0.5, loss="attention").run(mlp(), images_of(2), torch.tensor([0, 1]))
