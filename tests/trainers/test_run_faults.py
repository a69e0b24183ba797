"""One run of plain python through everything that interrupts a person's run: a kill, Ctrl-C, a longer schedule."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from certizoo import UserError
from certizoo.config.compose import compose_config
from tests.tools.launching import ROOT, TINY, environment, finish, reach, rows
from trainers.job import checkpoint
from trainers.job.job import Job
from trainers.job.prepare import prepare

RUN = (
    *TINY, "name=run", "train.epochs=1", "train.log_every=1", "train.eval_images=0", "certify.enabled=true",
    "certify.images=3", "certify.eps=[0.01]", "certify.headline_eps=0.01", "certify.method=lofast", "data.workers=1",
)  # fmt: skip
SCRIPT = ROOT / "trainers" / "adv_train.py"


def start(folder: Path, *more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *RUN, *more], cwd=folder, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def prepared(folder: Path, *more: str) -> Job:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return prepare(compose_config("adv_train", [*RUN, "resume=auto", *more]))


@pytest.fixture(scope="module")
def folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("interrupted")
    shutil.copytree(digits, root / "data" / "digits")
    return root


@pytest.fixture(scope="module")
def killed(folder: Path) -> Path:
    """Kill a run before its first checkpoint."""
    process = start(folder)
    reach(process, folder / "runs" / "run", 2)
    process.kill()
    process.communicate()
    assert checkpoint.newest(folder / "runs" / "run") is None
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.lr=1e-3", "trained with optimizer.lr=0.003, but this command has optimizer.lr=0.001"),
        ("seed=5", "trained with seed=0"),
        ("model.depth=3", "trained with model.depth=2"),
    ],
)
def test_another_recipe_is_refused_before_the_first_checkpoint(change: str, words: str, killed: Path) -> None:
    with pytest.raises(UserError, match=words):
        prepared(killed, f"++{change}")


def test_another_number_of_ranks_may_begin_again(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = prepared(killed, "train.batch_size=64")
    assert job.saved is not None
    assert job.saved.position.step == 0


def test_the_same_command_begins_again_with_its_first_weights(killed: Path) -> None:
    job = prepared(killed, "pretrained=null")
    assert job.saved is not None
    assert job.saved.position.step == 0
    assert prepared(killed).first_weights is None  # as the recipe says


@pytest.fixture(scope="module")
def stopped(killed: Path) -> tuple[Path, int, str]:
    """Resume the run and press Ctrl-C in its terminal: the signal reaches its loaders too."""
    process = start(killed, "resume=auto")
    reach(process, killed / "runs" / "run", 4)
    os.killpg(process.pid, signal.SIGINT)
    status, output = finish(process)
    return killed, status, output


def test_ctrl_c_saves_the_step(stopped: tuple[Path, int, str]) -> None:
    root, status, output = stopped
    assert status == 128 + signal.SIGINT, output
    assert "stopped by SIGINT after step" in output
    assert "Traceback" not in output
    saved = checkpoint.newest(root / "runs" / "run")
    assert saved is not None
    assert saved.position.step == max(row["step"] for row in rows(root / "runs" / "run")) >= 4


def test_a_shorter_run_is_refused_and_a_longer_one_is_not(stopped: tuple[Path, int, str]) -> None:
    with pytest.raises(UserError, match=r"train\.max_steps=None, but .*give at least as many"):
        prepared(stopped[0], "train.max_steps=30")
    job = prepared(stopped[0], "train.epochs=3")
    assert job.saved is not None
    assert checkpoint.grown(job.saved, job.fingerprint) == ["train.epochs"]


@pytest.fixture(scope="module")
def complete(stopped: tuple[Path, int, str]) -> Path:
    status, output = finish(start(stopped[0], "resume=auto"))
    assert status == 0, output
    return stopped[0]


@pytest.mark.slow
def test_a_complete_run_is_extended(complete: Path) -> None:
    """The result of the shorter run stays whole beside the new one."""
    run_dir = complete / "runs" / "run"
    before = {name: (run_dir / "handover" / name).read_bytes() for name in ("model.safetensors", "metrics.json")}
    certified = (run_dir / "certificate" / "certificate.json").read_bytes()
    end = json.loads(before["metrics.json"])["step"]
    status, output = finish(start(complete, "resume=auto", "train.epochs=2"))
    assert status == 0, output
    said = " ".join(output.split())
    assert "extended from train.epochs=1 to 2: learning rate, warm-ups and ramps follow the longer run, 50% of" in said
    assert json.loads((run_dir / "handover" / "metrics.json").read_text())["step"] == 2 * end
    assert [row["step"] for row in rows(run_dir) if "loss" in row] == list(range(1, 2 * end + 1))
    aside = run_dir / f"handover_step{end:08d}"
    assert {name: (aside / name).read_bytes() for name in before} == before
    assert (run_dir / f"certificate_step{end:08d}" / "certificate.json").read_bytes() == certified
    assert (run_dir / "certificate" / "certificate.json").read_bytes() != certified
