"""Distillation is its equation, leaves the teacher alone, and a resumed run has the same teacher or is refused."""

import logging
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from certizoo import UserError
from certizoo.config.compose import compose_config
from tests.tools.launching import TINY
from tests.tools.teachers import SIZES, save_teacher
from trainers.job.checkpoint import check_same_run
from trainers.job.prepare import prepare
from trainers.job.teacher import find_teacher
from trainers.objectives import OBJECTIVES, SOFT_LABELS, Probe, Terms
from trainers.settings import DistillConfig, ObjectiveConfig
from trainers.steps.step import taught

CONFIG = DistillConfig(teacher="some", alpha=0.7, temperature=3.0)
BETA = 2.5


def vit(seed: int) -> Any:
    torch.manual_seed(seed)
    return zoo.create_model("dp_vit_ti", num_classes=5, **SIZES).double().eval()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(6, 1, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 5, (6,), generator=generator)


def attacked(images: Tensor, labels: Tensor) -> Tensor:
    return (images + 0.1).clamp(0, 1)


def probe_for(name: str, student: Any) -> Probe:
    def through(measure: Any, *inputs: Any) -> Any:
        return measure(student, *inputs)

    return Probe(through, attacked, lambda images: student(images).detach(), ObjectiveConfig(name, beta=BETA))


def run_with(teacher: Any, config: DistillConfig) -> Any:
    engine = SimpleNamespace(precision=nullcontext)
    return SimpleNamespace(teacher=teacher, engine=engine, job=SimpleNamespace(distill=config))


def terms_of(name: str, student: Any, teacher: Any, config: DistillConfig = CONFIG) -> Terms:
    probe = taught(run_with(teacher, config), probe_for(name, student), batch())
    return OBJECTIVES[name](probe, *batch())


def gradient(loss: Tensor, student: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [*student.parameters()])


def kl(p: Tensor, q: Tensor) -> Tensor:
    return sum((p[k] * (p[k].log() - q[k].log()) for k in range(len(p))), torch.zeros((), dtype=p.dtype))


def slow(name: str, student: Any, teacher: Any, image: Tensor, label: int) -> Tensor:
    """Write the equation out for one image: the teacher sees it as it is, PGD-AT's student its neighbour."""
    seen = attacked(image, torch.tensor(label)) if name == "pgd_at" else image
    z, z_t = student(seen[None])[0], teacher(image[None])[0].detach()
    cross_entropy = -(z[label].exp() / z.exp().sum()).log()
    soft = kl((z_t / 3.0).softmax(0), (z / 3.0).softmax(0))
    loss = 0.3 * cross_entropy + 0.7 * 3.0**2 * soft
    if name == "trades":
        loss = loss + BETA * kl(z.softmax(0), student(attacked(image, torch.tensor(label))[None])[0].softmax(0))
    return loss


@pytest.mark.parametrize("name", SOFT_LABELS)
def test_loss_and_gradient_are_those_of_the_equation(name: str) -> None:
    student, teacher = vit(0), vit(1).requires_grad_(False)
    pairs = zip(*batch(), strict=True)
    wanted = torch.stack([slow(name, student, teacher, image, int(label)) for image, label in pairs]).mean()
    found = terms_of(name, student, teacher)["loss"]
    assert float((found - wanted).detach()) == pytest.approx(0, abs=1e-12)
    for one, other in zip(gradient(found, student), gradient(wanted, student), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SOFT_LABELS)
def test_without_weight_it_is_the_plain_objective_exactly(name: str) -> None:
    student, teacher = vit(0), vit(1)
    plain = terms_of(name, student, None)
    mixed = terms_of(name, student, teacher, replace(CONFIG, alpha=0.0))
    assert {key: float(value.detach()) for key, value in plain.items()} == {
        key: float(value.detach()) for key, value in mixed.items()
    }
    for one, other in zip(gradient(plain["loss"], student), gradient(mixed["loss"], student), strict=True):
        assert torch.equal(one, other)


def test_a_student_equal_to_its_teacher_has_nothing_to_learn_from_it() -> None:
    student, teacher = vit(0), vit(0)
    loss = terms_of("clean", student, teacher, replace(CONFIG, alpha=1.0))["loss"]
    assert abs(float(loss.detach())) < 1e-12
    assert max(grad.abs().max() for grad in gradient(loss, student)) < 1e-10


