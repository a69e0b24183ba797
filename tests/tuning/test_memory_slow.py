"""Ray's memory monitor kills trials: they start again, fewer at once, and the search says so in one line each."""

import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.tools.tuning_runs import SHORT, alive, begin, finish, finished, first_step, runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SEARCH = ("--space", "msvp", "--scheduler", "none", "--search", "random", "--name", "short")
# Imported by every Python process of the search: a lost worker is one that the monitor killed.
MONITOR = """
try:
    import ray
except ImportError:
    ray = None
if ray:
    get = ray.get
    def killed(*words, **options):
        try:
            return get(*words, **options)
        except ray.exceptions.ActorDiedError:
            place = f"(IP: {ray.util.get_node_ip_address()}, ID: 0)"
            raise ray.exceptions.OutOfMemoryError(
                f"1 worker(s) were killed due to the node running low on memory. Memory on the node {place} was 9GB"
            ) from None
    ray.get = killed
"""


def test_a_node_without_memory_ends_trials_and_not_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "250")
    driver = begin(tmp_path, *SEARCH, "--num-samples", "2", "--max-failures", "1", *SHORT)
    status, output = finish(driver, tmp_path, 600)
    assert status == 1, output
    assert output.count("restarting: node") == 2
    assert output.count("ran out of memory") == 6  # restarted, failed, and listed at the end
    assert "Traceback" not in output
    assert "page: " in output


def test_as_many_trials_run_at_once_as_the_doctor_finds_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of 4 CPUs with memory for one trial of some 0.4 GiB, and not for two."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the loopback only
    monkeypatch.setenv("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "memory": 700 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        status, output = finish(begin(tmp_path, *SEARCH, "--num-samples", "2", *SHORT), tmp_path, 600)
    finally:
        cluster.shutdown()
    assert status == 0, output
    assert "a trial reserves 0." in output
    assert "2 trials, 1 concurrent" in output


def test_a_trial_killed_for_memory_goes_on_with_fewer_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(MONITOR)
    search = tmp_path / "runs" / "tune" / "short"
    overrides = (SHORT[0], "train.epochs=12", *SHORT[2:])
    driver = begin(tmp_path, *SEARCH, "--num-samples", "3", "--max-concurrent", "2", *overrides, path=tmp_path)
    while len(list(search.glob("*/checkpoint_*/checkpoints"))) < 2:
        assert driver.poll() is None, (tmp_path / "tune.log").read_text()
        time.sleep(0.2)
    killed, began = kill_worker(search), time.time()
    status, output = finish(driver, tmp_path, 900)
    assert status == 0, output
    assert "ran out of memory; from now on one trial fewer runs there" in output
    assert "Traceback" not in output
    assert len(finished(search)) == 3
    assert {trial: len(names) for trial, names in runs(search).items() if len(names) > 1} == {killed: 2}
    assert first_step(search / "trials" / killed / "run-2") > 0, "it began anew"
    logs = sorted(search.glob("trials/*/run-*.log"), key=lambda log: log.stat().st_mtime)
    for log, following in pairwise(log for log in logs if log.stat().st_mtime > began + 5):
        assert log.stat().st_mtime <= (following.with_suffix("") / "config.yaml").stat().st_mtime, "two ran at once"


def kill_worker(search: Path) -> str:
    """Kill the Ray worker of a running trial and return the trial's name."""
    for trial in runs(search):
        found = set(alive(str(search / "trials" / trial / "run-1")))
        for worker in {psutil.Process(pid).ppid() for pid in found} - found:
            os.kill(worker, signal.SIGKILL)
            return trial
    raise AssertionError("no trial runs")
