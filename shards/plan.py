"""Who reads what: an epoch is one line of samples, the shards in their order one behind the other.

Ranks, and workers within a rank, each take a contiguous part of that line, equal to one sample, and open only the
shards it touches. (Giving whole shards to ranks, as webdataset's splitters do, makes ranks uneven, and workers
empty where shards are few.)
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from certizoo import UserError
from shards.sets import ShardSet
from shards.tar import Entry, Shard, opened, walk


class Segment(NamedTuple):
    """Samples start..stop of a shard that holds `total`."""

    path: Shard
    start: int
    stop: int
    total: int


def steps_per_epoch(shard_set: ShardSet, batch_size: int, world_size: int = 1) -> int:
    """ceil(N / (world_size batch_size)): the batches of every rank."""
    return math.ceil(shard_set.samples / (world_size * batch_size))


def share(start: int, stop: int, first: int, last: int, parts: int) -> tuple[int, int]:
    """Parts first..last of start..stop cut into `parts`; all of it if that would be nothing."""
    length = stop - start
    low, high = start + length * first // parts, start + length * last // parts
    return (low, high) if high > low else (start, stop)


def segments(paths: Iterable[Shard], counts: Iterable[int], start: int, stop: int) -> list[Segment]:
    """Where samples start..stop of the line of shards lie."""
    found, offset = [], 0
    for path, count in zip(paths, counts, strict=True):
        low, high = max(start - offset, 0), min(stop - offset, count)
        if low < high:
            found.append(Segment(path, low, high, count))
        offset += count
    return found


def entries(source: Iterable[Segment]) -> Iterator[Entry]:
    """The samples of segments, unread. Raises `UserError` where a shard no longer holds what it did."""
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
                f"{segment.path} holds {seen} samples where {segment.total} were announced; "
                "write the shards again, or run `python -m shards index` on their folder"
            )


def _opened_ahead(source: Sequence[Segment]) -> Iterator[tuple[Segment, BinaryIO]]:
    """Each segment with its file. The next shard is opened, perhaps fetched, while this one is read."""
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
