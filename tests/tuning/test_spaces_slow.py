"""Every file of configs/space, searched at a tiny size: `tune.py` with the real trainer, to the registry.

Then other kinds of searches: population-based training, and several objectives.
"""

import functools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from certizoo.registry import browse
from tests.tools.tuning_runs import begin, finish, first_step, runs
from tuning import spaces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EVERY = ("certify.images=20", "registry.champion_images=20", "train.eval_images=40")
SMALL = {  # trainer -> a run of seconds
    "adv_train": (*EVERY, "train.epochs=1"),
    "constrain": (*EVERY, "constrain.adapt_epochs=1", "constrain.finetune_epochs=1", "constrain.passes=2"),
}
RANDOM = ("--search", "random", "--scheduler", "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all searches, so that the digits are made once."""
    return tmp_path_factory.mktemp("spaces")


def searched(folder: Path, name: str, *arguments: str) -> tuple[pd.DataFrame, list[browse.Version]]:
    """Return (results.csv, the versions in the registry) of a search."""
    status, output = finish(begin(folder, "--name", name, *arguments), folder, 1500)
    assert status == 0, output
    rows = pd.read_csv(folder / "runs" / "tune" / name / "results.csv")
    versions = [v for v in browse.versions(uri=f"sqlite:///{folder}/mlflow.db") if v.tags["search"] == name]
    assert {v.tags["trial"] for v in versions} == {f"{name}/{trial}" for trial in rows["trial"]}
    assert len(versions) == len(rows)
    assert set(rows["state"]) == {"certified"}
    return rows, versions


def trained(run_dir: str, key: str) -> Any:
    """Return the value of a configuration key in a run."""
    return functools.reduce(lambda node, part: node[part], key.split("."), configuration(Path(run_dir)))


def configuration(run_dir: Path) -> Any:
    return yaml.safe_load((run_dir / "config.yaml").read_text())


@pytest.mark.parametrize("name", spaces.names())
def test_a_space_is_searched(folder: Path, name: str) -> None:
    """Drawn values reach the trainer and the version's tags, and the trial is certified."""
    space = spaces.load(name)
    rows, versions = searched(folder, name, "--space", name, "--num-samples", "1", *RANDOM, "--", *SMALL[space.trainer])
    (version,), row = versions, rows.iloc[0]
    assert version.tags["space"] == name
    for key in space.parameters:
        assert trained(row["run_dir"], key) == pytest.approx(row[key], rel=1e-9)
        assert float(version.tags[f"param.{key}"]) == pytest.approx(row[key], rel=1e-9)
    assert float(version.tags["certified_acc.0.1"]) == pytest.approx(row["certified_acc@0.1"], abs=1e-4)


def test_the_worse_of_a_population_goes_on_from_the_better(folder: Path) -> None:
    """It takes the better trial's weights with other parameters."""
    few = (*EVERY, "train.epochs=4")
    searched(folder, "pbt", "--space", "recipe", "--scheduler", "pbt", "--num-samples", "2", "--", *few)
    search = folder / "runs" / "tune" / "pbt"
    again = [search / "trials" / trial / name for trial, names in runs(search).items() for name in names[1:]]
    taken = [run_dir for run_dir in again if first_step(run_dir) > 0]
    assert taken, "nobody was replaced"
    keys = spaces.load("recipe").parameters
    assert any(
        trained(str(run_dir), key) != trained(str(run_dir.parent / "run-1"), key) for run_dir in taken for key in keys
    )


def test_several_objectives_make_a_front(folder: Path) -> None:
    metric = ("clean_acc", "pgd_acc@0.2", "certified_acc@0.2")
    words = [word for text in metric for word in ("--metric", text)]
    samples = ("--num-samples", "3", "--max-concurrent", "1")
    rows, versions = searched(folder, "pareto", "--space", "msvp", *words, *samples, "--", *SMALL["adv_train"])
    assert (rows["clean_acc"] >= rows["pgd_acc@0.2"]).all()
    assert (rows["pgd_acc@0.2"] >= rows["certified_acc@0.2"]).all()
    assert all("certified_acc.0.2" in v.tags for v in versions), "the radius was not added to the certificate"
    page = (folder / "runs" / "tune" / "pareto" / "search.html").read_text()
    values = {row["trial"]: [row[key] for key in metric] for _, row in rows.iterrows()}
    assert values.keys() == {v.tags["trial"].removeprefix("pareto/") for v in versions}
    kept = [mine for mine in values if not any(beats(values[other], values[mine]) for other in values)]
    assert f"on the Pareto front: {', '.join(kept)}." in page


def beats(a: list[float], b: list[float]) -> bool:
    return a != b and all(mine >= theirs for mine, theirs in zip(a, b, strict=True))
