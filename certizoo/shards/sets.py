"""From a `DataConfig` to shards that are verified before any work is done."""

import fnmatch
import hashlib
import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from certizoo import UserError
from certizoo.shards.format import manifest
from certizoo.shards.format.config import DataConfig
from certizoo.shards.format.manifest import Manifest, ShardInfo
from certizoo.shards.format.tar import Shard
from certizoo.shards.remote import fetch
from certizoo.shards.remote.fetch import RemoteShard, Source, read_manifest, source_of

log = logging.getLogger(__name__)
HASHED_BYTES = 256 * 2**20  # `verify=auto` hashes sets up to this size: about a second
HOW_TO_MAKE = {
    "digits": "certizoo shards digits {root}",
    "cifar10": "certizoo shards torchvision CIFAR10 {root} --name cifar10",
    "mnist": "certizoo shards torchvision MNIST {root} --name mnist",
}
FOLDER = "certizoo shards folder /path/to/{name}/{split} {root} --name {name} --split {split}"


@dataclass(frozen=True)
class ShardSet:
    """Checked shards of one split.

    `counts` are the samples per shard, `histogram` the samples per label (0 .. num_classes - 1), `digest` the sha256
    over the list of (file, bytes, sha256 or null). `begins` are the first bytes of a shard's blocks, if they are known.
    Shards of a mixture's sets follow each other; `sets` are the number of shards and the share of each.
    """

    paths: tuple[Shard, ...]
    counts: tuple[int, ...]
    num_classes: int
    histogram: tuple[int, ...]
    digest: str
    begins: tuple[tuple[int, ...], ...] = ()
    sets: tuple[tuple[int, float], ...] = ()

    @property
    def samples(self) -> int:
        return sum(self.counts)

    @property
    def counts_by_set(self) -> list[tuple[int, ...]]:
        """Return the samples per shard of each set."""
        ends = list(accumulate(shards for shards, _ in self.sets or [(len(self.counts), 1.0)]))
        return [self.counts[start:end] for start, end in pairwise([0, *ends])]

    @property
    def quotas(self) -> list[int]:
        """Return how many samples of each set an epoch draws: all of the first, of others in proportion."""
        first, *others = [share for _, share in self.sets] or [1.0]
        base = sum(self.counts_by_set[0])
        return [base, *(max(round(base * share / first), 1) for share in others)]


def find(config: DataConfig, split: str) -> ShardSet:
    """Return the shards of `split` ("train" or "test"), checked against their manifest, or walked without one.

    Raises `UserError` if there are none, if one disagrees with the manifest, is damaged, or holds a label that
    `config.num_classes` does not allow. With `on_corrupt="skip"` faulty training samples are only logged.
    """
    if split not in ("train", "test"):
        raise UserError(f"data split {split!r} does not exist; use train or test")
    pattern = getattr(config, split)
    if Path(pattern).name != pattern or "**" in pattern:
        raise UserError(f"data shards {pattern!r}: not a glob of file names; give the folder as data.root")
    if split == "train" and config.mix:
        shares = [config.mix[config.name], *(share for name, share in config.mix.items() if name != config.name)]
        return _mixture([_found(each, split) for each in config.mixed], shares)
    return _found(config, split)


def _found(config: DataConfig, split: str) -> ShardSet:
    source = source_of(config)
    paths: Sequence[Shard]
    paths, infos = _local(config, split) if source is None else _remote(source, config, split)
    return ShardSet(
        paths=tuple(paths),
        counts=tuple(info.samples for info in infos),
        num_classes=config.num_classes,
        histogram=_histogram(paths, infos, config.num_classes),
        digest=_digest(infos),
        begins=tuple(tuple(block.begin for block in info.blocks) for info in infos),
    )


def _mixture(found: Sequence[ShardSet], shares: Sequence[float]) -> ShardSet:
    """Return all shards as one set."""
    digests = [[one.digest, share] for one, share in zip(found, shares, strict=True)]
    return ShardSet(
        paths=tuple(path for one in found for path in one.paths),
        counts=tuple(count for one in found for count in one.counts),
        num_classes=found[0].num_classes,
        histogram=tuple(map(sum, zip(*(one.histogram for one in found), strict=True))),
        digest=hashlib.sha256(json.dumps(digests).encode()).hexdigest(),
        begins=tuple(begins for one in found for begins in one.begins),
        sets=tuple((len(one.counts), share) for one, share in zip(found, shares, strict=True)),
    )


