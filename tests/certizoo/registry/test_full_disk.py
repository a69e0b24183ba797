"""A disk that fills at any moment gives one line and nothing half written, and a retry finishes the work."""

import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from certizoo import UserError
from certizoo.registry import browse
from certizoo.registry.tracking import run_folder, runs
from certizoo.registry.versions import publish
from tests.tools import versions
from tests.tools.full_disk import full_disk
from tests.tools.tracking import AWAY, begin, history, log


def at_every_moment(folder: Path, work: Callable[[], object], check: Callable[[], None]) -> int:
    """Repeat the work with a disk that fills at each moment in turn; return the number of moments."""
    for after in count():
        with full_disk(folder, after) as disk, suppress(UserError):  # any other exception is a fault of ours
            work()
        if not disk.full:
            return after
        check()
    raise AssertionError


def test_a_cache_and_a_copy_are_whole_or_absent(store_in: str, tmp_path: Path) -> None:
    versions.issue(versions.certified(tmp_path / "a"), store_in)
    to = tmp_path / "there" / "copy"

    def check() -> None:
        assert not to.exists() or (to / "model.safetensors").stat().st_size > 0
        if to.exists():
            assert {path.name for path in to.iterdir()} >= {"certificate.json", "config.yaml", "files.json"}

    def work() -> None:
        if not to.exists():
            browse.pull("tiny/1", to)

    assert at_every_moment(tmp_path, work, check) > 3
    work()
    check()
    assert to.is_dir()
    assert browse.download("tiny/1").is_dir()


def test_a_publication_is_finished_once_there_is_room(store_in: str, tmp_path: Path) -> None:
    folder = versions.certified(tmp_path / "run")

    def check() -> None:
        assert len(browse.versions("tiny") if browse.versions() else []) <= 1

    assert at_every_moment(tmp_path / "run", lambda: versions.issue(folder, store_in), check) > 3
    assert versions.issue(folder, store_in).version == "1"
    assert [version.version for version in browse.versions("tiny")] == ["1"]
    assert not publish.waiting(tmp_path / "run")


def test_a_run_is_sent_once_there_is_room(store_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    tracker = begin(run_dir, AWAY)
    for step in range(3):
        log(tracker, step, loss=1.0)
    tracker.finish()
    monkeypatch.setattr(run_folder, "BATCH", 1)
    waited = runs.waiting(run_dir)

    def work() -> None:
        if waited:
            runs.sync(run_dir, store_in)

    def check() -> None:
        assert run_folder.load(run_dir) is not None

    assert at_every_moment(run_dir, work, check) > 3
    run_id = runs.sync(run_dir, store_in)
    assert history(store_in, run_id, "loss") == [(step, 1.0) for step in range(3)]


def test_a_training_goes_on_though_its_state_cannot_be_written(
    store_in: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = begin(tmp_path / "run", AWAY)
    log(tracker, 0, loss=1.0)
    with caplog.at_level(logging.ERROR), full_disk(tmp_path, 0):
        tracker.flush()
        tracker.finish()
    assert "the end of the run is not recorded" in caplog.text
    run_id = runs.sync(tmp_path / "run", store_in)
    assert history(store_in, run_id, "loss") == [(0, 1.0)]
