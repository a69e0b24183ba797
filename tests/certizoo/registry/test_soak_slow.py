"""A thousand runs of eight writers against a server that is killed twice: everything arrives exactly once."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from certizoo.ports import free_port
from certizoo.registry import browse
from certizoo.registry.server import store
from certizoo.registry.tracking import run_folder, runs
from certizoo.registry.versions import publish
from tests.tools.launching import wait_for
from tests.tools.registry_writer import STEPS

WRITERS, RUNS, PUBLISHED = 8, 125, 10
ROOT = Path(store.__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def start(folder: Path, port: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "certizoo.registry", "ui", "--port", str(port)]
    with (folder / "server.log").open("a") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log, text=True
        )
    wait_for(f"http://127.0.0.1:{port}/health", server)
    return server


def kill(server: "subprocess.Popen[str]") -> None:
    """Send SIGKILL to the process and all its descendants at once."""
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    server.wait()


def write(url: str, folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.tools.registry_writer", url, str(folder), str(RUNS), str(PUBLISHED)]
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def test_nothing_is_lost_or_doubled(store_in: str, tmp_path: Path) -> None:
    port = free_port()
    url, server, begun = f"http://127.0.0.1:{port}", start(tmp_path, port), time.monotonic()
    try:
        writers = [write(url, tmp_path / f"w{number}") for number in range(WRITERS)]
        for share in (0.25, 0.6):
            while len(list(tmp_path.glob("w*/run-*"))) < share * WRITERS * RUNS:
                assert any(writer.poll() is None for writer in writers)
                time.sleep(0.1)
            kill(server)
            time.sleep(2)
            server = start(tmp_path, port)
        for number, writer in enumerate(writers):
            assert writer.wait(1800) == 0, (tmp_path / f"w{number}.log").read_text()
        waiting = [path for path in tmp_path.glob("w*/run-*") if runs.waiting(path) or publish.waiting(path)]
        for path in waiting:
            runs.sync(path, url)
            publish.sync(path, url)
        print(f"{WRITERS * RUNS} runs in {time.monotonic() - begun:.0f} s, {len(waiting)} of them kept and sent later")
        assert waiting, "a kill that nobody noticed proves nothing"
        check(url, tmp_path)
    finally:
        kill(server)


def check(url: str, folder: Path) -> None:
    """Check that every run, row, version and tag is there once, the champion is right, and nothing waits."""
    with sqlite3.connect(folder / "mlflow.db") as database:
        found = database.execute(
            "SELECT p.value || '/' || q.value, r.status FROM runs r JOIN params p USING (run_uuid) JOIN params q USING "
            "(run_uuid) WHERE p.key = 'writer' AND q.key = 'index' AND r.lifecycle_stage = 'active'"
        ).fetchall()
        rows = database.execute(
            "SELECT count(*), count(DISTINCT step) FROM metrics JOIN runs USING (run_uuid) WHERE key = 'loss' "
            "AND lifecycle_stage = 'active' GROUP BY run_uuid"
        ).fetchall()
        (unnamed,) = database.execute(
            "SELECT count(*) FROM runs WHERE lifecycle_stage = 'active' AND run_uuid NOT IN "
            "(SELECT run_uuid FROM params WHERE key = 'writer')"
        ).fetchone()
    wanted = {f"w{writer}/{index}" for writer in range(WRITERS) for index in range(RUNS)}
    assert Counter(name for name, _ in found) == Counter(wanted)
    assert {status for _, status in found} == {"FINISHED"}
    assert unnamed == 0
    assert Counter(rows) == {(STEPS, STEPS): WRITERS * RUNS}
    versions = browse.versions("loaded", url)
    trials = Counter(version.tags["trial"] for version in versions)
    assert trials == {f"load/w{w}/run-{index:03d}": 1 for w in range(WRITERS) for index in range(PUBLISHED)}
    assert {frozenset(version.tags) - {"champion_by"} for version in versions} == {
        frozenset(versions[0].tags) - {"champion_by"}
    }
    best = max(versions, key=lambda v: (float(v.tags["certified_low.0.1"]), -int(v.version)))
    assert best.aliases == ("champion", "champion-digits")
    assert not [path for path in run_folder.below(folder) if runs.waiting(path) or publish.waiting(path)]
