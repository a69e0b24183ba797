"""Three ranks continue within an epoch where two were killed, and the epoch's images are all read."""

import shutil
from pathlib import Path

import pytest

from certizoo import shards
from certizoo.shards.writing import sources
from tests.tools.launching import ROOT, TINY, finish, launch, ranks, reach, rows
from trainers.job import checkpoint

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tests" / "tools" / "workers" / "recorded_training.py"
IMAGES, BATCH = 1437, 48
SMALL = [override for override in TINY if not override.startswith("train.batch_size")]
RUN = (*SMALL, f"train.batch_size={BATCH}", "train.epochs=1", "train.log_every=1", "train.checkpoint_every=5",
       "train.eval_images=64", "data.workers=1", "name=elastic")  # fmt: skip


def keys(folder: Path, world_size: int, lines: int | None = None) -> list[str]:
    """Return the keys that ranks have trained on, in their first `lines` micro-batches."""
    paths = [folder / f"keys-{rank}-of-{world_size}.txt" for rank in range(world_size)]
    return [key for path in paths for line in path.read_text().splitlines()[:lines] for key in line.split()]


@pytest.mark.parametrize(("mix", "steps", "made"), [("null", 30, 0), ("{digits:0.75,made:0.25}", 40, 479)])
def test_three_ranks_go_on_where_two_were_killed(digits: Path, tmp_path: Path, mix: str, steps: int, made: int) -> None:
    """A mixture's epoch is one pass through its first set, and a third as many draws from the other."""
    shutil.copytree(digits, tmp_path / "data" / "digits")
    shards.write(sources.digits()["train"][:600], tmp_path / "data" / "digits", name="made", split="train")
    run_dir = tmp_path / "runs" / "elastic"
    run = (*RUN, f"data.mix={mix}")
    process = launch(SCRIPT, *run, cwd=tmp_path)
    reach(process, run_dir, 12)
    ranks(process, SCRIPT)[1].kill()
    assert finish(process)[0] != 0
    saved = checkpoint.newest(run_dir)
    assert saved is not None
    assert 10 <= saved.position.step < steps

    status, output = finish(launch(SCRIPT, *run, "resume=auto", cwd=tmp_path, more={"LOCAL_SIZE": "3"}))
    assert status == 0, output
    assert "2 ranks began this epoch; 3 read the rest of its images" in output
    first, second = keys(tmp_path, 2, saved.position.step), keys(tmp_path, 3)
    assert len(first) + len(second) == steps * BATCH
    assert len({*first, *second}) == IMAGES + made
    assert [row["step"] for row in rows(run_dir) if "loss" in row] == [*range(1, steps + 1)]
    assert (run_dir / "handover").is_dir()