def test_the_teacher_is_frozen_in_eval_mode_and_draws_nothing(tmp_path: Path) -> None:
    save_teacher(tmp_path)
    found = find_teacher(str(tmp_path), None)
    assert found is not None
    torch.manual_seed(3)
    before = torch.get_rng_state()
    teacher = found.load()
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    state = {name: value.clone() for name, value in teacher.state_dict().items()}
    student = zoo.create_model("dp_vit_ti", num_classes=10, **SIZES | {"drop_path_rate": 0.0})
    torch.set_rng_state(before)
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    probe = taught(run_with(teacher, CONFIG), probe_for("clean", student), (images, torch.arange(4)))
    OBJECTIVES["clean"](probe, images, torch.arange(4))["loss"].backward()
    assert not teacher.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[name], value) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())


# by name -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def job_with(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from the name of a teacher to the checked job."""
    monkeypatch.chdir(tmp_path)
    save_teacher(tmp_path / "runs" / "big" / "handover")

    def job(named: str | Path, *more: str) -> Any:
        words = [*TINY, f"data.root={digits}", "name=small", f"distill.teacher={named}", *more]
        return prepare(compose_config("adv_train", words))

    return job


def test_a_run_folder_and_its_hand_over_are_one_teacher(job_with: Any) -> None:
    by_run, by_folder = job_with("runs/big"), job_with("runs/big/handover")
    assert by_run.teacher.digest == by_folder.teacher.digest
    assert by_run.fingerprint == by_folder.fingerprint


def test_a_version_of_the_registry_is_a_teacher(job_with: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from certizoo.registry import browse

    asked: list[tuple[str, str | None]] = []

    def download(reference: str, uri: str | None = None) -> Path:
        asked.append((reference, uri))
        return tmp_path / "runs" / "big" / "handover"

    monkeypatch.setattr(browse, "download", download)
    for named in ("vit@champion", "vit/3"):
        assert job_with(named, "registry.uri=sqlite:///x.db").teacher.named == named
    assert asked == [("vit@champion", "sqlite:///x.db"), ("vit/3", "sqlite:///x.db")]


def test_a_published_model_is_a_teacher() -> None:
    found = find_teacher("cert_vit_c10", None)
    assert found is not None
    assert found.load()(torch.rand(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("runs/bih", "no such folder and no such published model"),
        ("cert_vit_c11", "nearest: cert_vit_c10"),
        ("runs", "runs is not a hand-over: model.safetensors is missing"),
        ("vit@champion", "distill.teacher=vit@champion: "),
    ],
)
def test_a_wrong_name_is_one_line(named: str, words: str, job_with: Any, store_in: str) -> None:
    with pytest.raises(UserError) as caught:
        job_with(named)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"distill.teacher={named}")
    assert "\n" not in str(caught.value)


def test_a_resumed_run_has_the_same_teacher(job_with: Any, tmp_path: Path) -> None:
    first = job_with("runs/big")
    saved: Any = SimpleNamespace(fingerprint=first.fingerprint)
    same = partial(check_same_run, saved, run_dir=tmp_path)
    shutil.copytree("runs/big/handover", "elsewhere")
    same(now=job_with("elsewhere").fingerprint)
    save_teacher(Path("elsewhere"), seed=8)
    plain = job_with("null")
    for other in (job_with("elsewhere"), plain):
        with pytest.raises(UserError, match=r"was trained with distill.teacher=[0-9a-f]{64}, but this command has"):
            same(now=other.fingerprint)
    with pytest.raises(UserError, match=r"distill.teacher=None, but this command has"):
        check_same_run(SimpleNamespace(fingerprint=plain.fingerprint), first.fingerprint, tmp_path)  # type: ignore[arg-type]


def test_other_data_are_a_warning(job_with: Any, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"name": "dp_vit_ti", "num_classes": 10, **SIZES}
    zoo.handover.save(Path("svhn"), zoo.create_model(**options), options, {"data": {"name": "svhn"}})
    with caplog.at_level(logging.WARNING):
        job_with("runs/big")
        assert "teacher" not in caplog.text
        job_with("svhn")
    assert "the teacher was trained on 'svhn', not on digits" in caplog.text
