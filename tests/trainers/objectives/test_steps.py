"""Two real steps of every objective and option: DeepSpeed, 2 ranks, the launcher."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tools.cases import mostly_slow
from tests.tools.launching import ROOT, TINY, finish, launch
from tests.tools.workers.objectives import QUICK, cases
from trainers.objectives import OBJECTIVES

EXACT = ("+model.drop_path_rate=0", "penalty=none", "optimizer=sgd", "optimizer.weight_decay=0")


def runs(*wanted: str) -> list[Any]:
    """The worker's runs that hold all of these cases: the quick one where it does, and the slow tests'."""
    return mostly_slow(["quick", "all"], "quick") if set(wanted) <= set(QUICK) else mostly_slow(["all"])


def each_run(*wanted: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("found", runs(*wanted), indirect=True)


def run_and(argument: str, wanted: dict[Any, str]) -> pytest.MarkDecorator:
    """With a value of the argument for each of these cases."""
    chosen = [pytest.param(*run.values, value, marks=run.marks) for value, case in wanted.items() for run in runs(case)]
    return pytest.mark.parametrize(("found", argument), chosen, indirect=["found"])


@pytest.fixture(scope="module")
def launched(folder: Path) -> Callable[[str], dict[str, Any]]:
    replaced = ("+model.drop_path_rate", "penalty", "train.batch_size", "optimizer")
    tiny = [override for override in TINY if not override.startswith(replaced)]
    worker = ROOT / "tests" / "tools" / "workers" / "objectives.py"

    @cache
    def of(which: str) -> dict[str, Any]:
        here, out = folder / which, folder / f"{which}.json"
        here.mkdir()  # each case has a run of its name
        (here / "data").symlink_to(folder / "data")
        status, output = finish(launch(worker, *tiny, *EXACT, which, str(out), cwd=here), seconds=300)
        assert status == 0, output
        return dict(json.loads(out.read_text()))

    return of


@pytest.fixture
def found(request: pytest.FixtureRequest, launched: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return launched(request.param)


@run_and("case", {case: case for case in sorted(cases([]))})
def test_two_steps_move_the_weights_alike_on_all_ranks(found: dict[str, Any], case: str) -> None:
    one, two = found[case]["terms"]
    assert {"loss", "acc"} <= set(one) == set(two)
    assert all(math.isfinite(value) for terms in (one, two) for value in terms.values())
    assert 1e-6 < found[case]["moved"] < 1
    assert found[case]["apart"] <= 1e-9


def test_every_objective_is_stepped() -> None:
    assert set(OBJECTIVES) <= set(cases([]))


@run_and("stage", {stage: f"sam-zero{stage}" for stage in range(3)})
def test_sharpness_aware_steps_are_those_of_one_plain_process(found: dict[str, Any], stage: int) -> None:
    """Weights go uphill and come back bit by bit, under each stage that keeps them whole."""
    assert found[f"sam-zero{stage}"]["off"] <= 1e-6
    plain, sharp = (found[case]["terms"][0]["loss"] for case in ("clean", f"sam-zero{stage}"))
    assert sharp > plain + 1e-3, "the loss that counts is the one uphill"


@each_run()
def test_a_run_that_compiles_nothing_does_not_wait_for_a_compiler(found: dict[str, Any]) -> None:
    """DeepSpeed would load one (`trainers.engine.engine.uncompiled`), which takes 2 s."""
    assert not found["loaded inductor"]


@each_run("pgd_at", "pgd_at-masked", "pgd_at-mixed")
def test_masks_and_mixing_change_the_steps(found: dict[str, Any]) -> None:
    losses = {found[case]["terms"][0]["loss"] for case in ("pgd_at", "pgd_at-masked", "pgd_at-mixed")}
    assert len(losses) == 3
