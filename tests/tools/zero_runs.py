"""Runs of tests/tools/workers/zero.py, and what they measure."""

import json
from pathlib import Path

from tests.tools.launching import ROOT, TINY, run_ranks

WORKER = ROOT / "tests" / "tools" / "workers" / "zero.py"
EXACT = ("attack.random_start=false", "+model.drop_path_rate=0", "optimizer=sgd", "train.batch_size=16")
SHARDED = ("+deepspeed.persistent_below=0", "+deepspeed.live_parameters=0")  # otherwise small weights stay whole
Facts = dict[str, dict[str, float]]


def differences(folder: Path, which: str) -> Facts:
    """Return the measurements of tests/tools/workers/zero.py."""
    replaced = ("+model.drop_path_rate", "train.batch_size", "optimizer")
    tiny = [override for override in TINY if not override.startswith(replaced)]
    strong = [f"penalty.lambda_{branch}=0.1" for branch in "qkv"]  # strong enough to show a penalty that counts twice
    arguments = (*tiny, *EXACT, *SHARDED, *strong, f"name={which}", which, str(folder / f"{which}.json"))
    run_ranks(WORKER, *arguments, cwd=folder)
    return dict(json.loads((folder / f"{which}.json").read_text()))


def whole(arrived: dict[str, float]) -> None:
    """Check that the logged penalty equals the penalty's gradient in the update."""
    assert abs(arrived["share"] - 1) <= 1e-3
    assert arrived["off"] <= 0.01
    assert arrived["logged"] <= 1e-5
