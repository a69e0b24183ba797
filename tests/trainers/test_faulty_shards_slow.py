"""Every broken shard through the real launcher: one line that names the fault, exit status 2, no hang, no weights."""

import json
import os
from pathlib import Path

import pytest

from tests.tools.launching import ROOT, TINY, finish, launch

FOLDER = Path(os.environ.get("CERTIZOO_DATA", ROOT.parent / "shared" / "data")) / "faults"
FAULTS = json.loads((FOLDER / "expected.json").read_text()) if FOLDER.is_dir() else {}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FAULTS, reason=f"no broken shards at {FOLDER}; set CERTIZOO_DATA"),
]


@pytest.mark.parametrize("shard", [name for name in FAULTS if not name.startswith("ok_")])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_broken_shard_stops_the_run_with_one_line(shard: str, split: str, tmp_path: Path) -> None:
    arguments = [a for a in TINY if not a.startswith(("data", "train.batch_size", "+model.patch_size"))]
    globs = {"train": "ok_100.tar", "test": "ok_100.tar"} | {split: shard}
    arguments += ["data=cifar10", f"data.root={FOLDER}", "train.batch_size=8", "train.epochs=1", "name=faulty"]
    arguments += [f"data.{key}={value}" for key, value in globs.items()]
    status, output = finish(launch(ROOT / "trainers" / "adv_train.py", *arguments, cwd=tmp_path), seconds=120)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status != 0, output
    assert errors, output
    assert len(errors) <= 2, "at most one line a rank: two ranks may meet two corrupt images"
    assert all(shard in error for error in errors)
    assert not (tmp_path / "runs" / "faulty" / "handover").exists()
    assert "Traceback" not in output
