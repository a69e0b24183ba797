"""A disk that fills at any moment of a training gives one line, and with space again nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.launching import ROOT, TINY, environment

pytestmark = pytest.mark.slow

WORKER = ROOT / "tests" / "tools" / "workers" / "full_disk.py"
RUN = (*TINY, "train.max_steps=2", "train.checkpoint_every=1", "train.log_every=1", "train.eval_images=16",
       "train.ema_decay=0.5", "data.workers=0")  # fmt: skip


@pytest.mark.parametrize("room", [0, 20_000])  # limit in bytes of a file: no file can be written, or only small ones
def test_a_disk_that_is_full_from_any_moment_on(folder: Path, room: int) -> None:
    own, out = folder / str(room), folder / f"{room}.json"
    own.mkdir()
    (own / "data").symlink_to(folder / "data")
    done = subprocess.run(
        [sys.executable, str(WORKER), *RUN, str(room), str(out)],
        cwd=own, env=environment(), text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    moments = json.loads(out.read_text())
    assert len(moments) > 30
    stopped = [moment for moment in moments if moment["said"] is not None]
    print(f"room {room}: {len(moments)} moments, {len(stopped)} stopped the training")
    assert len(stopped) > 15
    for moment in stopped:
        assert "resume=auto" in moment["said"], moment
    assert [moment for moment in moments if not moment["equal"]] == []
