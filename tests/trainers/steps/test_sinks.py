"""TensorBoard's own reader and Weights & Biases' offline files have the rows of a run; a trace has its kernels."""

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from certizoo import UserError
from certizoo.config.compose import compose_config
from tests.tools.launching import ROOT, TINY, environment, rows
from trainers.callbacks import Callbacks
from trainers.job.prepare import prepare
from trainers.job.stages import stage
from trainers.settings import TrainKeys
from trainers.steps.report import Report
from trainers.steps.sinks import FOLDER, TensorBoard, callbacks_of


def scalars(folder: Path, name: str) -> dict[int, float]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_tensorboard_has_every_row_once_after_a_resume(tmp_path: Path) -> None:
    """The resumed run repeats step 3, with another value."""
    job: Any = SimpleNamespace(run_dir=tmp_path)
    for first, steps, scale in ((0, range(1, 5), 1.0), (2, range(3, 7), 10.0)):
        callbacks = Callbacks(job, {"tensorboard": TensorBoard})
        with Report(tmp_path, 6, enabled=True, callbacks=callbacks).shown(first) as report:
            for step in steps:
                report.row(step, 0, {"loss": scale * step})
    assert scalars(tmp_path / FOLDER, "loss") == {1: 1.0, 2: 2.0, 3: 30.0, 4: 40.0, 5: 50.0, 6: 60.0}


def test_a_library_that_is_absent_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train.log_to: wandb is not installed; pip install 'certizoo\[log\]'"):
        TrainKeys(epochs=1, log_to=("wandb",))
    with pytest.raises(UserError, match="give a list of one of mlflow, tensorboard, wandb"):
        TrainKeys(epochs=1, log_to=("comet",))


def test_the_issues_own_list_is_taken_where_mlflow_is_on(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow has its own door: naming it adds nothing, and certvit's inner stages are not sent there."""
    monkeypatch.chdir(tmp_path)
    words = [*TINY, f"data.root={digits}", "name=told", "registry.enabled=true", "train.log_to=[mlflow,tensorboard]"]
    job = prepare(compose_config("adv_train", words))
    assert job.train.log_to == ("mlflow", "tensorboard")
    callbacks = callbacks_of(job)
    callbacks.begin(0)
    assert list(callbacks._open) == ["train.log_to=tensorboard"]
    callbacks.end("FINISHED")
    assert stage(job.config, "adapt", 1)["train"]["log_to"] == ["tensorboard"]


@pytest.mark.slow
def test_a_training_writes_to_all_places_and_a_trace(digits: Path, tmp_path: Path) -> None:
    script = str(ROOT / "trainers" / "adv_train.py")
    more = ("name=told", f"data.root={digits}", "train.max_steps=9", "train.log_every=1", "train.eval_images=20",
            "train.log_to=[tensorboard,wandb]", "train.profile=2")  # fmt: skip
    done = subprocess.run(
        [sys.executable, script, *TINY, *more], cwd=tmp_path, text=True, capture_output=True, timeout=300,
        env=environment() | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "told"
    expected = {int(row["step"]): row["grad_norm"] for row in rows(run_dir) if "grad_norm" in row}
    assert list(expected) == [*range(1, 10)]
    assert scalars(run_dir / FOLDER, "grad_norm") == pytest.approx(expected)

    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = path.read_bytes()
    assert all(json.dumps(value).encode() in content for value in expected.values())

    trace = json.loads(gzip.decompress((run_dir / "profile.json.gz").read_bytes()))
    assert any("aten::" in event["name"] for event in trace["traceEvents"])
