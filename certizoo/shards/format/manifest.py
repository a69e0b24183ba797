"""The manifest of a folder of shards: the expected content of each file.

`{"files": [{"file", "samples", "bytes", "sha256", "classes", "label_histogram", "blocks"}, ...]}`, where `classes` is
the number of labels that occur, and `blocks` has [first byte, sha256] of every BLOCK samples (absent: unknown), so that
a part of a shard can be read and checked. The writer adds `class_names`. `{name}.json` has priority over
`manifest.json`. Every file has a line of its own, and a reader of one split makes sense of its files only: of ImageNet
they are 1,331 histograms.
"""

import fnmatch
import hashlib
import json
import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from certizoo import UserError
from certizoo.files import sha256, write_whole
from certizoo.shards.format.tar import GZIP, OpenShard, SampleError, Shard, as_it_is, opened, unpacked, walk

log = logging.getLogger(__name__)
GENERAL = "manifest.json"
BLOCK = 64  # samples


def fix(path: Path) -> str:
    """Return the advice for shards that differ from the manifest `path`."""
    name = "" if path.name == GENERAL else f" --name {shlex.quote(path.stem)}"
    index = f"certizoo shards index {shlex.quote(str(path.parent))}{name}"
    return f"write the shards again, or run `{index}` if they are right"


class Block(NamedTuple):
    """BLOCK samples of a shard, or those at its end, and the bytes that hold them."""

    begin: int
    end: int
    sha256: str


@dataclass(frozen=True)
class ShardInfo:
    """Properties of one shard; `sha256` or `histogram` is None, and `blocks` empty, if it was not computed."""

    file: str
    samples: int
    bytes: int
    sha256: str | None
    histogram: dict[int, int] | None
    blocks: tuple[Block, ...] = ()

    def as_json(self) -> dict[str, Any]:
        counts = self.histogram or {}
        return {
            "file": self.file,
            "samples": self.samples,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "classes": len(counts),
            "label_histogram": {str(label): counts[label] for label in sorted(counts)},
            **({"blocks": [[block.begin, block.sha256] for block in self.blocks]} if self.blocks else {}),
        }

    @property
    def plausible(self) -> bool:
        """Return False if no shard has these numbers."""
        listed = not self.blocks or len(self.blocks) == -(-self.samples // BLOCK)
        rising = all(0 <= block.begin < block.end for block in self.blocks)
        labelled = not self.histogram or sum(self.histogram.values()) == self.samples
        return min(self.samples, self.bytes) >= 1 and labelled and listed and rising


@dataclass(frozen=True)
class Manifest:
    """A manifest as read from `where`; `general` unless it is of one set. `fix`: the advice for differing shards."""

    where: str
    files: dict[str, ShardInfo]
    class_names: list[str] | None
    general: bool
    fix: str

    def covers(self, paths: Iterable[Path]) -> bool:
        """Return False for a folder's general manifest that lists none of the shards: it is of other sets."""
        return not self.general or any(path.name in self.files for path in paths)


def read(root: Path, name: str, wanted: str = "*") -> Manifest | None:
    """Read the entries of `wanted` files from `{name}.json` or else `manifest.json` of `root`; None without either.

    Raises `UserError` if it is malformed.
    """
    for path in (root / f"{name}.json", root / GENERAL):
        if path.is_file():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror}); {fix(path)}") from None
            return parse(content, str(path), general=path.name == GENERAL, fix=fix(path), wanted=wanted)
    return None


def parse(content: bytes, where: str, *, general: bool, fix: str, wanted: str = "*") -> Manifest:
    """Parse the manifest that `where` holds, as far as it is of `wanted` files (a glob).

    Raises `UserError` if it is malformed.
    """
    try:
        listing = json.loads(content)
        of_file = re.compile(fnmatch.translate(wanted.rpartition("/")[2])).match
        infos = [_info(entry) for entry in listing["files"] if of_file(_file(entry))]
        return Manifest(where, {info.file: info for info in infos}, listing.get("class_names"), general, fix)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{where}: not a manifest of shards ({type(error).__name__}: {error}); {fix}") from None


def _file(entry: dict[str, Any]) -> str:
    file = str(entry["file"])
    if Path(file).name != file or file == "..":
        raise ValueError(f"{file!r} is not a file of its folder")
    return file


def _info(entry: dict[str, Any]) -> ShardInfo:
    histogram = entry.get("label_histogram")
    counts = {int(label): int(count) for label, count in histogram.items()} if histogram else None
    sha256 = str(entry["sha256"]) if entry.get("sha256") else None
    size, listed = int(entry["bytes"]), [(int(begin), str(digest)) for begin, digest in entry.get("blocks") or ()]
    ends = [*(begin for begin, _ in listed[1:]), size]
    blocks = tuple(Block(begin, end, digest) for (begin, digest), end in zip(listed, ends, strict=False))
    return ShardInfo(str(entry["file"]), int(entry["samples"]), size, sha256, counts, blocks)


