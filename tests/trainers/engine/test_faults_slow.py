"""Faults in whole runs end with a checkpoint to resume from and one line that names the fault."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.tools.launching import ROOT, TINY, environment, finish, launch, ranks, reach, rows
from trainers.job import checkpoint
from trainers.weights.saving import PART

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "trainers" / "adv_train.py"
LONG = (*TINY, "train.epochs=1000", "train.log_every=1", "train.checkpoint_every=4", "train.eval_images=0")


def alone(*arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    """Run the script without the launcher, in a world of one."""
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def the_error(output: str) -> str:
    assert "Traceback" not in output, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    return errors[0]


def newest_step(run_dir: Path) -> int:
    saved = checkpoint.newest(run_dir)
    assert saved is not None
    return saved.position.step


# --- asked to stop ---------------------------------------------------------------------------------------------------


def above(process: psutil.Process) -> psutil.Process:
    return process.parent()


TARGETS = {  # (receiver of SIGTERM, exit status of the command)
    "one rank": (lambda rank: rank, 0),
    "the launcher": (above, 1),  # it forwards the signal and always ends with 1
    "the command": (lambda rank: above(above(rank)), -signal.SIGTERM),  # it forwards nothing
}


@pytest.mark.parametrize("target", TARGETS)
def test_sigterm_leaves_a_checkpoint_of_the_last_step(folder: Path, target: str) -> None:
    name = target.replace(" ", "_")
    run_dir = folder / "runs" / name
    process = launch(SCRIPT, *LONG, f"name={name}", "train.checkpoint_every=0", "data.workers=1", cwd=folder)
    reach(process, run_dir, 3)
    processes = ranks(process, SCRIPT)
    find, expected = TARGETS[target]
    find(processes[1]).send_signal(signal.SIGTERM)
    status, output = finish(process, seconds=60)
    assert status == expected, output
    _, alive = psutil.wait_procs(list(processes.values()), timeout=30)
    assert not alive
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("stopped by ")]
    assert "resume=auto" in line
    assert newest_step(run_dir) == max(row["step"] for row in rows(run_dir))
    assert "stopped by" in (run_dir / "logs" / "rank1.log").read_text()


def test_slurms_warning_to_every_process(folder: Path) -> None:
    """The commands above the ranks ignore SIGUSR1 from their start (`trap '' USR1`)."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    process = launch(SCRIPT, *LONG, "name=slurm", "train.checkpoint_every=0", "data.workers=1", cwd=folder)
    signal.signal(signal.SIGUSR1, before)
    reach(process, folder / "runs" / "slurm", 3)
    command = psutil.Process(process.pid)
    for each in (command, *command.children(recursive=True)):
        each.send_signal(signal.SIGUSR1)
    status, output = finish(process, seconds=60)
    assert status == 0, output
    assert "stopped by SIGUSR1" in output
    assert newest_step(folder / "runs" / "slurm") == max(row["step"] for row in rows(folder / "runs" / "slurm"))


# --- disks -----------------------------------------------------------------------------------------------------------


def limit_files(process: psutil.Process, disk: Path) -> None:
    """Let no file grow beyond 16 KiB, which fits the rows of metrics.jsonl but no checkpoint."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2**14, 2**14))


def fill(process: psutil.Process, disk: Path) -> None:
    """Fill all but 100 kB of the disk."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(b"\0" * (free - 100_000))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=30)


def after_a_full_disk(folder: Path, disk: Path, name: str, spoil) -> None:  # type: ignore[no-untyped-def]
    run_dir = disk / name
    process = alone(*LONG, f"name={name}", f"run_dir={run_dir}", cwd=folder)
    reach(process, run_dir, 5)
    spoil(process, disk)
    status, output = finish(process, seconds=90)
    error = the_error(output)
    assert status == 2, output
    assert str(run_dir) in error
    assert "free some space" in error
    assert newest_step(run_dir) >= 4
    assert not (run_dir / "checkpoints" / PART).exists()


def test_a_file_that_cannot_grow(folder: Path, tmp_path: Path) -> None:
    after_a_full_disk(folder, tmp_path, "limited", limit_files)


def test_a_full_disk(folder: Path, small_disk: Path) -> None:
    after_a_full_disk(folder, small_disk, "full", fill)


# --- data ------------------------------------------------------------------------------------------------------------


def test_a_shard_that_disappears(folder: Path, digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "data" / "digits")
    process = launch(SCRIPT, *LONG, "name=lost", cwd=tmp_path)
    reach(process, tmp_path / "runs" / "lost", 5)
    for shard in (tmp_path / "data" / "digits").glob("*train*.tar"):
        shard.unlink()
    status, output = finish(process, seconds=90)
    assert status == 2, output
    assert re.search(r"train-\d{6}.tar: cannot be read \(No such file or directory\)", the_error(output))
    assert newest_step(tmp_path / "runs" / "lost") >= 4


def test_numbers_that_are_none_name_their_images(folder: Path) -> None:
    wild = ("optimizer=sgd", "optimizer.lr=1e30", "train.clip_grad=0", "schedule.warmup_epochs=0", "name=wild")
    status, output = finish(launch(SCRIPT, *LONG, *wild, cwd=folder))
    assert status == 2, output
    error = the_error(output)
    assert "nan_batch.json" in error
    assert "optimizer.lr" in error
    record = json.loads((folder / "runs" / "wild" / "nan_batch.json").read_text())
    keys = [key for rank in record["ranks"] for micro_batch in rank["keys"] for key in micro_batch]
    assert len(set(keys)) == len(keys) == 64, "the global batch"
    assert f"step {record['step']}:" in error


# --- a rank without progress ---------------------------------------------------------------------------------


def test_a_stopped_rank_ends_the_run(folder: Path) -> None:
    process = launch(SCRIPT, *LONG, "name=stopped", "deepspeed.timeout_minutes=0.2", cwd=folder)
    reach(process, folder / "runs" / "stopped", 5)
    ranks(process, SCRIPT)[1].suspend()
    since = time.monotonic()
    status, output = finish(process, seconds=90)
    assert status != 0
    assert time.monotonic() - since < 75, "12 s of patience, 5 s for others to speak, 30 s of the launcher"
    error = the_error(output)
    assert "rank 0 waits for another rank" in error
    assert "resume=auto" in error
    assert newest_step(folder / "runs" / "stopped") >= 4


def test_a_loader_that_hangs_ends_the_run(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that prints shards stops responding, like a lost network disk."""
    silent, program = tmp_path / "silent", tmp_path / "shard.sh"
    program.write_text(f'#!/bin/sh\nif test -e {silent}; then exec sleep 100; fi\nexec cat {digits}/"$1"\n')
    program.chmod(0o700)
    monkeypatch.setenv("CERTIZOO_PIPES", str(program))
    root = f"data.root='pipe:{program} {{shard}}'"
    process = alone(*LONG, root, "name=hung", "deepspeed.timeout_minutes=0.2", cwd=tmp_path)
    reach(process, tmp_path / "runs" / "hung", 5)
    silent.touch()
    status, output = finish(process, seconds=60)
    assert status == 1
    error = the_error(output)
    assert "rank 0 is stuck at certizoo/shards/" in error
    assert "/shards/" in (tmp_path / "runs" / "hung" / "logs" / "rank0.log").read_text(), "all stacks are in the log"
