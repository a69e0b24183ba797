"""The division of an epoch: a line of samples, the shards concatenated in an order of the epoch.

Ranks, and workers within a rank, each take a contiguous part of the line, equal to within one sample, and open only
the shards it touches. (webdataset's splitters assign whole shards, so that ranks are uneven and some workers are empty
if there are few shards.) A part is read in the order

    i -> i + REACH u_i, sorted,    u_i uniform in [0, 1),    i the place in the part:

no sample moves by more than REACH places, so shards are read one after another, and the n-th sample is known without
reading the ones before it. If other ranks read the beginning of an epoch, what they left is the line of the rest.

In the line of a mixture, the j-th of the n_i samples of set i has the key (j + 1/2) / n_i, and the line is sorted by
keys: each stretch has every set in its share, up to one sample a set. Set i goes on in each epoch where the one before
it left off, so its position, e n_i + j, is a function of epoch and place. An epoch is one pass through the first set.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from certizoo import UserError
from certizoo.reading import Reading
from certizoo.shards.format.manifest import BLOCK
from certizoo.shards.format.tar import Entry, OpenShard, Shard, opened, walk
from certizoo.shards.sets import ShardSet
from certizoo.shards.views.augment import mix

REACH = 1000  # samples
Places = NDArray[np.int64]


class Segment(NamedTuple):
    """The samples `wanted`, in rising order, of a shard that holds `total`. Every BLOCK-th begins at byte `begins`."""

    path: Shard
    wanted: Sequence[int]
    total: int
    begins: Sequence[int]


def steps_per_epoch(shard_set: ShardSet, batch_size: int, world_size: int = 1) -> int:
    """Return ceil(N / (world_size batch_size)), the number of batches on every rank."""
    return math.ceil(sum(shard_set.quotas) / (world_size * batch_size))


# the line ------------------------------------------------------------------------------------------------------------


def epoch_line(shard_set: ShardSet, seed: int, epoch: int, repeats: int = 1) -> Places:
    """Return the samples of an epoch, numbered in file order.

    A sample that is drawn again has N (the number of all samples), 2 N, ... added to its number, so that its view
    differs.
    """
    lines, begin = [], 0
    for counts, quota in zip(shard_set.counts_by_set, shard_set.quotas, strict=True):
        distinct = math.ceil(quota / repeats)
        passes, places = np.divmod(np.arange(epoch * distinct, (epoch + 1) * distinct), sum(counts))
        orders = {each: set_line(counts, mix(seed, each)) for each in range(passes[0], passes[-1] + 1)}
        line = begin + np.concatenate([orders[each][places[passes == each]] for each in orders])
        copies = (passes - passes[0])[:, None] * repeats + np.arange(repeats)
        lines.append((line[:, None] + shard_set.samples * copies).reshape(-1)[:quota])
        begin += sum(counts)
    keys = np.concatenate([(np.arange(len(line)) + 0.5) / len(line) for line in lines])
    return np.concatenate(lines)[np.argsort(keys, kind="stable")]


def set_line(counts: Sequence[int], seed: int) -> Places:
    """Return all samples of one set, numbered in file order, by shards in the order of the seed."""
    ends = np.cumsum(counts)
    order = np.random.default_rng(seed).permutation(len(counts))
    return np.concatenate([np.arange(ends[shard] - counts[shard], ends[shard]) for shard in order])


def share(start: int, stop: int, first: int, last: int, parts: int) -> tuple[int, int]:
    """Return parts first..last of start..stop cut into `parts`; all of it if that would be empty."""
    length = stop - start
    low, high = start + length * first // parts, start + length * last // parts
    return (low, high) if high > low else (start, stop)


def part(line: Places, whole: Reading, rank: int, worker: int) -> Places:
    """Return this worker's part of its rank's part of the line, in proportion to its batches of `whole`."""
    start, stop = share(0, len(line), rank, rank + 1, whole.ranks)
    first = sum(own_batches(whole, before) for before in range(worker))
    start, stop = share(start, stop, first, first + own_batches(whole, worker), whole.batches)
    return line[start:stop]


def own_batches(reading: Reading, worker: int) -> int:
    """Return how many of a rank's batches this worker reads: every `workers`-th."""
    return len(range(worker, reading.batches, reading.workers))


