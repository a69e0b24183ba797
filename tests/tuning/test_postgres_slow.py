"""The registry under load: a real MLflow server on a real PostgreSQL, 8 writers, 200 runs, none lost.

PostgreSQL is Debian's, started here on a free port of the loopback, with a password.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from certizoo.ports import free_port
from certizoo.processes import end_group
from certizoo.registry import browse
from certizoo.registry.server import store
from certizoo.registry.tracking import runs
from certizoo.registry.versions import publish
from tests.tools.launching import ROOT
from tests.tools.postgres import BINARIES, postgres
from tests.tools.registry_writer import STEPS
from tests.tools.tuning_runs import alive
from tuning import server
from tuning.trial import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WRITERS, RUNS, PUBLISHED = 8, 25, 2


@pytest.fixture
def database() -> Iterator[str]:
    with postgres() as uri:
        yield uri


def start(uri: str, port: int, log: Path) -> "subprocess.Popen[bytes]":
    """Start the project's own server on the database, keeping its password off the command line."""
    command = [sys.executable, "-m", "certizoo.registry", "ui", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": uri}
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, cwd=log.parent, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    server.wait_for(f"http://127.0.0.1:{port}", process, log)
    assert not alive(urlsplit(uri).password or "?"), "a command line shows the password"
    return process


def write(url: str, folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.tools.registry_writer", url, str(folder), str(RUNS), str(PUBLISHED)]
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def waits(run_dir: Path) -> bool:
    return bool(runs.waiting(run_dir) or publish.waiting(run_dir))


@pytest.mark.parametrize("disturbed", [False, True], ids=["server stays", "server stops and starts"])
def test_no_run_is_lost(database: str, tmp_path: Path, disturbed: bool) -> None:
    port = free_port()
    url, serving = f"http://127.0.0.1:{port}", start(database, port, tmp_path / "server.log")
    begun = time.monotonic()
    try:
        writers = [write(url, tmp_path / f"w{n}") for n in range(WRITERS)]
        if disturbed:
            while len(list(tmp_path.glob("w*/run-*"))) < WRITERS * RUNS // 4:
                time.sleep(0.1)
            end_group(serving, PATIENCE_SECONDS)
            time.sleep(3)
            serving = start(database, port, tmp_path / "server.log")
        for n, writer in enumerate(writers):
            assert writer.wait(1200) == 0, (tmp_path / f"w{n}.log").read_text()
        waiting = [path for path in tmp_path.glob("w*/run-*") if waits(path)]
        for path in waiting:
            runs.sync(path, url)
            publish.sync(path, url)
        print(f"{WRITERS * RUNS} runs in {time.monotonic() - begun:.0f} s, {len(waiting)} of them kept and sent later")
        assert bool(waiting) == disturbed, "a stop that nobody noticed proves nothing"
        check(url)
        for path in waiting[:2]:  # the same results, sent again
            publish.sync(path, url)
        assert len(browse.versions("loaded", url)) == WRITERS * PUBLISHED
    finally:
        end_group(serving, PATIENCE_SECONDS)


def check(url: str) -> None:
    """Check that all runs are complete and finished, all versions exist, and the champion is the best."""
    client = store.connect(url)
    experiment = store.experiment_id(client, "e")
    found = list(store.every(client.search_runs, experiment_ids=[experiment], max_results=100))
    names = {(run.data.params["writer"], run.data.params["index"]) for run in found}
    assert names == {(f"w{n}", str(index)) for n in range(WRITERS) for index in range(RUNS)}
    assert len(found) == WRITERS * RUNS, "a run is there twice"
    assert {run.info.status for run in found} == {"FINISHED"}
    for run in found[:: WRITERS * RUNS // 20]:
        history = client.get_metric_history(run.info.run_id, "loss")
        assert sorted(row.step for row in history) == list(range(STEPS))
    versions = browse.versions("loaded", url)
    assert len({v.tags["trial"] for v in versions}) == len(versions) == WRITERS * PUBLISHED
    best = max(float(v.tags["certified_acc.0.1"]) for v in versions)
    (champion,) = [v for v in versions if "champion" in v.aliases]
    assert float(champion.tags["certified_acc.0.1"]) == best


def test_a_backup_is_the_registry_again(database: str, tmp_path: Path) -> None:
    """Follow cluster/README.md: pg_dump, then the artifacts, restored into another database."""
    port, artifacts = free_port(), tmp_path / "mlartifacts"
    url, uri = f"http://127.0.0.1:{port}", database.replace("postgresql+psycopg", "postgresql")
    serving = start(database, port, tmp_path / "server.log")
    try:
        command = [sys.executable, "-m", "tests.tools.registry_writer", url, str(tmp_path / "w0"), "3", "2"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
        kept = {v.version: (v.tags, v.aliases) for v in browse.versions("loaded", url)}
    finally:
        end_group(serving, PATIENCE_SECONDS)
    tools = sorted(BINARIES.glob("*/bin"))[-1]
    restored = database.removesuffix("postgres") + "again"
    dump = subprocess.run([tools / "pg_dump", "-Fc", "-d", uri], check=True, capture_output=True, timeout=120).stdout
    subprocess.run([tools / "psql", "-q", "-d", uri, "-c", "CREATE DATABASE again"], check=True, timeout=120)
    again = [str(tools / "pg_restore"), "-d", uri.removesuffix("postgres") + "again", "--clean", "--if-exists"]
    subprocess.run(again, input=dump, check=True, timeout=120)
    shutil.copytree(artifacts, tmp_path / "backup")
    shutil.rmtree(artifacts)
    shutil.copytree(tmp_path / "backup", artifacts)
    serving = start(restored, port, tmp_path / "server.log")
    try:
        assert {v.version: (v.tags, v.aliases) for v in browse.versions("loaded", url)} == kept
        assert len(kept) == 2
        browse.pull("loaded/1", tmp_path / "pulled", uri=url)
    finally:
        end_group(serving, PATIENCE_SECONDS)
    assert (tmp_path / "pulled" / "model.safetensors").is_file()
