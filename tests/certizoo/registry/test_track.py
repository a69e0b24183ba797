"""Tracking: a run folder arrives once, whenever the server, the training and the senders come and go."""

import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from certizoo import UserError
from certizoo.registry.server import store
from certizoo.registry.tracking import run_folder, runs
from certizoo.registry.tracking.track import Tracker
from tests.tools.cases import mostly_slow
from tests.tools.tracking import AWAY, begin, history, kill, log, runs_of

ROOT = Path(store.__file__).parents[2]


@pytest.fixture
def uri(store_in: str) -> str:
    return store_in


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run folder with a hand-over."""
    (tmp_path / "run" / "handover").mkdir(parents=True)
    (tmp_path / "run" / "handover" / "config.yaml").write_text("a: 1\n")
    return tmp_path / "run"


def run_once(run_dir: Path, uri: str, **how: Any) -> Tracker:
    tracker = begin(run_dir, uri, {"train": {"epochs": 3}, "note": "x" * 9000}, **how)
    for step in range(4):
        log(tracker, step, loss=1.0 / (step + 1), **{"odd name!": step})
    tracker.finish()
    return tracker


def assert_arrived(uri: str, run_dir: Path) -> None:
    client = store.connect(uri)
    (run,) = runs_of(uri)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "3"
    assert len(run.data.params["note"]) == runs.MAX_PARAM
    assert history(uri, run.info.run_id, "loss") == [(step, 1.0 / (step + 1)) for step in range(4)]
    assert len(history(uri, run.info.run_id, "odd name_")) == 4
    assert [f.path for f in client.list_artifacts(run.info.run_id, "handover")] == ["handover/config.yaml"]
    assert not runs.waiting(run_dir)


@pytest.mark.parametrize("flush_seconds", [0.0, 60.0], ids=["row by row", "at the end"])
def test_a_run_arrives_in_the_default_store(uri: str, run_dir: Path, tmp_path: Path, flush_seconds: float) -> None:
    assert run_once(run_dir, "", flush_seconds=flush_seconds).uri == uri
    assert_arrived(uri, run_dir)
    assert list((tmp_path / "mlartifacts").rglob("config.yaml"))


def test_uri_argument_comes_before_the_environment(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.resolve_uri() == uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:1")
    assert store.resolve_uri() == "http://elsewhere:1"
    assert store.resolve_uri("sqlite:///other.db") == f"sqlite:///{Path.cwd()}/other.db"


def test_passwords_are_not_written_down() -> None:
    assert store.public("https://me:secret@host:5000/x") == "https://host:5000/x"
    assert store.public("postgresql://me:secret@host/db") == "postgresql://host/db"
    away = Exception("API request to http://me:se@cret@h:5000/api/2.0/x failed with exception 503 of me@h")
    assert store.reason(away) == "API request to http://h:5000/api/2.0/x failed with exception 503 of me@h"


def test_resume_goes_on_in_the_same_run_and_keeps_changed_params(uri: str, run_dir: Path) -> None:
    first = begin(run_dir, uri, {"epochs": 3})
    log(first, 0, loss=1.0)
    first.finish("KILLED")
    assert runs_of(uri)[0].info.status == "KILLED"
    second = begin(run_dir, uri, {"epochs": 5, "new": 1})
    assert runs_of(uri)[0].info.status == "RUNNING"
    log(second, 1, loss=0.5)
    second.finish()
    (run,) = runs_of(uri)
    assert run.info.run_id == first.run_id == second.run_id
    assert run.info.status == "FINISHED"
    assert run.data.params == {"epochs": "3", "new": "1"}
    assert run.data.tags["resumed.epochs"] == "5"
    assert history(uri, second.run_id, "loss") == [(0, 1.0), (1, 0.5)]


@contextmanager
def running(code: str, word: str) -> Iterator[None]:
    """Run the code in another process, which has printed the word; end it by SIGKILL."""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{word}\n"
        yield
    finally:
        process.kill()
        process.wait()


def rewound(run_dir: Path, rows: int) -> None:
    """Drop rows as the trainer does before it resumes."""
    lines = (run_dir / run_folder.ROWS).read_bytes().splitlines(keepends=True)
    (run_dir / run_folder.ROWS).write_bytes(b"".join(lines[:rows]))


@pytest.mark.parametrize(
    ("first", "between", "second"),
    mostly_slow(product(*3 * [(True, False)]), (True, False, True), (False, True, False)),
)
def test_after_a_resume_every_row_arrives_once(
    uri: str, run_dir: Path, first: bool, between: bool, second: bool
) -> None:
    """The server answers the first session, a sync between them, the second: or not. Values and lengths differ."""
    tracker = begin(run_dir, uri if first else AWAY)
    for step in range(4):
        log(tracker, step, loss=1.0 + step)
    kill(tracker)
    if between:
        runs.sync(run_dir, uri)
        assert runs_of(uri)[0].info.status == "KILLED"
    rewound(run_dir, 2)
    tracker = begin(run_dir, uri if second else AWAY)
    for step in range(2, 6):
        log(tracker, step, loss=1.0 + step / 16)
    tracker.finish()
    runs.sync(run_dir, uri)
    (run,) = runs_of(uri)
    assert run.info.status == "FINISHED"
    old = [(step, 1.0 + step) for step in range(4 if first or between else 2)]
    assert sorted(history(uri, run.info.run_id, "loss")) == sorted(
        old + [(step, 1.0 + step / 16) for step in range(2, 6)]
    )


def test_a_sender_that_a_resume_overtakes_records_nothing(
    uri: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read rows that the resumed training drops; if it counted them, rows written in their place were lost."""
    tracker, real = begin(run_dir, AWAY), runs.log_points
    for step in range(4):
        log(tracker, step, loss=1.0)
    kill(tracker)
    resumed: list[Tracker] = []

    def overtaken(*arguments: Any) -> None:
        real(*arguments)
        if not resumed:
            rewound(run_dir, 1)
            resumed.append(begin(run_dir, AWAY))
            log(resumed[0], 1, loss=0.5)

    monkeypatch.setattr(runs, "log_points", overtaken)
    runs.sync(run_dir, uri)
    assert runs.waiting(run_dir)
    assert runs_of(uri)[0].info.status == "RUNNING"
    for step in range(2, 5):
        log(resumed[0], step, loss=0.5)
    resumed[0].finish()
    runs.sync(run_dir, uri)
    assert {(step, 0.5) for step in range(1, 5)} < set(history(uri, runs_of(uri)[0].info.run_id, "loss"))
    assert runs_of(uri)[0].info.status == "FINISHED"


