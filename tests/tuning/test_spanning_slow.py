"""Trials that span nodes (raylets of one CPU each): their ranks meet, end together, and survive the loss of a node.

A search that waits may begin before there is a node for it.
"""

import json
import time
from pathlib import Path

import pytest

from tests.tools.tuning_runs import (
    SMALL,
    alive,
    begin,
    finish,
    finished,
    first_step,
    node_apart,
    runs,
    shared_server,
    two_nodes,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_trial_on_two_nodes_goes_on_after_one_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = tmp_path / "runs" / "tune" / "wide"
    trial = ("--space", "msvp", "--num-samples", "1", "--nodes-per-trial", "2", "--scheduler", "none", "--name", "wide")
    with shared_server(tmp_path) as url, two_nodes(monkeypatch) as (cluster, doomed):
        driver = begin(tmp_path, *trial, "--", "train.epochs=16", *SMALL, uri=url)
        deadline = time.monotonic() + 600
        while len(list(search.glob("*/checkpoint_*/checkpoints"))) < 1:
            assert time.monotonic() < deadline
            assert driver.poll() is None, (tmp_path / "tune.log").read_text()
            time.sleep(0.2)
        assert [len(alive(f"--node_rank={node}")) > 0 for node in (0, 1)] == [True, True]
        cluster.remove_node(doomed, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        status, output = finish(driver, tmp_path, 900)
    assert status == 0, output
    (name,) = finished(search)
    last = search / "trials" / name / runs(search)[name][-1]
    assert first_step(last) > 0, "it began anew"
    marks = [json.loads(mark.read_text()) for mark in last.glob("checkpoints/*/complete.json")]
    assert {mark["world_size"] for mark in marks} == {2}
    assert not alive(str(search / "trials")), "ranks are left"


def test_ranks_that_are_refused_on_the_other_node_end_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks cannot share a batch of 129 equally, which both nodes' ranks report."""
    trial = ("--space", "msvp", "--num-samples", "1", "--nodes-per-trial", "2", "--scheduler", "none", "--name", "odd")
    with shared_server(tmp_path) as url, two_nodes(monkeypatch):
        driver = begin(tmp_path, *trial, "--", "train.epochs=1", "train.batch_size=129", *SMALL, uri=url)
        status, output = finish(driver, tmp_path, 600)
    assert status == 1
    assert "129" in output
    assert not alive(str(tmp_path / "runs" / "tune" / "odd"))


def test_nodes_without_a_common_folder_are_named_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node has its own file system in place of the search's folder."""
    storage = tmp_path / "runs" / "tune"
    with shared_server(tmp_path) as url, two_nodes(monkeypatch) as (cluster, other):
        cluster.remove_node(other)
        with node_apart(cluster, storage):
            name = ("--space", "msvp", "--name", "apart", "--storage", str(storage))
            status, output = finish(begin(tmp_path, *name, uri=url), tmp_path, 300)
    assert status == 2
    assert (
        f"does not see {storage / 'apart'}; give --storage and data.root on a file system that all nodes share"
        in output
    )
    assert not (storage / "apart" / "search.json").exists(), "its name is still free"


def test_a_search_that_waits_begins_without_a_node_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = ("--space", "msvp", "--num-samples", "1", "--resources-per-trial", "CPU=2", "--scheduler", "none")
    small = ("--", "train.epochs=1", *SMALL)
    with shared_server(tmp_path) as url, two_nodes(monkeypatch) as (cluster, _):
        status, output = finish(begin(tmp_path, *trial, "--name", "now", *small, uri=url), tmp_path, 300)
        assert status == 2
        assert "add --wait if an autoscaler adds them" in output
        driver = begin(tmp_path, *trial, "--wait", "--name", "later", *small, uri=url)
        deadline = time.monotonic() + 300
        while "each needs CPU=2" not in (tmp_path / "tune.log").read_text():
            assert time.monotonic() < deadline
            assert driver.poll() is None, (tmp_path / "tune.log").read_text()
            time.sleep(0.5)
        cluster.add_node(num_cpus=2)
        status, output = finish(driver, tmp_path, 600)
    assert status == 0, output
    assert len(finished(tmp_path / "runs" / "tune" / "later")) == 1