def warn_of_empty_classes(found: ShardSet, where: str) -> None:
    """Log a warning if most classes have no image: labels may mean other classes than those of the model."""
    filled = sum(count > 0 for count in found.histogram)
    if 2 * filled < found.num_classes:
        log.warning("%s has images of %d of %d classes; check its labels", where, filled, found.num_classes)


def listing_of(config: DataConfig) -> Manifest | None:
    """Return the manifest, wherever the shards are; None for a folder without one."""
    source = source_of(config)
    return read_manifest(source, config.name) if source else manifest.read(config.folder, config.name)


def _local(config: DataConfig, split: str) -> tuple[list[Path], list[ShardInfo]]:
    root, pattern = config.folder, getattr(config, split)
    listing = manifest.read(root, config.name, pattern)
    paths = _matching(root, pattern, listing)
    if not paths:
        raise UserError(f"no shards {root / pattern} for data.{split}; {_how(config, split)}")
    return paths, _checked(paths, listing, config, split)


def _remote(source: Source, config: DataConfig, split: str) -> tuple[list[RemoteShard], list[ShardInfo]]:
    listing = read_manifest(source, config.name)
    names = sorted(fnmatch.filter(listing.files, getattr(config, split)))
    if not names:
        raise UserError(f"no shards {getattr(config, split)} in {listing.where} for data.{split}; give another glob")
    shards = fetch.check(names, source, listing, config)
    return shards, [_with_labels(shard, shard.info, listing, config, split) for shard in shards]


def _matching(root: Path, pattern: str, listing: Manifest | None) -> list[Path]:
    """Return the files that match, and missing shards that the manifest lists."""
    found = set(root.glob(pattern))
    if listing is not None:
        found |= {root / file for file in listing.files if fnmatch.fnmatch(file, pattern)}
    return sorted(found)


def _how(config: DataConfig, split: str) -> str:
    command = HOW_TO_MAKE.get(config.name, FOLDER).format(root=shlex.quote(config.root), name=config.name, split=split)
    return f"make them with `{command}`, or set their location: data.root=FOLDER data.{split}=GLOB"


def _checked(paths: list[Path], listing: Manifest | None, config: DataConfig, split: str) -> list[ShardInfo]:
    if listing is None or not listing.covers(paths):
        log.info("no manifest in %s: walking %d shards", config.root, len(paths))
        return [_scanned(path, config, split) for path in paths]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    hashed = config.verify == "sha256" or (config.verify == "auto" and size <= HASHED_BYTES)
    infos = [manifest.check(path, listing, hashed=hashed) for path in paths]
    return [_with_labels(path, info, listing, config, split) for path, info in zip(paths, infos, strict=True)]


def _scanned(path: Shard, config: DataConfig, split: str) -> ShardInfo:
    lenient = split == "train" and config.on_corrupt == "skip"
    return manifest.scan(path, config.num_classes, lenient=lenient)


def _with_labels(path: Shard, listed: ShardInfo, listing: Manifest, config: DataConfig, split: str) -> ShardInfo:
    """Complete a manifest entry without labels by walking the shard, and check the number of samples."""
    if listed.histogram:
        return listed
    scanned = _scanned(path, config, split)
    if scanned.samples != listed.samples:
        raise UserError(f"{path} holds {scanned.samples} samples, {listing.where} says {listed.samples}; {listing.fix}")
    return replace(listed, histogram=scanned.histogram)


def _histogram(paths: Sequence[Shard], infos: list[ShardInfo], num_classes: int) -> tuple[int, ...]:
    counts = [0] * num_classes
    for path, info in zip(paths, infos, strict=True):
        for label, count in (info.histogram or {}).items():
            if not 0 <= label < num_classes:
                raise UserError(
                    f"{path}: label {label} is not one of 0..{num_classes - 1}; correct the label or data.num_classes"
                )
            counts[label] += count
    return tuple(counts)


def _digest(infos: list[ShardInfo]) -> str:
    listed = [[info.file, info.bytes, info.sha256] for info in infos]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
