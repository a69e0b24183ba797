"""The batch file under a real Slurm of one node: a warned job is queued again and ends as if nothing had happened."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from certizoo.ports import free_port
from tests.tools.launching import ROOT, TINY, environment, rows

DAEMONS = ("slurmctld", "slurmd")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, DAEMONS)), reason="needs slurmctld and slurmd (slurm-wlm)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs jobs as their users, which needs root"),
]

RUN = (*TINY, "train.epochs=4", "train.log_every=1", "train.eval_images=64", "name=started")
STEPS = 92
ROOM = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10")
CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a cluster of this machine alone; return the environment of its users."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    names = {"host": socket.gethostname(), "control": free_port(), "node": free_port(), "folder": folder}
    conf.write_text(CONF.format(**names))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    users = environment() | {"SLURM_CONF": str(conf), "PATH": path, "PYTHONPATH": str(ROOT)}
    started = []
    try:
        for daemon in DAEMONS:
            with (folder / f"{daemon}.log").open("w") as log:
                started.append(subprocess.Popen([daemon, "-D"], env=users, stdout=log, stderr=log))
        until(lambda: said(users, "sinfo", "--noheader", "--format=%t").strip() == "idle", 60)
        yield users
    finally:
        for process in started:
            process.terminate()
            process.wait(30)


def said(users: dict[str, str], *command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, env=users, cwd=cwd, text=True, capture_output=True, timeout=60).stdout


def until(reached: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"not reached in {seconds} s"
        time.sleep(0.5)


def fields(users: dict[str, str], job: str) -> dict[str, str]:
    """Return what Slurm says of a job, by name."""
    return dict(re.findall(r"(\w+)=(\S*)", said(users, "scontrol", "show", "job", job)))


@pytest.mark.parametrize("warning", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warned_job_is_queued_again_until_the_training_is_done(
    warning: signal.Signals, slurm: dict[str, str], digits: Path, tmp_path: Path
) -> None:
    """Slurm sends SIGUSR1 before a job's time ends, and SIGTERM to a preempted one."""
    (tmp_path / "trainers").symlink_to(ROOT / "trainers")
    batch = str(ROOT / "cluster" / "slurm.sbatch")
    command = ("sbatch", "--parsable", *ROOM, batch, *RUN, f"data.root={digits}")
    job = said(slurm, *command, cwd=tmp_path).strip()

    def steps() -> list[float]:
        return [row["step"] for row in rows(tmp_path / "runs" / "started") if "loss" in row]

    until(lambda: len(steps()) >= 5, 240)
    said(slurm, "scancel", f"--signal={warning.name.removeprefix('SIG')}", "--batch", job)
    until(lambda: fields(slurm, job)["JobState"] == "PENDING", 120)
    assert len(steps()) < STEPS
    said(slurm, "scontrol", "update", f"jobid={job}", "starttime=now")  # else it waits for two minutes
    until(lambda: fields(slurm, job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), 240)
    found = fields(slurm, job)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), output
    assert steps() == [*range(1, STEPS + 1)]
