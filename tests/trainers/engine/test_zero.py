"""However ranks, ZeRO stages and gradient accumulation cut a batch, the training is that of one plain process."""

import json
from pathlib import Path

import pytest

from tests.tools.launching import ROOT, TINY, finish, launch

WORKER = ROOT / "tests" / "tools" / "workers" / "zero.py"
EXACT = ("attack.random_start=false", "+model.drop_path_rate=0", "optimizer=sgd", "train.batch_size=16")
SHARDED = ("+deepspeed.persistent_below=0", "+deepspeed.live_parameters=0")  # by default small weights stay whole

WAYS = {
    "pgd": (0, 1, 2, 3),
    "accumulated": (0, 1, 2, 3),
    "recomputed": (0, 1, 2, 3),
    "offloaded": (1, 2, 3),
    "hinge": (0, 1, 2, 3),
    "lmce": (0, 1, 2),
    "capped": (1, 3),  # and accumulated: the power iteration moves once a step
}


def differences(folder: Path, which: str) -> dict[str, dict[str, float]]:
    """What tests/tools/workers/zero.py writes."""
    replaced = ("+model.drop_path_rate", "train.batch_size", "optimizer")
    tiny = [override for override in TINY if not override.startswith(replaced)]
    strong = [f"penalty.lambda_{branch}=0.1" for branch in "qkv"]  # a penalty counted twice must show
    arguments = (*tiny, *EXACT, *SHARDED, *strong, f"name={which}", which, str(folder / f"{which}.json"))
    status, output = finish(launch(WORKER, *arguments, cwd=folder), seconds=300)
    assert status == 0, output
    return dict(json.loads((folder / f"{which}.json").read_text()))


def whole(arrived: dict[str, float]) -> None:
    """What is logged of a penalty is what the update gets of it, which is the penalty's gradient."""
    assert abs(arrived["share"] - 1) <= 1e-3
    assert arrived["off"] <= 0.01
    assert arrived["logged"] <= 1e-5


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, float]]:
    return differences(folder, "stages")


@pytest.mark.parametrize("way", [f"{way}-zero{stage}" for way, stages in WAYS.items() for stage in stages])
def test_training_equals_one_plain_process(found: dict[str, dict[str, float]], way: str) -> None:
    """Losses and weights, with PGD, MSVP, clipping, momentum and weight decay; 20 steps for `pgd`, 3 for the others.
    At stage 3 no rank holds a whole weight between steps; elsewhere all do."""
    assert found[way]["loss"] <= 2e-6
    assert found[way]["weight"] <= 1e-5
    assert found[way]["sharded"] == (1.0 if way.endswith("zero3") else 0.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_attack_leaves_no_trace(found: dict[str, dict[str, float]], stage: int) -> None:
    """Nothing of weights, gradients, buffers, optimiser state and modes differs after it."""
    assert found[f"attack-zero{stage}"] == {"moved": 1.0, "changed": 0.0}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_is_close_to_float32(found: dict[str, dict[str, float]], stage: int) -> None:
    assert 0 < found[f"bf16-zero{stage}"]["weight"] <= 0.01


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_small_penalty_reaches_the_weights_in_bf16(found: dict[str, dict[str, float]], stage: int) -> None:
    """At the smallest lambda that is searched (all: test_zero_slow.py); the loss's gradient is 10^5 times as large."""
    whole(found[f"arrived-1e-6-zero{stage}"])


@pytest.mark.parametrize("stage", [1, 3])
def test_the_attacks_precision_is_its_own(found: dict[str, dict[str, float]], stage: int) -> None:
    """Each of the two precisions makes its difference, and that of the attack is the smaller one."""
    attack = found[f"attacked-in-bf16-zero{stage}"]["weight"]
    assert 1e-6 < attack < 1e-3
    both, training = (found[f"{way}-zero{stage}"] for way in ("bf16", "bf16-attacked-in-fp32"))
    assert training["weight"] <= 0.01
    assert training["loss"] != both["loss"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_broken_gradient_is_noticed(found: dict[str, dict[str, float]], precision: str, stage: int) -> None:
    """Of one rank, under a finite loss; before it, an update is called one."""
    assert found[f"broken-{precision}-zero{stage}"] == {"whole": 1.0, "broken": 0.0}


def test_missing_data_is_said_once_by_all_ranks(folder: Path) -> None:
    script = ROOT / "trainers" / "adv_train.py"
    status, output = finish(launch(script, *TINY, "name=lost", "data.root=nowhere", cwd=folder))
    assert status == 2
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    assert "nowhere" in errors[0]
    assert "Traceback" not in output
    assert not (folder / "runs" / "lost").exists()
