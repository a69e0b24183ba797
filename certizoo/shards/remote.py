"""Remote shards: fetched whole, checked against the manifest, then read as files.

The manifest must lie beside them. It states which shards exist and what each must contain, without a listing (web
servers and commands have none) and without reading the whole set first.
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
from certizoo.shards import manifest
from certizoo.shards.cache import Cache
from certizoo.shards.config import PIPE, PLAIN, DataConfig, is_remote
from certizoo.shards.manifest import Manifest, ShardInfo
from certizoo.shards.pipe import CommandError, Pipe
from certizoo.shards.store import Store

log = logging.getLogger(__name__)
T = TypeVar("T")
PAUSES = (1, 5)  # seconds before the second and the third attempt
MAX_MANIFEST_BYTES = 64 * 2**20
MEND = "check that the server is up and the file complete, or copy it there again"


class Absent(UserError):
    """The source states that it has no such file."""


class Source(Protocol):
    """A folder on another machine."""

    def where(self, name: str) -> str:
        """Return the file's name for messages."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """Iterate over the file's bytes; FileNotFoundError or PermissionError if asking again is useless."""

    def sizes(self, names: Sequence[str]) -> dict[str, int | None] | None:
        """Return the sizes (None: unknown) of those files that exist; None if the source cannot be asked."""


def source_of(config: DataConfig) -> Source | None:
    """Return the source; None for a folder of this machine without a cache."""
    if is_remote(config.root):
        return (Pipe if config.root.startswith(PIPE) else Store)(config.root, config.timeout)
    if config.cache:
        return Store(f"file://{config.folder.absolute()}", config.timeout)
    return None


@dataclass(frozen=True)
class RemoteShard:
    """One shard and its manifest entry.

    `hashed` checks the sha256 on arrival, `each_time` at each opening in the cache.
    """

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
        """Open the complete shard as a file, from the cache or a temporary one that is deleted on close."""
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
        """Return a text that distinguishes shards of the same name."""
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
    """Call `act()`, again after a pause if it fails as networks do. Raises a one-line `UserError`."""
    for pause in (*PAUSES, None):
        try:
            return act()
        except UserError:
            raise
        except Exception as error:  # every library has its own exceptions
            reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}".strip()
            final = isinstance(error, FileNotFoundError | PermissionError)
            if pause is None or final:
                absent = final or isinstance(error, CommandError)
                raise (Absent if absent else UserError)(f"{where}: {reason}; {MEND}") from None
            log.warning("%s: %s; again in %d s", where, reason, pause)
            time.sleep(pause)
    raise AssertionError  # the last round returns or raises


def read_manifest(source: Source, name: str) -> Manifest:
    """Read `{name}.json` or else `manifest.json`. Raises `UserError` if neither can be read or it is malformed."""
    failures = []
    for file in (f"{name}.json", manifest.GENERAL):
        try:
            content = tried(lambda file=file: _small(source, file), source.where(file))  # type: ignore[misc]
        except Absent as error:
            failures.append(str(error).rpartition("; ")[0])
            continue
        where = source.where(file)
        listing = manifest.parse(content, where, general=file == manifest.GENERAL, fix=_fix(where))
        for listed in listing.files:
            if not PLAIN.fullmatch(listed):
                raise UserError(f"{where} names {listed!r}, which is not a plain file name; {listing.fix}")
        return listing
    raise UserError(
        f"no manifest ({'; '.join(failures)}); check data.root, or run `certizoo shards index FOLDER` "
        "where the shards are files and copy the manifest beside them"
    )


def _small(source: Source, file: str) -> bytes:
    content = bytearray()
    for chunk in source.chunks(file):
        content += chunk
        if len(content) > MAX_MANIFEST_BYTES:
            raise UserError(f"{source.where(file)} is larger than {MAX_MANIFEST_BYTES} bytes; is it a manifest?")
    return bytes(content)


def _fix(where: str) -> str:
    return f"copy the shards there again, or repair {where}: `certizoo shards index FOLDER` where they are files"


def check(names: Sequence[str], source: Source, listing: Manifest, config: DataConfig) -> list[RemoteShard]:
    """Return the shards, checked as far as possible before they are fetched. Raises `UserError`."""
    cache = Cache(Path(config.cache), int(config.cache_gb * 1e9)) if config.cache else None
    infos = [manifest.expected(name, source.where(name), listing) for name in names]
    sizes = tried(lambda: source.sizes(names), source.where(""))
    for info in infos:
        where = source.where(info.file)
        if sizes is not None and sizes.get(info.file, 0) is not None:  # it is known, or absent
            manifest.hold(where, sizes.get(info.file), info, listing)
        if cache is not None and info.bytes > cache.limit:
            raise UserError(f"{where} is larger than data.cache_gb={config.cache_gb}; use more")
    return [RemoteShard(source, info, config.verify != "size", cache, config.verify == "sha256") for info in infos]
