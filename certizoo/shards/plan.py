"""The division of an epoch: one line of samples, the shards concatenated in order.

Ranks, and workers within a rank, each take a contiguous part of that line, equal to within one sample, and open only
the shards it touches. (webdataset's splitters assign whole shards, so that ranks are uneven and some workers are empty
if there are few shards.)
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from certizoo import UserError
from certizoo.shards.sets import ShardSet
from certizoo.shards.tar import Entry, Shard, opened, walk


class Segment(NamedTuple):
    """Samples start..stop of a shard that holds `total`."""

    path: Shard
    start: int
    stop: int
    total: int


def steps_per_epoch(shard_set: ShardSet, batch_size: int, world_size: int = 1) -> int:
    """Return ceil(N / (world_size batch_size)), the number of batches on every rank."""
    return math.ceil(shard_set.samples / (world_size * batch_size))


def share(start: int, stop: int, first: int, last: int, parts: int) -> tuple[int, int]:
    """Return parts first..last of start..stop cut into `parts`; all of it if that would be empty."""
    length = stop - start
    low, high = start + length * first // parts, start + length * last // parts
    return (low, high) if high > low else (start, stop)


def segments(paths: Iterable[Shard], counts: Iterable[int], start: int, stop: int) -> list[Segment]:
    """Return the segments that contain samples start..stop of the line of shards."""
    found, offset = [], 0
    for path, count in zip(paths, counts, strict=True):
        low, high = max(start - offset, 0), min(stop - offset, count)
        if low < high:
            found.append(Segment(path, low, high, count))
        offset += count
    return found


def entries(source: Iterable[Segment]) -> Iterator[Entry]:
    """Iterate over the samples of segments, unread. Raises `UserError` if a shard's number of samples has changed."""
    for segment, file in _opened_ahead(list(source)):
        seen = 0
        with file:
            for seen, entry in enumerate(walk(segment.path, file), start=1):
                if segment.start < seen <= segment.stop:
                    yield entry
                if seen == segment.stop < segment.total:
                    break
        if seen < segment.stop or (segment.stop == segment.total < seen):
            raise UserError(
                f"{segment.path} holds {seen} samples instead of {segment.total}; "
                "write the shards again, or run `certizoo shards index` on their folder"
            )


def _opened_ahead(source: Sequence[Segment]) -> Iterator[tuple[Segment, BinaryIO]]:
    """Iterate over segments with their files. The next shard is opened, perhaps fetched, while this one is read."""
    coming: Future[BinaryIO] | None = None
    with ThreadPoolExecutor(1) as pool:
        try:
            for segment, after in pairwise([*source, None]):
                assert segment is not None
                file = coming.result() if coming else opened(segment.path)
                coming = pool.submit(opened, after.path) if after else None
                yield segment, file
        finally:
            if coming is not None and not coming.cancel():
                coming.add_done_callback(_close)


def _close(coming: Future[BinaryIO]) -> None:
    if coming.exception() is None:
        coming.result().close()
