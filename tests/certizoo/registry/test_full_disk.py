"""A disk that fills at any moment gives one line and nothing half written, and a retry finishes the work."""

import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from certizoo import UserError
from certizoo.registry import browse, publish, spool, store
from certizoo.registry.track import Tracker
from tests.tools import versions
from tests.tools.full_disk import full_disk

AWAY = "http://127.0.0.1:9"


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


def test_a_spool_is_sent_once_there_is_room(store_in: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tracker = Tracker(run_dir, AWAY)
    tracker.start("e", "r", {"a": 1})
    for step in range(3):
        tracker.log({"loss": 1.0}, step)
        tracker.flush()
    tracker.finish()
    before = (run_dir / spool.SPOOL).read_bytes()

    def check() -> None:
        left = (run_dir / spool.SPOOL).read_bytes() if spool.waiting(run_dir) else before
        assert left == before, "nothing of it is lost"

    at_every_moment(run_dir, lambda: spool.sync(run_dir, store_in), check)
    spool.sync(run_dir, store_in)
    client = store.connect(store_in)
    (run,) = client.search_runs([store.experiment_id(client, "e")])
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 3


def test_a_training_goes_on_though_its_spool_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="registry"), full_disk(tmp_path, 0):
        tracker = Tracker(tmp_path / "run", AWAY)
        tracker.start("e", "r", {})
        tracker.log({"loss": 1.0}, 0)
        tracker.finish()
    assert "a tracking record is lost" in caplog.text
