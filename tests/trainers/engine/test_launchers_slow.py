"""A training started by torchrun, and by the batch file for Slurm, stops on a signal and continues."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from certizoo.ports import free_port
from tests.tools.launching import ROOT, TINY, environment, finish, reach, rows
from trainers.job import checkpoint

pytestmark = pytest.mark.slow

RUN = (*TINY, "train.epochs=2", "train.log_every=1", "train.eval_images=64", "name=started")
STEPS = 46
SRUN = """#!/bin/bash
# Stand-in for srun: two tasks; it forwards SIGUSR1.
trap 'kill -USR1 $(jobs -p)' USR1
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 "$@" & done
status=0
for job in $(jobs -p); do
    wait $job; one=$?
    while kill -0 $job 2>/dev/null; do wait $job; one=$?; done
    [ $one -ne 0 ] && status=$one
done
exit $status
"""
SCONTROL = """#!/bin/bash
if [ "$1" = requeue ]; then echo "$2" >> requeued.txt; else echo 127.0.0.1; fi
"""


def start(*command: str, cwd: Path, **more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, cwd=cwd, env=environment() | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def whole(run_dir: Path) -> bool:
    return [row["step"] for row in rows(run_dir) if "loss" in row] == [*range(1, STEPS + 1)]


def test_torchrun_starts_stops_and_continues_a_training(digits: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}",
               str(ROOT / "trainers" / "adv_train.py"), *RUN, f"data.root={digits}"]  # fmt: skip
    run_dir = tmp_path / "runs" / "started"
    process = start(*command, cwd=tmp_path)
    reach(process, run_dir, 5)
    process.terminate()
    assert "stopped by" in finish(process)[1]
    saved = checkpoint.newest(run_dir)
    assert saved is not None
    assert saved.position.step >= 5
    status, output = finish(start(*command, "resume=auto", cwd=tmp_path))
    assert status == 0, output
    assert whole(run_dir)


def test_the_batch_file_for_slurm_is_queued_again_until_the_training_is_done(digits: Path, tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "trainers").symlink_to(ROOT / "trainers")
    job = {"PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "77",
           "SLURM_JOB_NODELIST": "here", "PYTHONPATH": str(ROOT)}  # fmt: skip
    command = ["bash", str(ROOT / "cluster" / "slurm.sbatch"), *RUN, f"data.root={digits}"]
    run_dir, queued = tmp_path / "runs" / "started", tmp_path / "requeued.txt"
    process = start(*command, cwd=tmp_path, **job)
    reach(process, run_dir, 5)
    process.send_signal(signal.SIGUSR1)
    status, output = finish(process)
    assert status == 0, output
    assert queued.read_text() == "77\n"
    assert not whole(run_dir)
    status, output = finish(start(*command, cwd=tmp_path, **job))
    assert status == 0, output
    assert whole(run_dir)
    assert queued.read_text() == "77\n", "a finished training is not queued again"
