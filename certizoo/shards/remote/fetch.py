"""Remote shards: fetched, checked against the manifest, then read as files.

Without a cache only the needed blocks of a shard are fetched, if the manifest lists blocks and the source sends parts
of files. The manifest must lie beside the shards. It states which exist and what each must contain, without a listing
(web servers and commands have none) and without reading the whole set first.
"""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import UnsupportedOperation
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TypeVar

from certizoo import UserError
from certizoo.shards.format import manifest
from certizoo.shards.format.config import PIPE, PLAIN, DataConfig, is_remote
from certizoo.shards.format.manifest import BLOCK, Block, Manifest, ShardInfo, sha256_between
from certizoo.shards.remote.cache import Cache
from certizoo.shards.remote.pipe import CommandError, Pipe
from certizoo.shards.remote.store import Store

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

    def chunks(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Iterate over the file's bytes from `begin` to `end`.

        Raises FileNotFoundError or PermissionError if asking again is useless, UnsupportedOperation if the source sends
        whole files only.
        """

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

    def open(self, mode: Literal["rb"], first: int = 0, last: int | None = None) -> BinaryIO:
        """Open the complete shard as a file, from the cache or a temporary one that is deleted on close.

        Without a cache the file may hold samples first..last alone, at their places.
        """
        if self.cache is not None:
            holds = self._holds if self.each_time and self.info.sha256 else None
            return self.cache.open(f"{self.name}.{self._content}", self.info.bytes, self._fill, holds)
        blocks = self.info.blocks[first // BLOCK : None if last is None else last // BLOCK + 1]
        if len(blocks) < len(self.info.blocks):
            with suppress(UnsupportedOperation):
                return self._temporary(blocks)
        return self._temporary(())

    def _temporary(self, blocks: Sequence[Block]) -> BinaryIO:
        """Return a temporary file with these blocks, at their places; the whole shard if there are none."""
        begin, end = (blocks[0].begin, blocks[-1].end) if blocks else (0, self.info.bytes)
        file = tempfile.TemporaryFile()  # noqa: SIM115  (the caller's)
        try:
            os.posix_fallocate(file.fileno(), begin, end - begin)
        except OSError as error:
            raise UserError(
                f"no space for {(end - begin) / 1e6:.0f} MB in {tempfile.gettempdir()} ({error.strerror}); "
                "set TMPDIR to a larger disk, or data.cache"
            ) from None
        if blocks:
            tried(lambda: self._download_part(file, blocks), str(self))
        else:
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
        digest = self._received(file, self.source.chunks(self.name), self.info.bytes)
        if self.hashed and self.info.sha256 and digest != self.info.sha256:
            raise OSError("its sha256 is not the one in the manifest")

    def _download_part(self, file: BinaryIO, blocks: Sequence[Block]) -> None:
        begin, end = blocks[0].begin, blocks[-1].end
        file.seek(begin)
        self._received(file, self.source.chunks(self.name, begin, end), end - begin)
        for block in blocks if self.hashed else ():
            if sha256_between(file, block.begin, block.end) != block.sha256:
                raise OSError(f"the sha256 of bytes {block.begin} to {block.end} is not the one in the manifest")

    def _received(self, file: BinaryIO, chunks: Iterator[bytes], size: int) -> str:
        """Write the chunks, `size` bytes together, and return their sha256."""
        seen, digest = 0, hashlib.sha256()
        for chunk in chunks:
            seen += len(chunk)
            if seen > size:
                raise UserError(f"{self} holds more than the {size} bytes of the manifest; {MEND}")
            digest.update(chunk)
            self._write(file, chunk)
        if seen < size:
            raise OSError(f"ended after {seen} of {size} bytes")
        return digest.hexdigest()

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
        except (UserError, UnsupportedOperation):
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
