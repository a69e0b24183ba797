"""One writer at a time for a folder or a file, whatever kills him.

The lock is a POSIX record lock of the kernel: it ends with the process that took it, is not inherited by the processes
which that one forks (workers that outlive a killed parent keep nothing), and holds on NFS. The kernel knows it by the
process, so that two writers within one process are kept apart here.
"""

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from certizoo.errors import UserError
from certizoo.files import no_link

LOCK, HOLDER = ".lock", ".lock.holder"
PATIENCE = 0.05  # seconds
_HERE: dict[Path, threading.Lock] = {}
_GUARD = threading.Lock()


def _forget() -> None:
    """In a process that was forked: the locks stay with the one that took them, whichever of its threads held them."""
    global _GUARD
    _HERE.clear()
    _GUARD = threading.Lock()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def sole_writer(folder: Path, what: str, mend: str) -> Iterator[None]:
    """Hold `folder` (made if absent) as the only writer of `what` in it.

    Raises UserError at once where another process, or this one, has it; `mend` says what else the person can do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, wait=False) as free:
        if not free:
            raise UserError(f"{folder}: somebody else writes {what} here ({_holder(folder)}); wait for it, or {mend}")
        _say(folder, f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
        try:
            yield
        finally:
            _say(folder, "")


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of the file `path`, which is made and stays; False at once if another has it and we do not wait.

    Raises UserError on a file system without locks: two writers would spoil what both write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _GUARD:
        own = _HERE.setdefault(path.resolve(), threading.Lock())
    if not own.acquire(blocking=wait):
        yield False
        return
    try:
        # To close any handle of the file would give the lock back: there is one, and nobody reads the file elsewhere.
        with _opened(path) as file:
            yield _taken(file.fileno(), path, wait)
    finally:
        own.release()


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "ab", opener=no_link)
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}); remove it, or write to another folder") from None


def _taken(handle: int, path: Path, wait: bool) -> bool:
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        except (BlockingIOError, PermissionError):  # both are POSIX for: another has it
            return False
        except OSError as error:
            if error.errno != errno.EDEADLK:
                raise UserError(
                    f"{path.parent} has no file locks ({error.strerror}); mount it with them (Lustre: -o flock), or "
                    "write to another file system"
                ) from None
            time.sleep(PATIENCE)  # the kernel took threads of two processes, each with a lock, for a deadlock of those


def _say(folder: Path, text: str) -> None:
    """For the message that others get; the lock is the kernel's, so that a full disk or a stale note do no harm."""
    with suppress(OSError), open(folder / HOLDER, "w", opener=no_link) as file:
        file.write(text)


def _holder(folder: Path) -> str:
    with suppress(OSError, UnicodeDecodeError), (folder / HOLDER).open() as file:
        return file.read(200) or "unknown"
    return "unknown"
