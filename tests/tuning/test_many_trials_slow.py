"""A search of many short trials, two of whose drivers are killed: each trial is certified and registered once.

Several hundred trials, with killed nodes: `python -m benchmarks.bench_many_trials`.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest

from certizoo.registry import browse
from certizoo.registry.server import store
from tests.tools.postgres import postgres
from tests.tools.tuning_runs import begin, finish, finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TRIALS, NAME = 12, "many"
SEARCH = ("--space", "msvp", "--scheduler", "none", "--search", "random", "--num-samples", str(TRIALS), "--name", NAME)
SHORT = ("--", "train.epochs=1", "train.eval_images=20", "train.certify_images=20", "certify.images=20",
         "certify.method=lofast", "registry.champion_images=20")  # fmt: skip


@pytest.fixture(params=["sqlite", "postgresql"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the address of an empty registry."""
    sqlite = nullcontext(f"{store.SQLITE}{tmp_path}/mlflow.db")
    with sqlite if request.param == "sqlite" else postgres() as uri:
        yield uri


def test_no_trial_is_lost_or_counted_twice(registry: str, tmp_path: Path) -> None:
    search = tmp_path / "runs" / "tune" / NAME
    driver = begin(tmp_path, *SEARCH, *SHORT, uri=registry)
    for done in (TRIALS // 3, 2 * TRIALS // 3):
        while not (search / "trials").is_dir() or len(finished(search)) < done:
            assert driver.poll() is None, (tmp_path / "tune.log").read_text()
            time.sleep(0.2)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        driver = begin(tmp_path, "--resume", NAME, uri=registry)
    status, output = finish(driver, tmp_path, 1200)
    assert status == 0, output
    rows = pd.read_csv(search / "results.csv")
    assert list(rows["state"]) == ["certified"] * TRIALS
    trials = [version.tags["trial"] for version in browse.versions("spec_vit_digits", registry)]
    assert len(trials) == len(set(trials)) == TRIALS
