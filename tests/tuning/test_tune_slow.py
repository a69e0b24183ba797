"""Searches as a user starts them, with the real Ray, launcher, trainer, certificates, registry and browser."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import pandas as pd
import pytest
from PIL import Image

from certizoo.registry import browse
from certizoo.registry.server import store
from tests.tools import browser
from tests.tools.launching import ROOT
from tests.tools.tuning_runs import SHORT, alive, begin, certified, finish, finished, first_step, runs
from tuning import server

SEEN = {  # hides MLflow's advertisements and selects one of its two side bars
    "_mlflow_model_registry_promo_modal_dismissed_v1": True,
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
    "mlflow.workflowType_v1": "machine_learning",
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a search of three trials in a folder that was empty before."""
    folder = tmp_path_factory.mktemp("search")
    arguments = (
        "--space",
        "msvp",
        "--name",
        "first",
        "--num-samples",
        "3",
        "--scheduler",
        "none",
        "--search",
        "random",
    )
    status, output = finish(begin(folder, *arguments, *SHORT[:1], "train.epochs=20", *SHORT[2:]), folder, 1200)
    assert status == 0, output
    return folder


def test_every_trial_is_certified_registered_and_shown(folder: Path) -> None:
    search, uri = folder / "runs" / "tune" / "first", f"sqlite:///{folder}/mlflow.db"
    versions = browse.versions("spec_vit_digits", uri)
    assert {v.tags["trial"] for v in versions} == {f"first/{trial}" for trial in runs(search)}
    assert len(versions) == 3
    rows = pd.read_csv(search / "results.csv").set_index("trial")
    for version in versions:
        trial = version.tags["trial"].removeprefix("first/")
        assert version.tags["space"] == "msvp"
        assert float(version.tags["param.penalty.lambda_q"]) == rows.loc[trial, "penalty.lambda_q"]
        assert float(version.tags["certified_acc.0.1"]) == pytest.approx(rows.loc[trial, "certified_acc@0.1"], abs=1e-4)
    (champion,) = [v for v in versions if "champion" in v.aliases]
    assert float(champion.tags["certified_acc.0.1"]) == max(float(v.tags["certified_acc.0.1"]) for v in versions)
    for file in ("pareto.png", "parallel.png", "search.html"):
        assert (search / file).stat().st_size > 5000
    assert not alive(str(search)), "processes of the search are left"


def test_a_failed_trial_says_why_and_stops_no_other(tmp_path: Path) -> None:
    """The trainer refuses a width of 50 with 4 heads; trials with 1 and 2 heads run."""
    options = ("--num-samples", "3", "--scheduler", "none", "--search", "random", "--seed", "1", "--name", "half")
    driver = begin(tmp_path, "--space", "weight_norm", *options, *SHORT, "model.embed_dim=50")
    status, output = finish(driver, tmp_path, 1200)
    rows = pd.read_csv(tmp_path / "runs" / "tune" / "half" / "results.csv")
    failed = rows[rows["state"] == "failed"]
    assert status == 1
    assert len(rows) == 3
    assert set(failed["model.num_heads"]) == {4}
    assert all("50" in why and "4" in why for why in failed["why"])
    assert set(rows[rows["state"] == "certified"]["model.num_heads"]) <= {1, 2}
    assert "Traceback" not in output


def test_a_trial_that_is_stopped_early_has_ended_when_the_next_begins(tmp_path: Path) -> None:
    """One worker runs one trial at a time; the worse of two is stopped after its first epoch."""
    options = ("--num-samples", "3", "--max-concurrent", "1", "--scheduler", "asha", "--search", "random")
    status, output = finish(begin(tmp_path, "--space", "recipe", "--name", "early", *options, *SHORT), tmp_path, 1200)
    assert status == 0, output
    search = tmp_path / "runs" / "tune" / "early"
    rows = pd.read_csv(search / "results.csv").sort_values("ended")
    assert set(rows["state"]) == {"certified", "stopped early"}
    stopped = set(rows[rows["state"] == "stopped early"]["trial"])
    assert stopped.isdisjoint(finished(search))
    logs = [search / "trials" / trial / "run-1.log" for trial in rows["trial"]]
    for log, following in pairwise(logs):
        assert log.stat().st_mtime <= (following.with_suffix("") / "config.yaml").stat().st_mtime
    assert not alive(str(search))


