"""Any split of a batch over ranks, ZeRO stages and accumulation gives the training of one plain process."""

from pathlib import Path

import pytest

from tests.tools.launching import ROOT, TINY, finish, launch
from tests.tools.zero_runs import Facts, differences, whole

WAYS = {
    "pgd": (0, 1, 2, 3),
    "accumulated": (0, 1, 2, 3),
    "recomputed": (0, 1, 2, 3),
    "offloaded": (1, 2, 3),
    "hinge": (0, 1, 2, 3),
    "lmce": (0, 1, 2),
    "capped": (1, 3),  # with accumulation: the power iteration moves once a step
}
MEASURED = {
    "arrived-1e-6": (0, 1, 2, 3),
    "attack": (0, 1, 2, 3),
    "bf16": (0, 1, 2, 3),
    "bf16-attacked-in-fp32": (1, 3),
    "attacked-in-bf16": (1, 3),
    "broken-fp32": (1, 2, 3),
    "broken-bf16": (1, 2, 3),
}


def staged(ways: dict[str, tuple[int, ...]]) -> list[str]:
    return [f"{way}-zero{stage}" for way, stages in ways.items() for stage in stages]


def of(found: Facts, *ways: str) -> Facts:
    """Select these ways at the stages that were run: a few in the gate, all in the slow tests."""
    return {f"{way}-zero{stage}": found[f"{way}-zero{stage}"] for way in ways for stage in range(4)
            if f"{way}-zero{stage}" in found}  # fmt: skip


@pytest.fixture(scope="module", params=["quick", pytest.param("stages", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, folder: Path) -> Facts:
    facts = differences(folder, request.param)
    everything = {*staged(WAYS), *staged(MEASURED)}
    assert everything == facts.keys() if request.param == "stages" else everything > facts.keys()
    return facts


@pytest.mark.parametrize("way", WAYS)
def test_training_equals_one_plain_process(found: Facts, way: str) -> None:
    """Compare losses and weights, with PGD, MSVP, clipping, momentum and weight decay.

    `pgd` runs 20 steps (6 in the quick tests), the others 3. At stage 3 no rank holds a whole weight between steps; at
    other stages all do.
    """
    chosen = of(found, way)
    assert chosen
    for name, facts in chosen.items():
        assert facts["loss"] <= 2e-6, name
        assert facts["weight"] <= 1e-5, name
        assert facts["sharded"] == (1.0 if name.endswith("zero3") else 0.0), name


def test_an_attack_leaves_no_trace(found: Facts) -> None:
    """Weights, gradients, buffers, optimiser state and modes are unchanged after it."""
    traces = of(found, "attack")
    assert traces
    assert all(facts == {"moved": 1.0, "changed": 0.0} for facts in traces.values())


def test_bf16_is_close_to_float32(found: Facts) -> None:
    for name, facts in of(found, "bf16").items():
        assert 0 < facts["weight"] <= 0.01, name


def test_a_small_penalty_reaches_the_weights_in_bf16(found: Facts) -> None:
    """The lambda is the smallest of the searches, where the loss's gradient is 10^5 times as large.

    All lambdas: test_zero_slow.py.
    """
    assert of(found, "arrived-1e-6")
    for facts in of(found, "arrived-1e-6").values():
        whole(facts)


def test_the_attacks_precision_is_its_own(found: Facts) -> None:
    """Each precision changes the result, the attack's by less."""
    stages = [stage for stage in range(4) if f"attacked-in-bf16-zero{stage}" in found]
    assert stages
    for stage in stages:
        assert 1e-6 < found[f"attacked-in-bf16-zero{stage}"]["weight"] < 1e-3
        both, training = (found[f"{way}-zero{stage}"] for way in ("bf16", "bf16-attacked-in-fp32"))
        assert training["weight"] <= 0.01
        assert training["loss"] != both["loss"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_broken_gradient_is_noticed(found: Facts, precision: str) -> None:
    """One rank's gradient is NaN under a finite loss; the step before counts as an update."""
    broken = of(found, f"broken-{precision}")
    assert broken
    assert all(facts == {"whole": 1.0, "broken": 0.0} for facts in broken.values())


@pytest.mark.slow
def test_missing_data_is_said_once_by_all_ranks(folder: Path) -> None:
    script = ROOT / "trainers" / "adv_train.py"
    status, output = finish(launch(script, *TINY, "name=lost", "data.root=nowhere", cwd=folder))
    assert status == 2
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    assert "nowhere" in errors[0]
    assert "Traceback" not in output
    assert not (folder / "runs" / "lost").exists()
