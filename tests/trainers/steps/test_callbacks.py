"""Callbacks hear every row once; one that fails ends the run by its name in one line."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from certizoo import UserError
from tests.tools.launching import ROOT, TINY, environment
from trainers.callbacks import Callback, Callbacks
from trainers.steps.report import Report

Heard = list[tuple[Any, ...]]


def recorder(heard: Heard) -> type[Callback]:
    class Recorder(Callback):
        """Keeps all that it hears."""

        def on_step(self, step: int, metrics: Any) -> None:
            heard.append(("step", step, dict(metrics)))

        def on_epoch(self, step: int, epoch: int, metrics: Any) -> None:
            heard.append(("epoch", step, epoch, dict(metrics)))

        def on_end(self, status: str) -> None:
            heard.append(("end", status, self.first_step))

    return Recorder


def failing(event: str) -> type[Callback]:
    def fail(*_: Any) -> None:
        raise ValueError("no\nluck")

    return type("Failing", (Callback,), {event: fail})


def report(tmp_path: Path, **made: type[Callback]) -> Report:
    job: Any = SimpleNamespace(run_dir=tmp_path)
    return Report(tmp_path, 9, enabled=True, callbacks=Callbacks(job, made))


def test_every_row_is_heard_once_and_the_end(tmp_path: Path) -> None:
    heard: Heard = []
    with report(tmp_path, one=recorder(heard), idle=Callback).shown(3) as shown:
        shown.row(4, 0, {"loss": 1.0})
        shown.evaluation(5, 0, {"clean_acc": 0.5, "class_clean_acc/1": 0.5})
    assert heard == [
        ("step", 4, {"loss": 1.0}),
        ("epoch", 5, 0, {"clean_acc": 0.5, "class_clean_acc/1": 0.5}),
        ("end", "FINISHED", 3),
    ]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("x"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(1), "KILLED")]
)
def test_they_hear_how_a_run_ends(error: BaseException, status: str, tmp_path: Path) -> None:
    heard: Heard = []
    with pytest.raises(type(error)), report(tmp_path, one=recorder(heard)).shown(0):
        raise error
    assert heard == [("end", status, 0)]


@pytest.mark.parametrize("event", ["on_step", "on_epoch", "on_end"])
def test_a_failure_is_one_line_with_the_name(event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: Heard = []

    def run() -> None:
        with report(tmp_path, bad=failing(event), other=recorder(heard)).shown(0) as shown:
            shown.row(1, 0, {"loss": 1.0})
            shown.evaluation(1, 0, {"clean_acc": 0.5})

    with caplog.at_level(logging.INFO), pytest.raises(UserError) as caught:
        run()
    assert str(caught.value).startswith("bad: ValueError: no luck; ")
    assert "\n" not in str(caught.value)
    assert "Traceback" in caplog.text, "for whoever repairs it"
    assert heard[-1][0] == "end", "the others hear the end"


def test_those_begun_hear_that_another_cannot_be_made(tmp_path: Path) -> None:
    heard: Heard = []
    made = {"first": recorder(heard), "bad": failing("__init__")}
    with pytest.raises(UserError, match="bad: ValueError: no luck"), report(tmp_path, **made).shown(0):
        pass
    assert heard == [("end", "FAILED", 0)]


def test_a_class_of_another_kind_is_named(tmp_path: Path) -> None:
    stranger: Any = type("Stranger", (), {"__init__": lambda self, job, first_step: None})
    with pytest.raises(UserError, match=r"odd: AttributeError: .*on_end"), report(tmp_path, odd=stranger).shown(0):
        pass


def test_the_error_of_the_run_comes_first(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), report(tmp_path, bad=failing("on_end")).shown(0):
        raise ZeroDivisionError


OWN = """
from trainers.callbacks import CALLBACKS, Callback
class Own(Callback):
    def on_step(self, step, metrics):
        raise RuntimeError(f"not after {step}")
CALLBACKS["own"] = Own
"""


@pytest.mark.slow
def test_a_real_run_ends_by_the_name_of_the_callback(digits: Path, tmp_path: Path) -> None:
    """A package in an entry point, a run without it, and one with it."""
    for name, text in (
        ("own_calls.py", OWN),
        ("own_calls-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: own-calls\nVersion: 1.0\n"),
        ("own_calls-1.0.dist-info/entry_points.txt", "[certizoo.plugins]\nown = own_calls\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    words = [*TINY, f"data.root={digits}", "name=run", "train.max_steps=3", "train.log_every=2", "train.eval_images=0"]
    command = [sys.executable, str(ROOT / "trainers" / "adv_train.py"), *words, "train.callbacks=[own]"]
    done = subprocess.run(
        command, cwd=tmp_path, text=True, capture_output=True, timeout=300,
        env=environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if "train.callbacks=own" in line]
    assert said == [
        "error: train.callbacks=own: RuntimeError: not after 2; repair it or leave it out, then resume=auto"
    ]
    assert "Traceback" not in done.stderr
    assert "own_calls.py" in (tmp_path / "runs" / "run" / "logs" / "rank0.log").read_text()
