"""A training started by torchrun stops on a signal and continues."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from certizoo.ports import free_port
from tests.tools.launching import ROOT, TINY, environment, finish, reach, rows
from trainers.job import checkpoint

pytestmark = pytest.mark.slow

RUN = (*TINY, "train.epochs=2", "train.log_every=1", "train.eval_images=64", "name=started")
STEPS = 46


def start(command: Sequence[str], cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_torchrun_starts_stops_and_continues_a_training(digits: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}",
               str(ROOT / "trainers" / "adv_train.py"), *RUN, f"data.root={digits}"]  # fmt: skip
    run_dir = tmp_path / "runs" / "started"
    process = start(command, tmp_path)
    reach(process, run_dir, 5)
    process.terminate()
    assert "stopped by" in finish(process)[1]
    saved = checkpoint.newest(run_dir)
    assert saved is not None
    assert saved.position.step >= 5
    status, output = finish(start([*command, "resume=auto"], tmp_path))
    assert status == 0, output
    assert [row["step"] for row in rows(run_dir) if "loss" in row] == [*range(1, STEPS + 1)]
