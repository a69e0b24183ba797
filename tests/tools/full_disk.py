"""A disk that is full from a chosen moment on, without root, for any writer (Python, C++, Rust, SQLite).

The kernel lets no file of a process grow beyond RLIMIT_FSIZE. It reports EFBIG instead of ENOSPC; both are an OSError
of a write. The complete test of a command that writes below `folder`:

    for after in count():
        with full_disk(folder, after) as disk:
            run()                      # raises, as long as disk.full
        if not disk.full:
            break                      # every moment has been tried
        ...                            # files must now be whole, and a start without a fault continues
"""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

EVENTS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir"}  # audit events at which a disk may become full


@dataclass
class Disk:
    """A disk that becomes full at moment number `after` (0 is the first).

    `seen` lists the moments so far, each an event and a path.
    """

    folder: Path
    after: int
    room: int
    seen: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.seen) > self.after


@contextmanager
def full_disk(folder: Path, after: int, room: int = 0) -> Iterator[Disk]:
    """Let no file of this process grow beyond `room` bytes within the block, from the moment number `after` on.

    A moment is an opening (also to read), renaming, linking or removal of a file below `folder`, or a new folder there.
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
    """Let no file of the running process `pid` grow beyond `room` bytes from now on.

    A Python process gets an OSError. Any other is ended by SIGXFSZ, unless it ignores that, as children of Python do.
    """
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
sys.addaudithook(_look)  # an audit hook cannot be removed; this one acts only while a block is open
