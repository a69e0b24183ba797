"""Shards that are not files of this machine: fetched whole, held against the manifest, then read as files.

The manifest must lie beside them: it says which shards there are, what they hold and what each must be, without
a listing (web servers and commands have none) and without reading the set once before it is used.
"""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TypeVar

from certizoo import UserError
from shards import manifest
from shards.cache import Cache
from shards.config import PIPE, PLAIN, DataConfig, is_remote
from shards.manifest import Manifest, ShardInfo
from shards.pipe import CommandError, Pipe
from shards.store import Store

log = logging.getLogger(__name__)
T = TypeVar("T")
PAUSES = (1, 5)  # seconds before the second and the third attempt
MAX_MANIFEST_BYTES = 64 * 2**20
MEND = "see that the server is up and the file whole, or copy it there again"


class Absent(UserError):
    """The place says that it has no such file."""


class Source(Protocol):
    """A folder somewhere else."""

    def where(self, name: str) -> str:
        """How people call the file."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """Its bytes, in order; FileNotFoundError or PermissionError where asking again is useless."""

    def sizes(self, names: Sequence[str]) -> dict[str, int | None] | None:
        """Bytes (None: not said) of those of the files that are there; None if the place cannot be asked."""


def source_of(config: DataConfig) -> Source | None:
    """None for a folder of this machine, which a cache makes a place like any other."""
    if is_remote(config.root):
        return (Pipe if config.root.startswith(PIPE) else Store)(config.root, config.timeout)
    if config.cache:
        return Store(f"file://{config.folder.absolute()}", config.timeout)
    return None


@dataclass(frozen=True)
class RemoteShard:
    """One shard, and what the manifest says of it. Its sha256 is taken when it comes if `hashed`, and each time that it
    is opened in the cache if `each_time`."""

    source: Source
    info: ShardInfo
    hashed: bool
    cache: Cache | None
    each_time: bool = False

    def __str__(self) -> str:
        return self.source.where(self.name)

    @property
    def name(self) -> str:
        return self.info.file

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """The whole shard as a file, from the cache or a nameless one that is gone with its reader."""
        if self.cache is not None:
            holds = self._holds if self.each_time and self.info.sha256 else None
            return self.cache.open(f"{self.name}.{self._content}", self.info.bytes, self._fill, holds)
        file = tempfile.TemporaryFile()  # noqa: SIM115  (the caller's)
        try:
            os.posix_fallocate(file.fileno(), 0, self.info.bytes)
        except OSError as error:
            raise UserError(
                f"no space for {self.info.bytes / 1e6:.0f} MB in {tempfile.gettempdir()} ({error.strerror}); "
                "set TMPDIR to a larger disk, or data.cache"
            ) from None
        self._fill(file)
        file.seek(0)
        return file

    def _holds(self, file: BinaryIO) -> bool:
        return hashlib.file_digest(file, "sha256").hexdigest() == self.info.sha256  # type: ignore[arg-type]

    @property
    def _content(self) -> str:
        """Tells apart shards of the same name."""
        known = self.info.sha256 or f"{self} {self.info.bytes}"
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    def _fill(self, file: BinaryIO) -> None:
        tried(lambda: self._download(file), str(self))

    def _download(self, file: BinaryIO) -> None:
        file.seek(0)
        seen, digest = 0, hashlib.sha256()
        for chunk in self.source.chunks(self.name):
            seen += len(chunk)
            if seen > self.info.bytes:
                raise UserError(f"{self} holds more than the {self.info.bytes} bytes of the manifest; {MEND}")
            digest.update(chunk)
            self._write(file, chunk)
        if seen < self.info.bytes:
            raise OSError(f"ended after {seen} of {self.info.bytes} bytes")
        if self.hashed and self.info.sha256 and digest.hexdigest() != self.info.sha256:
            raise OSError("its sha256 is not the one in the manifest")

    def _write(self, file: BinaryIO, chunk: bytes) -> None:
        try:
            file.write(chunk)
            file.flush()
        except OSError as error:
            raise UserError(
                f"{self} cannot be kept here ({error.strerror}); free space in data.cache or TMPDIR"
            ) from None


def tried(act: Callable[[], T], where: str) -> T:
    """`act()`, again after a pause where it fails as networks do. Raises `UserError`, of one line."""
    for pause in (*PAUSES, None):
        try:
            return act()
        except UserError:
            raise
        except Exception as error:  # every library has its own
            reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}".strip()
            final = isinstance(error, FileNotFoundError | PermissionError)
            if pause is None or final:
                absent = final or isinstance(error, CommandError)
                raise (Absent if absent else UserError)(f"{where}: {reason}; {MEND}") from None
            log.warning("%s: %s; again in %d s", where, reason, pause)
            time.sleep(pause)
    raise AssertionError  # the last round returns or raises


def read_manifest(source: Source, name: str) -> Manifest:
    """`{name}.json` or else `manifest.json`. Raises `UserError` if neither can be read or it is malformed."""
    failures = []
    for file in (f"{name}.json", manifest.GENERAL):
        try:
            content = tried(lambda file=file: _small(source, file), source.where(file))  # type: ignore[misc]
        except Absent as error:
            failures.append(str(error).rpartition("; ")[0])
            continue
        where = source.where(file)
        listing = manifest.parse(content, where, general=file == manifest.GENERAL, mend=_mend(where))
        for listed in listing.files:
            if not PLAIN.fullmatch(listed):
                raise UserError(f"{where} names {listed!r}, which is not a plain file name; {listing.mend}")
        return listing
    raise UserError(
        f"no manifest ({'; '.join(failures)}); see that data.root is right, or run `python -m shards index FOLDER` "
        "where the shards are files and copy the manifest beside them"
    )


def _small(source: Source, file: str) -> bytes:
    content = bytearray()
    for chunk in source.chunks(file):
        content += chunk
        if len(content) > MAX_MANIFEST_BYTES:
            raise UserError(f"{source.where(file)} is larger than {MAX_MANIFEST_BYTES} bytes; is it a manifest?")
    return bytes(content)


def _mend(where: str) -> str:
    return f"copy the shards there again, or mend {where}: `python -m shards index FOLDER` where they are files"


def check(names: Sequence[str], source: Source, listing: Manifest, config: DataConfig) -> list[RemoteShard]:
    """The shards, as far as they can be held against the manifest before they come. Raises `UserError`."""
    cache = Cache(Path(config.cache).expanduser(), int(config.cache_gb * 1e9)) if config.cache else None
    infos = [manifest.expected(name, source.where(name), listing) for name in names]
    sizes = tried(lambda: source.sizes(names), source.where(""))
    for info in infos:
        where = source.where(info.file)
        if sizes is not None and sizes.get(info.file, 0) is not None:  # it is known, or absent
            manifest.hold(where, sizes.get(info.file), info, listing)
        if cache is not None and info.bytes > cache.limit:
            raise UserError(f"{where} is larger than data.cache_gb={config.cache_gb}; use more")
    return [RemoteShard(source, info, config.verify != "size", cache, config.verify == "sha256") for info in infos]
