"""A search over two nodes (two raylets): one is killed, and its trial resumes from its checkpoint."""

import time
from pathlib import Path

import pytest

from certizoo.registry import browse
from tests.tools.tuning_runs import alive, begin, finish, finished, first_step, runs, shared_server, two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_node_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_server(tmp_path) as server, two_nodes(monkeypatch) as (cluster, doomed):
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
        versions = browse.versions("spec_vit_digits", server)
    assert status == 0, output
    assert len(finished(search)) == len(runs(search)) == 2
    (moved,) = [trial for trial, names in runs(search).items() if len(names) > 1]
    assert first_step(search / "trials" / moved / runs(search)[moved][-1]) > 0, "it began anew"
    assert {v.tags["trial"] for v in versions} == {f"nodes/{trial}" for trial in runs(search)}
    assert len(versions) == 2
    assert not alive(str(search / "trials" / moved / "run-1")), "ranks of the dead node are left"


def running(search: Path) -> set[str]:
    """Return the trials of which Tune has a checkpoint."""
    return {path.parts[-3] for path in search.glob("*/checkpoint_*/checkpoints")}