def save(path: Path, infos: Iterable[ShardInfo], class_names: list[str] | None = None) -> None:
    """Write a manifest atomically: a reader sees the old one or the new one."""
    names = f'"class_names": {json.dumps(class_names)},\n' if class_names else ""
    lines = ",\n".join(json.dumps(info.as_json()) for info in sorted(infos, key=lambda info: info.file))
    try:
        write_whole(path, f'{{{names}"files": [\n{lines}\n]}}\n')
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free space or choose another root") from None


def check(path: Path, manifest: Manifest, *, hashed: bool) -> ShardInfo:
    """Return the manifest's entry of the shard `path`. Raises `UserError` if the file differs from it."""
    info = expected(path.name, str(path), manifest)
    hold(str(path), path.stat().st_size if path.is_file() else None, info, manifest)
    if hashed and info.sha256 and sha256_of(path) != info.sha256:
        raise UserError(f"{path}: its sha256 is not the one in {manifest.where}; {manifest.fix}")
    return info


def expected(name: str, where: str, manifest: Manifest) -> ShardInfo:
    """Return the manifest's entry of the shard `name`, shown as `where`.

    Raises `UserError` if there is no valid one.
    """
    info = manifest.files.get(name)
    if info is None:
        raise UserError(f"{where} is not in {manifest.where}; {manifest.fix}")
    if not info.plausible:
        raise UserError(f"{manifest.where}: the numbers of samples of {name} are inconsistent; {manifest.fix}")
    return info


def hold(where: str, size: int | None, info: ShardInfo, manifest: Manifest) -> None:
    """Raise `UserError` unless the file exists (`size` is not None) with the manifest's size."""
    if size is None:
        raise UserError(f"{where} is missing, but {manifest.where} lists it; {manifest.fix}")
    if size != info.bytes:
        raise UserError(f"{where} holds {size} bytes, {manifest.where} says {info.bytes}; {manifest.fix}")


class Keys:
    """The keys of an index so far. Evaluation refuses two samples of one key; training allows it.

    The shards of a set and split differ in their number alone.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, str]] = {}

    def add(self, shard: str, key: str) -> None:
        """Raise `UserError` for a key that another sample of the set and split has."""
        of_split = re.sub(r"[-_]?[0-9]*\.[a-z.]+$", "", shard)
        if of_split.endswith("train"):
            return
        seen = self._seen.setdefault(of_split, {})
        if key in seen:
            raise UserError(f"two samples have the key {key}, in {seen[key]} and {shard}; give each its own key")
        seen[key] = shard


def scan(
    path: Shard,
    num_classes: int | None = None,
    *,
    lenient: bool = False,
    decoded: bool = False,
    keys: Keys | None = None,
) -> ShardInfo:
    """Count the samples and labels of a shard by walking it; images are decoded only if `decoded`.

    Raises `UserError` for a damaged tar or a key that is among `keys`, and for a faulty sample unless `lenient` (then
    it is logged and counted among the samples, not in the histogram).
    """
    histogram: Counter[int] = Counter()
    samples = 0
    packed = as_it_is(path)
    size = os.fstat(packed.fileno()).st_size
    for entry in walk(path, OpenShard(unpacked(path, packed))):
        samples += 1
        if keys is not None:
            keys.add(path.name, entry.key)
        try:
            label, _ = entry.label(num_classes), entry.extension
            if decoded:
                entry.load(num_classes).decode()
            histogram[label] += 1
        except SampleError as error:
            if not lenient:
                raise
            log.warning("will be skipped: %s", error)
    if not samples:
        raise UserError(f"{path} holds no samples; remove it or write it again")
    return ShardInfo(path.name, samples, size, None, dict(histogram))


def sha256_of(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); copy or write the shard again") from None


def blocks_of(path: Path) -> tuple[Block, ...]:
    """Return the blocks of a shard; none of a compressed one, or with pax headers, which may concern all members."""
    if _begins_with(path, GZIP):
        return ()
    shard, bounds = opened(path), []
    for number, entry in enumerate(walk(path, shard)):
        if any(member.pax_headers for member in entry.parts.values()):
            return ()
        if number % BLOCK == 0:
            bounds.append(entry.begin)
    pairs = pairwise([*bounds, path.stat().st_size])
    return tuple(Block(begin, end, sha256_between(shard.file, begin, end)) for begin, end in pairs)


def sha256_between(file: BinaryIO, begin: int, end: int) -> str:
    """Return the sha256 of bytes begin..end."""
    digest = hashlib.sha256()
    file.seek(begin)
    while begin < end and (data := file.read(min(end - begin, 2**20))):
        digest.update(data)
        begin += len(data)
    return digest.hexdigest()


def _begins_with(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(mark)) == mark
