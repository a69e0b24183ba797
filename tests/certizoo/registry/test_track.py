"""Tracking: everything logged arrives once, whenever the server comes and goes."""

import json
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from certizoo import UserError
from certizoo.registry import records, spool, store
from certizoo.registry.track import Tracker
from tests.tools.cases import mostly_slow

AWAY = "http://127.0.0.1:9"  # the discard port: connection refused


@pytest.fixture
def uri(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.copy(empty_database, tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in store.connect(uri).get_metric_history(run_id, name)]


def run_once(run_dir: Path, uri: str, artifacts: Path) -> Tracker:
    tracker = Tracker(run_dir, uri)
    tracker.start("digits", "first", {"train": {"epochs": 3}, "note": "x" * 9000})
    for step in range(4):
        tracker.log({"loss": 1.0 / (step + 1), "odd name!": step}, step)
    tracker.log_artifacts(artifacts, "handover")
    tracker.finish()
    return tracker


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    (tmp_path / "run" / "handover").mkdir(parents=True)
    (tmp_path / "run" / "handover" / "config.yaml").write_text("a: 1\n")
    return tmp_path / "run" / "handover"


def assert_arrived(uri: str, run_id: str) -> None:
    client = store.connect(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "3"
    assert len(run.data.params["note"]) == records.MAX_PARAM
    assert history(uri, run_id, "loss") == [(step, 1.0 / (step + 1)) for step in range(4)]
    assert len(history(uri, run_id, "odd name_")) == 4
    assert [f.path for f in client.list_artifacts(run_id, "handover")] == ["handover/config.yaml"]
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_a_run_arrives_in_the_default_store(uri: str, artifacts: Path, tmp_path: Path) -> None:
    tracker = run_once(artifacts.parent, "", artifacts)
    assert tracker.uri == uri
    assert tracker.run_id is not None
    assert_arrived(uri, tracker.run_id)
    assert not spool.waiting(artifacts.parent)
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
    params = records.flatten({"registry": {"uri": "http://me:secret@h:5000"}, "data": {"root": "s3://bucket/a@b"}})
    assert params == {"registry.uri": "http://h:5000", "data.root": "s3://bucket/a@b"}


def test_resume_goes_on_in_the_same_run_and_keeps_changed_params(uri: str, tmp_path: Path) -> None:
    first = Tracker(tmp_path / "run", uri)
    run_id = first.start("digits", "first", {"epochs": 3})
    first.log({"loss": 1.0}, 0)
    first.finish("KILLED")
    second = Tracker(tmp_path / "run", uri)
    assert second.start("digits", "first", {"epochs": 5, "new": 1}, run_id=run_id) == run_id
    assert store.connect(uri).get_run(run_id).info.status == "RUNNING"
    second.log({"loss": 0.5}, 1)
    second.finish()
    run = store.connect(uri).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"epochs": "3", "new": "1"}
    assert run.data.tags["resumed.epochs"] == "5"
    assert history(uri, run_id, "loss") == [(0, 1.0), (1, 0.5)]


def test_resume_of_an_unknown_run_begins_a_new_one(uri: str, tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "run", uri)
    run_id = tracker.start("digits", "first", {}, run_id="0" * 32)
    assert run_id == tracker.run_id != "0" * 32
    tracker.finish()
    assert not spool.waiting(tmp_path / "run")


def test_away_is_spooled_and_synced_once(uri: str, artifacts: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = artifacts.parent
    with caplog.at_level(logging.WARNING, logger="registry"):
        tracker = run_once(run_dir, AWAY, artifacts)
    assert [r.name for r in caplog.records if "certizoo registry sync" in r.message] == ["certizoo.registry.track"]
    assert tracker.run_id is not None
    assert tracker.run_id.startswith(records.PENDING)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9"):
        spool.sync(run_dir)  # the spool names its target, which is not trusted
    copy = (run_dir / spool.SPOOL).read_bytes()
    run_id = spool.sync(run_dir, uri)
    assert run_id
    assert_arrived(uri, run_id)
    assert not list(run_dir.glob("mlflow_*"))
    (run_dir / spool.SPOOL).write_bytes(copy)  # as if sync had died before it could delete the spool
    assert spool.sync(run_dir, uri) == run_id
    assert_arrived(uri, run_id)


@pytest.mark.parametrize("crash_at", mostly_slow(range(1, 6), 3))
def test_an_interrupted_sync_doubles_nothing(
    uri: str, artifacts: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = artifacts.parent
    run_once(run_dir, AWAY, artifacts)
    sent, real = [], records.send

    def send_then_die(*args: object) -> str:
        sent.append(real(*args))  # type: ignore[arg-type]
        if len(sent) == crash_at:
            raise KeyboardInterrupt
        return sent[-1]

    monkeypatch.setattr(records, "send", send_then_die)
    try:
        spool.sync(run_dir, uri)
    except KeyboardInterrupt:
        assert spool.waiting(run_dir)
    monkeypatch.setattr(records, "send", real)
    spool.sync(run_dir, uri)
    assert_arrived(uri, sent[0])


def test_a_resumed_run_that_was_never_online_is_one_run(uri: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = Tracker(run_dir, AWAY)
    pending = first.start("digits", "first", {"epochs": 3})
    first.log({"loss": 1.0}, 0)
    first.flush()
    with (run_dir / spool.SPOOL).open("a") as stream:
        stream.write('{"kind": "metrics", "rows": [["lo')  # killed in the middle of a line
    second = Tracker(run_dir, AWAY)
    assert second.start("digits", "first", {"epochs": 3}, run_id=pending) == pending
    second.log({"loss": 0.5}, 1)
    second.finish()
    run_id = spool.sync(run_dir, uri)
    assert run_id
    assert history(uri, run_id, "loss") == [(0, 1.0), (1, 0.5)]
    third = Tracker(run_dir, uri)  # from a checkpoint that still holds the pending id
    assert third.start("digits", "first", {}, run_id=pending) == run_id


def test_going_away_and_coming_back_in_the_middle(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, real = tmp_path / "run", store.connect
    tracker = Tracker(run_dir, uri, flush_seconds=0.0)
    run_id = tracker.start("digits", "first", {"epochs": 3})

    def away(*_: object) -> None:
        raise ConnectionError("gone")

    tracker.log({"loss": 0.0}, 0)
    with monkeypatch.context() as patch:
        patch.setattr(records, "send", away)
        tracker.log({"loss": 1.0}, 1)
        tracker.log({"loss": 2.0}, 2)
    tracker.log({"loss": 3.0}, 3)  # the server answers again, but the spool goes first
    assert len(history(uri, run_id, "loss")) == 1
    tracker.finish()
    assert tracker.run_id == run_id
    assert history(uri, run_id, "loss") == [(step, float(step)) for step in range(4)]
    assert real(uri).get_run(run_id).info.status == "FINISHED"
    assert not spool.waiting(run_dir)


def test_nan_and_infinity_do_not_stop_the_run(uri: str, tmp_path: Path) -> None:
    for target in (uri, AWAY):
        run_dir = tmp_path / ("online" if target == uri else "spooled")
        tracker = Tracker(run_dir, target)
        tracker.start("digits", "diverges", {})
        tracker.log({"loss": math.nan, "norm": math.inf}, 0)
        tracker.finish()
        run_id = spool.sync(run_dir, uri) or tracker.run_id
        assert run_id
        assert math.isnan(history(uri, run_id, "loss")[0][1])
        assert history(uri, run_id, "norm")[0][1] > 1e300


def test_what_mlflow_refuses_is_kept_apart(uri: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tracker = Tracker(run_dir, uri)
    run_id = tracker.start("digits", "first", {})
    tracker.log_artifacts(run_dir / "nowhere")
    tracker.log({"loss": 1.0}, 0)
    tracker.finish()
    assert history(uri, run_id, "loss") == [(0, 1.0)]
    refused = [json.loads(line) for line in (run_dir / spool.REFUSED).read_text().splitlines()]
    assert [record["kind"] for record in refused] == ["artifacts"]


def test_a_headless_spool_is_an_error(uri: str, tmp_path: Path) -> None:
    spool.append(tmp_path, {"kind": "finish", "status": "FINISHED", "time": 0})
    with pytest.raises(UserError, match="start record"):
        spool.sync(tmp_path, uri)


@pytest.mark.slow
def test_processes_that_race_for_a_fresh_store_share_one_experiment(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    code = f"from certizoo.registry import store; print(store.experiment_id(store.connect({uri!r}), 'race'))"
    root = Path(store.__file__).parents[2]
    racers = [
        subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    ids = {racer.communicate()[0].strip() for racer in racers}
    assert all(racer.returncode == 0 for racer in racers)
    assert len(ids) == 1
    assert store.connect(uri).get_experiment_by_name("race").experiment_id in ids  # type: ignore[union-attr]