def test_ctrl_c_leaves_a_search_that_says_how_to_go_on(tmp_path: Path) -> None:
    search = tmp_path / "runs" / "tune" / "stopped"
    options = ("--num-samples", "2", "--max-concurrent", "1", "--scheduler", "none", "--name", "stopped")
    driver = begin(tmp_path, "--space", "msvp", *options, *SHORT[:1], "train.epochs=12", *SHORT[2:])
    wait_until(lambda: any(search.glob("trials/*/run-1/metrics.jsonl")), 300, driver)
    driver.send_signal(signal.SIGINT)
    status, output = finish(driver, tmp_path, 300)
    assert status == 130, output
    assert "2 trials to go; continue with: python tune.py --resume stopped" in output
    assert "Traceback" not in output
    assert not alive(str(search))
    status, output = finish(begin(tmp_path, "--resume", "stopped"), tmp_path, 1200)
    assert status == 0, output
    assert len(finished(search)) == 2


def test_resume_after_the_driver_was_killed(tmp_path: Path) -> None:
    """SIGKILL comes with one trial finished and one training: the first is kept, the second resumes."""
    search = tmp_path / "runs" / "tune" / "killed"
    options = ("--num-samples", "2", "--max-concurrent", "1", "--scheduler", "none", "--name", "killed")
    driver = begin(tmp_path, "--space", "msvp", *options, *SHORT[:1], "train.epochs=12", *SHORT[2:])

    def second_trains() -> bool:
        kept = {path.parent.name for path in search.glob("*/checkpoint_*")}
        return bool((search / "trials").is_dir() and finished(search) and len(kept) > 1)

    wait_until(second_trains, 900, driver)
    time.sleep(2)  # one snapshot of Tune's own state
    done = {trial: certificate_time(search, trial) for trial in finished(search)}
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not alive(str(search)), 120)  # no rank outlives it
    status, output = finish(begin(tmp_path, "--resume"), tmp_path, 900)
    assert status == 0, output
    assert len(finished(search)) == 2
    assert {trial: certificate_time(search, trial) for trial in done} == done, "a finished trial ran again"
    (went_on,) = [trial for trial, names in runs(search).items() if len(names) > 1]
    assert first_step(last_run(search, went_on)) > 0, "it began anew"
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    versions = browse.versions("spec_vit_digits", uri)
    assert len(versions) == 2
    client = store.connect(uri)
    of_trials = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert [run.info.status for run in of_trials] == 2 * ["FINISHED"], "a trial that goes on is one run"
    (champion,) = [v for v in versions if "champion" in v.aliases]
    best = max(certified(last_run(search, trial), "0.1") for trial in runs(search))
    assert float(champion.tags["certified_acc.0.1"]) == pytest.approx(best, abs=1e-4)


def test_screenshots_of_the_readme(folder: Path) -> None:
    """Chromium makes docs/*.png: the list of models, a certified version, and two versions' runs compared.

    MLflow 3.17 fails to render its own comparison of versions.
    """
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium")
    uri = f"sqlite:///{folder}/mlflow.db"
    versions = browse.versions("spec_vit_digits", uri)
    (best,) = [v for v in versions if "champion" in v.aliases]
    two = [str(v.run_id) for v in versions[:2]]
    experiment = store.connect(uri).get_run(two[0]).info.experiment_id
    compared = f"#/compare-runs?runs={quote(json.dumps(two))}&experiments={quote(json.dumps([experiment]))}"
    pages = {
        "registry_models": ("#/models", best.name),
        "registry_version": (f"#/models/{best.name}/versions/{best.version}", "certified (lofast)"),
        "registry_compare": (compared, "penalty.lambda_q"),
    }
    with server.started(uri, folder / "server.log") as url, browser.chromium(folder / "profile") as devtools:
        for name, (page, words) in pages.items():
            image = Image.open(BytesIO(browser.picture(devtools, f"{url}/{page}", words, SEEN)))
            assert len(image.convert("L").getcolors() or []) > 32, "a blank page"
            image.convert("RGB").quantize(256).save(ROOT / "docs" / f"{name}.png", optimize=True)


def last_run(search: Path, trial: str) -> Path:
    return search / "trials" / trial / runs(search)[trial][-1]


def certificate_time(search: Path, trial: str) -> float:
    return (last_run(search, trial) / "certificate" / "certificate.json").stat().st_mtime


def wait_until(true: Callable[[], bool], seconds: float, driver: "subprocess.Popen[str] | None" = None) -> None:
    """Wait for a condition; fail and end the driver if it does not come."""
    deadline = time.monotonic() + seconds
    while not true():
        if driver is not None and time.monotonic() > deadline:
            driver.terminate()
        assert time.monotonic() < deadline, "it did not come to that"
        assert driver is None or driver.poll() is None, "the driver ended"
        time.sleep(0.2)
