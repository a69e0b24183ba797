"""How the other ranks of this machine ended, where the kernel still knows: the launcher looks once a second."""

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from certizoo.processes import ending
from trainers import ranks


def endings(launchers: list[psutil.Process]) -> list[str]:
    """For each rank that a signal has ended and nobody has waited for: "rank 1 was killed (SIGKILL): ..." """
    try:
        children = sorted(launchers[0].children() if launchers else [], key=psutil.Process.create_time)
        first = ranks.rank() - ranks.local_rank()
        found = [(first + local, _signal(child.pid)) for local, child in enumerate(children)]
    except (psutil.Error, OSError):
        return []
    return [f"rank {rank} was {ending(-number)}" for rank, number in found if number]


def _signal(pid: int) -> int:
    """The number of the one that ended the process, 0 where it lives or ended by itself (proc(5), field 52)."""
    if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        return 0
    return os.WTERMSIG(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1]))
