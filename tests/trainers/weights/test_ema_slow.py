"""The average of the weights is exact at every ZeRO stage that allows it."""

import json
from pathlib import Path

import pytest

from tests.tools.launching import ROOT, TINY, finish, launch
from tests.tools.workers.ema import VARIANTS

pytestmark = pytest.mark.slow


def test_equals_the_average_written_out(folder: Path) -> None:
    """Compare float32 with float64, summed over both ranks; in bf16 it averages the float32 masters."""
    small = [override for override in TINY if not override.startswith("train.batch_size")]
    worker = ROOT / "tests" / "tools" / "workers" / "ema.py"
    status, output = finish(launch(worker, *small, "train.batch_size=16", str(folder / "out.json"), cwd=folder))
    assert status == 0, output
    differences = json.loads((folder / "out.json").read_text())
    assert differences.keys() == VARIANTS.keys()
    assert max(differences.values()) <= 1e-6, differences
