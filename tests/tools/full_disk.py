"""A disk that is full from a chosen moment on: without root, for whatever writes (Python, C++, Rust, SQLite).

The kernel refuses to let any file of a process grow beyond RLIMIT_FSIZE. It says so as EFBIG instead of ENOSPC; to our
code both are an OSError of a write. Whole test of a command that writes below `folder`:

    for after in count():
        with full_disk(folder, after) as disk:
            run()                      # raises, as long as disk.full
        if not disk.full:
            break                      # every moment had its turn
        ...                            # what is there now must be whole, and a start without a fault goes on
"""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

EVENTS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir"}  # of Python; at each a disk may become full


@dataclass
class Disk:
    """`seen`: the moments so far, each an event and a path; full from the moment number `after` on (0 is the first)."""

    folder: Path
    after: int
    room: int
    seen: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.seen) > self.after


@contextmanager
def full_disk(folder: Path, after: int, room: int = 0) -> Iterator[Disk]:
    """Within the block no file of this process grows beyond `room` bytes, from the moment number `after` on: the
    after-th time that it opens (to read, too), renames, links, removes a file below `folder`, or makes a folder there.

    Other processes have disks of their own: `fill(pid)`.
    """
    disk = Disk(folder.resolve(), after, room)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    _watched.append(disk)
    try:
        yield disk
    finally:
        _watched.remove(disk)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fill(pid: int, room: int = 0) -> None:
    """From now on no file of the running process `pid` grows beyond `room` bytes. A Python process gets an OSError; any
    other is ended by SIGXFSZ, unless it ignores that, as children of Python do."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, hard))


def _look(event: str, arguments: tuple[object, ...]) -> None:
    if not _watched or event not in EVENTS or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    path = Path(os.path.abspath(os.fsdecode(arguments[0])))
    for disk in _watched:
        if path.is_relative_to(disk.folder):
            disk.seen.append(f"{event} {path.relative_to(disk.folder)}")
            if disk.full:
                fill(os.getpid(), disk.room)


_watched: list[Disk] = []
sys.addaudithook(_look)  # there is no way to remove one: it looks only while a block is open
