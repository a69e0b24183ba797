"""A search over two nodes (two raylets): one is killed, its trial goes on from its checkpoint."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from certizoo.processes import end_group
from registry import browse
from tests.tools.launching import ROOT
from tests.tools.tuning_runs import alive, begin, finish, finished, first_step, runs, two_nodes
from tuning.trial import PATIENCE_SECONDS, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ADDRESS = "127.0.0.2"  # a loopback address that tune.py does not take for this machine's own: nodes share the server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """`python -m registry ui` for others than this machine: files go through it."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_SERVER_ALLOWED_HOSTS": f"{ADDRESS}:*"}
    command = [sys.executable, "-m", "registry", "ui", "--host", ADDRESS, "--port", str(port)]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url, deadline = f"http://{ADDRESS}:{port}", time.monotonic() + 200
        while time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            time.sleep(0.5)
        yield url
    finally:
        end_group(process, PATIENCE_SECONDS)


def test_a_node_is_killed(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_nodes(monkeypatch) as (cluster, doomed):
        search = tmp_path / "runs" / "tune" / "nodes"
        trials = ("--space", "msvp", "--num-samples", "2", "--scheduler", "none", "--name", "nodes")
        overrides = (
            "--",
            "train.epochs=16",
            "certify.images=40",
            "registry.champion_images=40",
            "train.eval_images=80",
        )
        driver = begin(tmp_path, *trials, *overrides, uri=server)
        deadline = time.monotonic() + 900
        while len(list(search.glob("trials/*/run-1/checkpoints/step*/complete.json"))) < 2 or len(running(search)) < 2:
            assert time.monotonic() < deadline
            assert driver.poll() is None, (tmp_path / "tune.log").read_text()
            time.sleep(0.2)
        cluster.remove_node(doomed, allow_graceful=False)
        status, output = finish(driver, tmp_path, 900)
    assert status == 0, output
    assert len(finished(search)) == len(runs(search)) == 2
    (moved,) = [trial for trial, names in runs(search).items() if len(names) > 1]
    assert first_step(search / "trials" / moved / runs(search)[moved][-1]) > 0, "it began anew"
    versions = browse.versions("spec_vit_digits", server)
    assert {v.tags["trial"] for v in versions} == {f"nodes/{trial}" for trial in runs(search)}
    assert len(versions) == 2
    assert not alive(str(search / "trials" / moved / "run-1")), "ranks of the dead node are left"


def running(search: Path) -> set[str]:
    """Trials of which Tune has a checkpoint."""
    return {path.parts[-3] for path in search.glob("*/checkpoint_*/checkpoints")}