def turns(size: int, first: int, last: int, seed: int) -> Iterator[Places]:
    """Iterate over the places, in a part of this size, of the samples first..last that are drawn from it.

    A part is drawn again, in another order, until its worker has enough.
    """
    for turn in range(first // size, math.ceil(last / size)):
        keys = np.arange(size) + REACH * np.random.default_rng(mix(seed, turn)).random(size)
        yield np.argsort(keys)[max(first - turn * size, 0) : last - turn * size]


def rest(line: Places, whole: Reading, done: Reading, seed: int) -> Places:
    """Return the line without the samples that `done`, the beginning of `whole`, has drawn; all of it if none is left.

    It is never longer than what is still to be drawn, so that every sample of the epoch is used.
    """
    left = np.ones(len(line), dtype=bool)
    for rank in range(whole.ranks):
        for worker in range(whole.workers):
            own = own_batches(done, worker) * whole.batch_size
            mine = part(np.arange(len(line)), whole, rank, worker) if own else line[:0]
            for places in turns(len(mine), 0, own, worker_seed(seed, rank, worker)) if own else ():
                left[mine[places]] = False
    remaining = line[left]
    return remaining if len(remaining) else line


def worker_seed(seed: int, rank: int, worker: int) -> int:
    """Return the seed of the order of a worker's part."""
    return mix(seed, rank, worker)


# shards --------------------------------------------------------------------------------------------------------------


def segments(shard_set: ShardSet, places: Places) -> list[Segment]:
    """Return the segments that contain the places, which are in the order of one set's line."""
    ends = np.cumsum(shard_set.counts)
    numbers = np.searchsorted(ends, places, side="right")
    cuts = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(places) < 0)) + 1  # places fall where a pass begins again
    found = []
    for own in np.split(places, cuts) if len(places) else ():
        shard = int(np.searchsorted(ends, own[0], side="right"))
        total, begins = shard_set.counts[shard], shard_set.begins[shard] if shard_set.begins else ()
        found.append(Segment(shard_set.paths[shard], (own - (ends[shard] - total)).tolist(), total, begins))
    return found


def entries(source: Iterable[Segment]) -> Iterator[Entry]:
    """Iterate over the samples of segments, unread. Raises `UserError` if a shard's number of samples has changed."""
    for segment, file in _opened_ahead(list(source)):
        block = segment.wanted[0] // BLOCK if segment.begins else 0
        seen, last = block * BLOCK, segment.wanted[-1]
        wanted = iter(segment.wanted)
        sought = next(wanted)
        for entry in walk(segment.path, file, segment.begins[block] if segment.begins else 0):
            while seen == sought:  # more than once with repeated augmentation
                yield entry
                sought = next(wanted, -1)
            seen += 1
            if seen > last and seen < segment.total:
                break
        if seen <= last or seen > segment.total:
            raise UserError(
                f"{segment.path} holds {seen} samples instead of {segment.total}; "
                "write the shards again, or run `certizoo shards index` on their folder"
            )


def line_entries(shard_set: ShardSet, line: Places) -> Iterator[Entry]:
    """Iterate over the samples of a line, unread. The sets of a mixture are read side by side."""
    copies, places = np.divmod(line, shard_set.samples)
    ends = np.cumsum([sum(counts) for counts in shard_set.counts_by_set])
    owners = np.searchsorted(ends, places, side="right")
    streams = [entries(segments(shard_set, places[owners == owner])) for owner in range(len(ends))]
    for owner, copy in zip(owners.tolist(), copies.tolist(), strict=True):
        entry = next(streams[owner])
        yield replace(entry, copy=copy) if copy else entry
    for stream in streams:  # the end of the last shard is checked too
        deque(stream, 0)


def rearranged(order: Sequence[int], numbered: Iterator[tuple[int, Entry]]) -> Iterator[Entry]:
    """Iterate over numbered entries in this order; entries that come before their turn wait, unread."""
    waiting: dict[int, Entry] = {}
    for place in order:
        while place not in waiting:
            number, entry = next(numbered)
            waiting[number] = entry
        yield waiting.pop(place)
    for _ in numbered:  # the end of the last shard is checked too
        pass


def _opened_ahead(source: Sequence[Segment]) -> Iterator[tuple[Segment, OpenShard]]:
    """Iterate over segments with their files. The next shard is opened, perhaps fetched, while this one is read."""
    coming: Future[OpenShard] | None = None
    with ThreadPoolExecutor(1) as pool:
        try:
            for segment, after in pairwise([*source, None]):
                assert segment is not None
                file = coming.result() if coming else _opened(segment)
                coming = pool.submit(_opened, after) if after else None
                yield segment, file
                del file
        finally:
            if coming is not None:
                coming.cancel()


def _opened(segment: Segment) -> OpenShard:
    return opened(segment.path, segment.wanted[0], segment.wanted[-1])
