"""The doctor's estimates against the machine and real runs: the need it reports is the need of the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zoo
from certizoo import UserError
from certizoo.config.compose import CONFIGS, compose_config
from tests.tools.launching import ROOT, TINY, environment
from trainers.doctor import estimate, machine
from trainers.doctor import findings as doctor
from trainers.doctor.machine import Finding
from trainers.job.job import Job
from trainers.job.prepare import prepare


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", "2")
    return folder


def job(*overrides: str) -> Job:
    return prepare(compose_config("adv_train", [*TINY, *overrides]))


# --- the command --------------------------------------------------------------------------------------------------


def test_a_healthy_machine(folder: Path) -> None:
    env = environment() | {"PYTHONPATH": str(ROOT), "COLUMNS": "400"}
    command = [sys.executable, "-m", "trainers.doctor", *TINY, "train.epochs=3"]
    done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("2 on ", "gloo", f"torch {torch.__version__}", "train: ", "1437 images", "ZeRO 1", "69 in all"):
        assert words in done.stdout, words
    assert sorted(path.name for path in folder.iterdir()) == ["data"], "nothing is written"


def test_something_missing_is_exit_status_1(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("COLUMNS", "400")
    assert doctor.main([*TINY, "data.root=nowhere", "registry.enabled=true"]) == 1
    shown = capsys.readouterr().out
    assert "nowhere" in shown
    assert "does not answer" in shown
    assert (shown.count("missing"), shown.count("wrong")) == (1, 1)


def test_a_wrong_command_is_exit_status_2(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["+modle=dp_vit_b"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_wrong_model_is_a_finding(here: Path) -> None:
    found = doctor.configured(["+model=spec_vit_bb", "registry.enabled=false"])
    assert [(one.what, one.fits, one.mark) for one in found] == [("configuration", False, "wrong")]
    assert "no model 'spec_vit_bb'; nearest: spec_vit_b" in found[0].found


# --- the machine -----------------------------------------------------------------------------------------------------


def test_a_version_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (fine,) = machine.requirements()
    assert fine.fits
    monkeypatch.setattr(machine, "version_of", lambda name: "1.0" if name == "torch" else fine.found)
    monkeypatch.setattr(
        machine.metadata,
        "requires",
        lambda name: ["torch>=2.11", "ruff>=9; extra == 'dev'", "certizoo[x]; extra == 'train'"],
    )
    (wrong,) = machine.requirements()
    assert not wrong.fits
    assert wrong.fix == "pip install 'torch>=2.11'"


def test_a_disk_too_small(tmp_path: Path) -> None:
    assert machine.disk(tmp_path / "not" / "yet", 1).fits
    assert not machine.disk(tmp_path, 2**60).fits


def test_sizes_are_read_by_people() -> None:
    assert [machine.size(n) for n in (5, 2048, 3 * 2**20, 5 * 2**30)] == ["5 B", "2 KiB", "3 MiB", "5.0 GiB"]


def test_a_run_that_does_not_fit(here: Path) -> None:
    small = job()
    need = estimate.estimate(small, 2)
    findings = {finding.what: finding for finding in doctor.memory(small, need, libraries=2**60)}
    assert findings["memory"].fits is False
    assert "micro_batch" in findings["memory"].fix
    assert doctor.table([Finding("a", "b", False, "c")]).row_count == 1


# --- the needs of a run -----------------------------------------------------------------------------------------------


def test_bytes_of_the_zero_stages(here: Path) -> None:
    """P parameters on 2 ranks, AdamW in float32 (b = 4): the table at the head of estimate.py."""
    for stage, (weights, gradients, states) in enumerate([(4, 4, 8), (4, 4, 6), (4, 2, 6), (2, 2, 6)]):
        need = estimate.estimate(job(f"deepspeed=zero{stage}"), 2)
        assert need.parameters > 10_000
        assert need.weights == pytest.approx(weights * need.parameters, abs=2)
        assert need.gradients == pytest.approx(gradients * need.parameters, abs=2)
        assert need.states == pytest.approx(states * need.parameters, abs=2)
        assert need.average == 0
    assert estimate.states_a_weight(job("optimizer=muon", "deepspeed=zero0")) == 2
    assert estimate.states_a_weight(job("optimizer=sgd", "optimizer.momentum=0.9")) == 1
    assert estimate.states_a_weight(job("optimizer=sgd", "optimizer.momentum=0")) == 0
    assert {path.stem for path in (CONFIGS / "deepspeed").glob("zero?.yaml")} == {f"zero{stage}" for stage in range(4)}


def test_activations_grow_with_the_batch_as_estimated(here: Path) -> None:
    small = job()
    model = zoo.create_model(**small.model)
    for images in (1, 5, 32):
        kept = estimate.saved_by_autograd(small, model, images)
        assert estimate.activations(small, model, images) == pytest.approx(kept, rel=0.02)
    least = 32 * 2 * 5 * 32 * 4  # images x layers x tokens x width: only the inputs of the blocks
    assert kept > 10 * least


def test_activations_are_those_of_the_objective(here: Path) -> None:
    """TRADES keeps the passes of images and of adversarial ones; a loss with an input gradient keeps that one's too."""
    kept = {name: estimate.estimate(job(f"objective={name}"), 2).activations for name in ("pgd_at", "trades", "lmce")}
    assert kept["trades"] > 1.9 * kept["pgd_at"]
    assert kept["lmce"] > 1.9 * kept["pgd_at"]


def test_recomputed_blocks_keep_less(here: Path) -> None:
    plain, thrifty = (estimate.estimate(job(f"train.grad_checkpointing={value}"), 2) for value in ("false", "true"))
    assert thrifty.activations < plain.activations / 2


@pytest.mark.slow
def test_a_real_run_takes_what_was_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", "1")
    settings = ("train.ema_decay=0.9", "train.max_steps=2", "train.eval_images=0", "name=real", "deepspeed=zero2")
    need = estimate.estimate(job(*settings), 1)
    done = subprocess.run(
        [sys.executable, str(ROOT / "trainers" / "adv_train.py"), *TINY, *settings],
        cwd=folder, env=environment(), text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "runs" / "real" / "checkpoints").glob("step*")
    mark = json.loads((path / "complete.json").read_text())
    assert sum(mark["files"].values()) == pytest.approx(need.checkpoint, rel=0.15)
    assert mark["position"]["step"] == need.total_steps == 2
    written = sum(file.stat().st_size for file in (folder / "runs" / "real").rglob("*") if file.suffix != ".png")
    assert written < need.disk


def test_a_folder_in_use_is_a_finding(here: Path) -> None:
    os.makedirs("runs/used", exist_ok=True)
    Path("runs/used/config.yaml").write_text("")
    with pytest.raises(UserError):
        job("name=used")
    findings = doctor.configured([*TINY, "name=used"])
    assert [finding.what for finding in findings if finding.fits is False] == ["configuration"]
