"""DeepSpeed's launcher processes above this rank, and how the neighbouring ranks ended."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from certizoo.processes import ending
from trainers import ranks


@cache
def launchers() -> tuple[psutil.Process, ...]:
    """Return the processes `deepspeed.launcher.launch` and, above it, the `deepspeed` command.

    A rank asks at its start and keeps the answer: once they have ended, nothing shows that they existed.
    """
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        for process in psutil.Process().parents()[:2]:
            if not any("deepspeed" in word for word in process.cmdline()[:4]):
                break
            found.append(process)
    return tuple(found)


def ended(process: psutil.Process) -> bool:
    """Return True if the process has ended, even if its parent has not waited for it (a zombie)."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def killed() -> list[str]:
    """Describe each rank of this machine that a signal ended: "rank 1 was killed (SIGKILL): out of memory?".

    The kernel knows this until the launcher reaps the process, which happens once a second.
    """
    try:
        children = sorted(launchers()[0].children() if launchers() else [], key=psutil.Process.create_time)
        first = ranks.rank() - ranks.local_rank()
        found = [(first + local, _signal(child)) for local, child in enumerate(children)]
    except (psutil.Error, OSError):
        return []
    return [f"rank {rank} was {ending(-number)}" for rank, number in found if number]


def _signal(process: psutil.Process) -> int:
    """Return the number of the signal that ended it; 0 if it lives or exited by itself (proc(5), field 52)."""
    if process.status() != psutil.STATUS_ZOMBIE:
        return 0
    return os.WTERMSIG(int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[-1]))
