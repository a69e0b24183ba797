"""Locks for one writer at a time on a folder or a file, released whenever the process ends.

The lock is a POSIX record lock of the kernel. It ends with the process that took it, is not inherited by forked
processes (workers that outlive a killed parent hold nothing), and works on NFS. The kernel identifies it by process, so
two writers within one process are kept apart here. Windows, which has no record locks, gets those of `filelock`.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from certizoo.errors import UserError
from certizoo.files import no_link

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK, HOLDER = ".lock", ".lock.holder"
PATIENCE = 0.05  # seconds
_HERE: dict[Path, threading.Lock] = {}
_GUARD = threading.Lock()


def _forget() -> None:
    """Drop the locks in a forked process: they belong to the parent, whichever of its threads held them."""
    global _GUARD
    _HERE.clear()
    _GUARD = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def sole_writer(folder: Path, what: str, fix: str) -> Iterator[None]:
    """Hold `folder` (created if absent) as the only writer of `what` in it.

    Raises UserError at once if another process, or this one, holds it; `fix` states what else the user can do.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{folder} is no folder, or lies below a file; {fix}") from None
    with locked(folder / LOCK, wait=False) as free:
        if not free:
            raise UserError(f"{folder}: another process writes {what} here ({_holder(folder)}); wait for it, or {fix}")
        _say(folder, f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
        try:
            yield
        finally:
            _say(folder, "")


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of the file `path`, which is created and stays; yield False at once if it is taken and not `wait`.

    Raises UserError on a file system without locks: two writers would corrupt each other's files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _GUARD:
        own = _HERE.setdefault(path.resolve(), threading.Lock())
    if not own.acquire(blocking=wait):
        yield False
        return
    try:
        if fcntl is None:
            with _by_filelock(path, wait) as free:
                yield free
            return
        # Closing any handle of the file would release the lock: there is one, and nobody reads the file elsewhere.
        with _opened(path) as file:
            yield _taken(file.fileno(), path, wait)
    finally:
        own.release()


@contextmanager
def _by_filelock(path: Path, wait: bool) -> Iterator[bool]:
    lock = FileLock(path, blocking=wait)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


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
        except (BlockingIOError, PermissionError):  # POSIX allows both: another process holds it
            return False
        except OSError as error:
            if error.errno != errno.EDEADLK:
                raise UserError(
                    f"{path.parent} has no file locks ({error.strerror}); mount it with them (Lustre: -o flock), or "
                    "write to another file system"
                ) from None
            time.sleep(PATIENCE)  # the kernel assumed a deadlock between threads of two processes, each with a lock


def _say(folder: Path, text: str) -> None:
    """Write a note for the message that others get; the lock is the kernel's, so a failed or stale note is harmless."""
    with suppress(OSError), open(folder / HOLDER, "w", opener=no_link) as file:
        file.write(text)


def _holder(folder: Path) -> str:
    with suppress(OSError, UnicodeDecodeError), (folder / HOLDER).open() as file:
        return file.read(200) or "unknown"
    return "unknown"
