"""The certify stage on two real Ray nodes gives the rows of one process, even if a node is killed in the middle."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

import zoo
from certify.stage import run as stage
from certizoo import UserError
from tests.tools.stage_runs import CONFIG, SETTINGS, data
from tests.tools.tuning_runs import two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ASKED = replace(SETTINGS, images=60, batch_size=5, eps=(0.01, 0.1), nonce="n")


@pytest.fixture(scope="module")
def expected(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("one")
    stage.run(handover, data(digits), ASKED, out)
    return rows(out)


def rows(out: Path) -> pd.DataFrame:
    return pd.read_parquet(out / stage.TABLE).drop(columns=["seconds", "served_difference"])


@pytest.mark.parametrize("killed", [False, True])
def test_two_nodes_write_the_rows_of_one_process(
    killed: bool,
    handover: Path,
    digits: Path,
    expected: pd.DataFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[int] = []

    def progress(now: int, total: int) -> None:
        done.append(now)

    with two_nodes(monkeypatch) as (cluster, other):

        def kill() -> None:
            while not any(done):
                time.sleep(0.05)
            cluster.remove_node(other, allow_graceful=False)

        killer = threading.Thread(target=kill)
        if killed:
            killer.start()
        stage.run(handover, data(digits), replace(ASKED, on="ray"), tmp_path, progress)
        if killed:
            killer.join()
    assert done == list(range(0, 65, 5)), "in order, each batch once"
    pd.testing.assert_frame_equal(rows(tmp_path), expected, rtol=1e-5)


def test_what_a_worker_refuses_is_said_here(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-over changes between its reading by the driver and by the worker."""
    folder = tmp_path / "handover"
    torch.manual_seed(0)
    zoo.handover.save(folder, zoo.create_model(**CONFIG), CONFIG, {})
    from certify.rows import cluster as of_rows

    honest = of_rows._packed

    def spoiled(handover: Path) -> dict[str, bytes]:
        return honest(handover) | {"config.yaml": b"model: {name: no_such_model}"}

    monkeypatch.setattr(of_rows, "_packed", spoiled)
    with two_nodes(monkeypatch), pytest.raises(UserError, match="no_such_model"):
        stage.run(folder, data(digits), replace(ASKED, on="ray", workers=1), tmp_path / "out")