def test_a_run_that_mlflow_has_lost_is_sent_as_a_whole(uri: str, run_dir: Path) -> None:
    """Its rows were sent before, to another server or into a run that somebody has deleted."""
    run_once(run_dir, uri)
    client = store.connect(uri)
    client.delete_run(runs_of(uri)[0].info.run_id)
    runs.sync(run_dir, uri)
    assert_arrived(uri, run_dir)


def test_an_absent_server_gets_the_run_later_and_once(
    uri: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert run_once(run_dir, AWAY).run_id is None
    assert [r.name for r in caplog.records if "certizoo registry sync" in r.message] == [
        "certizoo.registry.tracking.track"
    ]
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9"):
        runs.sync(run_dir)  # the folder names its target, which is not trusted
    runs.sync(run_dir, uri)
    assert_arrived(uri, run_dir)


@pytest.mark.parametrize("crash_at", mostly_slow(range(1, 9), 2, 6))
def test_an_interrupted_sync_doubles_nothing(
    uri: str, run_dir: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is a request of its own; the process dies after request or record number `crash_at`."""
    run_once(run_dir, AWAY)
    monkeypatch.setattr(run_folder, "BATCH", 1)
    moments = count(1)

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def then_die(*how: Any, **more: Any) -> Any:
            result = real(*how, **more)
            if next(moments) == crash_at:
                raise KeyboardInterrupt
            return result

        return then_die

    with monkeypatch.context() as patch:
        for module, name in ((runs, "log_points"), (run_folder, "update"), (runs, "create_run")):
            patch.setattr(module, name, dying(getattr(module, name)))
        with pytest.raises(KeyboardInterrupt):
            runs.sync(run_dir, uri)
    assert runs.waiting(run_dir)
    runs.sync(run_dir, uri)
    assert_arrived(uri, run_dir)


def test_going_away_and_coming_back_in_the_middle(uri: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = begin(run_dir, uri, retry_seconds=0.0)
    run_id = tracker.run_id

    def away(*_: object) -> None:
        raise ConnectionError("gone")

    log(tracker, 0, loss=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "log_points", away)
        log(tracker, 1, loss=1.0)
        log(tracker, 2, loss=2.0)
        assert len(history(uri, run_id, "loss")) == 1
    log(tracker, 3, loss=3.0)
    assert history(uri, run_id, "loss") == [(step, float(step)) for step in range(4)]
    tracker.finish()
    assert tracker.run_id == run_id
    assert not runs.waiting(run_dir)


def test_an_absent_server_is_asked_less_and_less_often(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, clock = list[float](), [0.0]
    monkeypatch.setattr(store, "connect", lambda uri: asked.append(clock[0]) or 1 / 0)  # type: ignore[func-returns-value]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    tracker = begin(run_dir, "sqlite:///x.db", retry_seconds=300)
    for clock[0] in range(0, 3000, 10):
        tracker.flush()
    kill(tracker)
    assert asked == [0, 300, 900, 2100]


def test_nan_and_infinity_do_not_stop_the_run(uri: str, run_dir: Path) -> None:
    tracker = begin(run_dir, uri)
    log(tracker, 0, loss=math.nan, norm=math.inf)
    tracker.finish()
    assert math.isnan(history(uri, tracker.run_id, "loss")[0][1])
    assert history(uri, tracker.run_id, "norm")[0][1] > 1e300


def test_a_training_ended_by_sigkill_is_sent_as_killed_and_a_live_one_as_running(uri: str, run_dir: Path) -> None:
    code = (
        "import time; from pathlib import Path; from tests.tools.tracking import begin, log\n"
        f"tracker = begin(Path({str(run_dir)!r}), {uri!r})\n"
        "log(tracker, 0, loss=1.0); print('logged', flush=True); time.sleep(60)"
    )
    with running(code, "logged"):
        runs.sync(run_dir, uri)
        assert runs_of(uri)[0].info.status == "RUNNING"
    runs.sync(run_dir, uri)
    (run,) = runs_of(uri)
    assert (run.info.status, run.data.metrics) == ("KILLED", {"loss": 1.0})
    assert abs(run.info.end_time / 1000 - (run_dir / run_folder.ROWS).stat().st_mtime) < 1
    assert not runs.waiting(run_dir)


def test_a_trial_that_went_on_in_another_folder_has_the_last_word(uri: str, run_dir: Path, tmp_path: Path) -> None:
    """Its first folder is of a killed session of the same run."""
    first = begin(run_dir, uri)
    log(first, 0, loss=1.0)
    (tmp_path / "run-2").mkdir()
    for name in (run_folder.STATE, run_folder.ROWS):
        (tmp_path / "run-2" / name).write_bytes((run_dir / name).read_bytes())
    kill(first)
    begin(tmp_path / "run-2", uri).finish()
    runs.sync(run_dir, uri)
    (run,) = runs_of(uri)
    assert run.info.status == "FINISHED"
    assert not runs.waiting(run_dir)


def test_a_training_does_not_wait_for_somebody_who_sends(uri: str, run_dir: Path) -> None:
    code = (
        "import time; from pathlib import Path; from certizoo.locks import locked\n"
        f"with locked(Path({str(run_dir / run_folder.SENDING)!r})): print('held', flush=True); time.sleep(60)"
    )
    with running(code, "held"):
        run_once(run_dir, uri)
        assert runs.waiting(run_dir)
    runs.sync(run_dir, uri)
    assert_arrived(uri, run_dir)


@pytest.mark.slow  # called from threads by the test of a start that is sent twice
def test_two_syncs_at_once_send_everything_once(uri: str, run_dir: Path) -> None:
    run_once(run_dir, AWAY)
    imports = "from pathlib import Path; from certizoo.registry.tracking import runs"
    code = f"{imports}; runs.sync(Path({str(run_dir)!r}), {uri!r})"
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
    assert_arrived(uri, run_dir)


def test_a_run_created_twice_at_once_is_one_run(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines, or a repeated request, both saw no run before they created theirs."""
    client, real = store.connect(uri), runs._of_key
    experiment = store.experiment_id(client, "e")
    first = runs.create_run(client, experiment, "k", "r")
    looks: list[int] = []

    def late(*arguments: Any) -> list[str]:
        """Hide the other run at the first look."""
        looks.append(1)
        return [] if len(looks) == 1 else real(*arguments)

    monkeypatch.setattr(runs, "_of_key", late)
    assert runs.create_run(client, experiment, "k", "r") == first
    assert [run.info.run_id for run in runs_of(uri)] == [first]


@pytest.mark.slow
def test_processes_that_race_for_a_fresh_store_share_one_experiment(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    code = f"from certizoo.registry.server import store; print(store.experiment_id(store.connect({uri!r}), 'race'))"
    racers = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    ids = {racer.communicate()[0].strip() for racer in racers}
    assert all(racer.returncode == 0 for racer in racers)
    assert len(ids) == 1
    assert store.connect(uri).get_experiment_by_name("race").experiment_id in ids  # type: ignore[union-attr]
