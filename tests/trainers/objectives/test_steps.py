"""Two real steps of every objective and option: DeepSpeed on 2 ranks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.tools.launching import ROOT, TINY, run_ranks
from tests.tools.teachers import save_teacher
from tests.tools.workers.objectives import cases
from trainers.objectives import OBJECTIVES

EXACT = ("+model.drop_path_rate=0", "penalty=none", "optimizer=sgd", "optimizer.weight_decay=0")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    replaced = ("+model.drop_path_rate", "penalty", "train.batch_size", "optimizer")
    tiny = [override for override in TINY if not override.startswith(replaced)]
    save_teacher(folder / "teacher")
    worker = ROOT / "tests" / "tools" / "workers" / "objectives.py"
    run_ranks(worker, *tiny, *EXACT, str(folder / "out.json"), cwd=folder)
    return dict(json.loads((folder / "out.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(cases([])))
def test_two_steps_move_the_weights_alike_on_all_ranks(found: dict[str, Any], case: str) -> None:
    one, two = found[case]["terms"]
    assert {"loss", "acc"} <= set(one) == set(two)
    assert all(math.isfinite(value) for terms in (one, two) for value in terms.values())
    assert 1e-6 < found[case]["moved"] < 1
    assert found[case]["apart"] <= 1e-9


def test_every_objective_is_stepped() -> None:
    assert set(OBJECTIVES) <= set(cases([]))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sharpness_aware_steps_are_those_of_one_plain_process(found: dict[str, Any], stage: int) -> None:
    """Weights go uphill and return bit by bit, under each stage that keeps them whole."""
    assert found[f"sam-zero{stage}"]["off"] <= 1e-6
    plain, sharp = (found[case]["terms"][0]["loss"] for case in ("clean", f"sam-zero{stage}"))
    assert sharp > plain + 1e-3, "the loss that counts is the one uphill"


@pytest.mark.slow
def test_a_run_that_compiles_nothing_does_not_wait_for_a_compiler(found: dict[str, Any]) -> None:
    """DeepSpeed would load one in 2 s (`trainers.engine.engine.uncompiled`)."""
    assert not found["loaded inductor"]


@pytest.mark.slow
def test_a_teacher_without_weight_changes_nothing(found: dict[str, Any]) -> None:
    assert found["trades-unheard"]["terms"] == found["trades"]["terms"]
    assert found["trades-taught"]["terms"][0]["loss"] != found["trades"]["terms"][0]["loss"]


@pytest.mark.slow
def test_a_teacher_is_heard_alike_at_every_zero_stage(found: dict[str, Any]) -> None:
    losses = [found[f"clean-taught{stage}"]["terms"][1]["loss"] for stage in ("", "-zero0", "-zero3")]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


@pytest.mark.slow
def test_masks_and_mixing_change_the_steps(found: dict[str, Any]) -> None:
    losses = {found[case]["terms"][0]["loss"] for case in ("pgd_at", "pgd_at-masked", "pgd_at-mixed")}
    assert len(losses) == 3
