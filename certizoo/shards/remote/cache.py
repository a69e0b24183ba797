"""A size-limited folder of shards on the local disk, shared by all processes of a machine.

A shard is written under a temporary name and renamed once it is complete and verified. The process that fetches it
holds its lock, so that it is fetched once. Only names that end in SUFFIX are ever removed, the least recently opened
first; a process that still reads a removed file keeps it until it closes it. A file in the cache has the right size.
Later changes are detected only if its sha256 is computed at each opening (`data.verify=sha256`), which is required if
others may write to the folder.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from certizoo import UserError
from certizoo.files import whole_file
from certizoo.locks import locked

log = logging.getLogger(__name__)
SUFFIX = ".cached"
PART = ".part"  # the suffix that `whole_file` adds


@dataclass(frozen=True)
class Cache:
    """A cache in `folder` (created if absent) of at most `limit` bytes, unless a single shard is larger."""

    folder: Path
    limit: int

    def open(
        self, name: str, size: int, fill: Callable[[BinaryIO], None], holds: Callable[[BinaryIO], bool] | None = None
    ) -> BinaryIO:
        """Open the file `name` of `size` bytes, after `fill` has written it if it is absent and `holds` accepts it.

        Raises `UserError`, also if others may write to the folder and `holds` is None.
        """
        path = self.folder / (name + SUFFIX)
        try:
            self._lock(path.name).parent.mkdir(parents=True, exist_ok=True)
            if holds is None:
                self._refuse_other_writers()
            if (file := _opened(path, size, holds)) is not None:
                return file
            with locked(self._lock(path.name)):
                return _opened(path, size, holds) or self._filled(path, size, fill)
        except OSError as error:
            raise UserError(
                f"data.cache={self.folder} cannot be used ({error.strerror or error}); choose a folder on a local disk"
            ) from None

    def _refuse_other_writers(self) -> None:
        for folder in (self.folder, self._lock("")):
            found = folder.stat()
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_uid not in (0, os.getuid()):
                raise UserError(
                    f"others may write into data.cache={self.folder}; `chmod -R go-w` a folder of yours, or check "
                    "every file: data.verify=sha256"
                )

    def _filled(self, path: Path, size: int, fill: Callable[[BinaryIO], None]) -> BinaryIO:
        if os.path.lexists(path):
            log.warning("%s has changed in the cache; fetching it again", path)
        with ExitStack() as room, whole_file(path) as part:
            file = self._reserved(part, size)
            try:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
            except BaseException:
                file.close()
                raise
            # Before it has its own name, a process that sums up the files would see it under neither name.
            room.enter_context(locked(self._lock("room")))
        return file

    def _reserved(self, part: Path, size: int) -> BinaryIO:
        """Create a file with `size` bytes allocated on disk, so that other processes count them at once."""
        with locked(self._lock("room")):
            self._drop_abandoned()
            while self._used() + size > self.limit and self._evict():
                pass
            part.unlink(missing_ok=True)  # a partial file of a killed process, or a link to one of our files
            file = part.open("x+b")
            while True:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                    return file
                except OSError as error:
                    if self._evict():
                        continue
                    file.close()
                    raise UserError(
                        f"no space for {size / 1e6:.0f} MB in data.cache={self.folder} ({error.strerror}); free "
                        "space, choose another folder, or set data.cache=null to read without a cache"
                    ) from None

    def _used(self) -> int:
        return sum(size for _, size, _ in self._files(""))

    def _evict(self) -> bool:
        """Remove the least recently opened file; return False if there is none."""
        for _, _, path in sorted(self._files(SUFFIX)):
            path.unlink(missing_ok=True)
            return True
        return False

    def _drop_abandoned(self) -> None:
        """Remove partial files of killed processes: nobody holds their lock."""
        for _, _, part in self._files(SUFFIX + PART):
            with locked(self._lock(part.name.removesuffix(PART)), wait=False) as free:
                if free:
                    part.unlink(missing_ok=True)

    def _files(self, ending: str) -> Iterator[tuple[float, int, Path]]:
        """Iterate over (last use, bytes, path) of this cache's complete or partial files with this ending."""
        for path in self.folder.iterdir():
            if path.name.endswith((SUFFIX, SUFFIX + PART)) and path.name.endswith(ending):
                with suppress(FileNotFoundError):
                    found = path.lstat()
                    yield found.st_mtime, found.st_size, path

    def _lock(self, name: str) -> Path:
        return self.folder / ".locks" / name


def _opened(path: Path, size: int, holds: Callable[[BinaryIO], bool] | None) -> BinaryIO | None:
    """Open the file if it exists, is not a link and is right; its modification time then records this use."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError:  # absent, or a link
        return None
    found = os.fstat(file.fileno())
    if found.st_size == size and stat.S_ISREG(found.st_mode) and (holds is None or holds(file)):
        file.seek(0)
        with suppress(PermissionError):  # another user's file
            os.utime(file.fileno())
        return file
    file.close()
    return None
