"""However ranks, ZeRO stages and gradient accumulation cut a batch, the weights are those of one plain process."""

import json
from pathlib import Path

import pytest

import shards.__main__
from tests.launching import ROOT, TINY, finish, launch

WORKER = ROOT / "tests" / "zero_worker.py"
EXACT = ("attack.random_start=false", "+model.drop_path_rate=0", "optimizer=sgd", "train.batch_size=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    shards.__main__.main(["digits", str(folder / "data" / "digits")])
    return folder


@pytest.fixture(scope="module")
def differences(folder: Path) -> dict[str, float]:
    replaced = ("+model.drop_path_rate", "train.batch_size", "optimizer")
    tiny = [override for override in TINY if not override.startswith(replaced)]
    strong = [f"penalty.lambda_{branch}=0.1" for branch in "qkv"]  # a penalty counted twice must show
    status, output = finish(launch(WORKER, *tiny, *EXACT, *strong, "name=zero", str(folder / "out.json"), cwd=folder))
    assert status == 0, output
    return dict(json.loads((folder / "out.json").read_text()))


CUTS = [f"zero{stage}{way}" for stage in (0, 1, 2) for way in ("", "-accumulated")]


@pytest.mark.parametrize("cut", [*CUTS, *(f"lmce-{cut}" for cut in CUTS)])
def test_weights_equal_one_plain_process(differences: dict[str, float], cut: str) -> None:
    """Attack or input gradient in the loss, penalty, clipping, momentum and weight decay included; 3 steps of 16
    images."""
    assert differences[cut] <= 1e-6


def test_bf16_hands_over_its_float32_masters(differences: dict[str, float]) -> None:
    """Close to the float32 run, and finer than bfloat16 could say."""
    assert 0 < differences["bf16"] <= 0.02
    assert differences["bf16 masters beyond bf16"] > 0


def test_missing_data_is_said_once_by_all_ranks(folder: Path) -> None:
    script = ROOT / "trainers" / "adv_train.py"
    status, output = finish(launch(script, *TINY, "name=lost", "data.root=nowhere", cwd=folder))
    assert status == 2
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    assert "nowhere" in errors[0]
    assert "Traceback" not in output
    assert not (folder / "runs" / "lost").exists()
