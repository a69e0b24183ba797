"""Streams: the batches that one loader process reads, by epoch, rank and worker, exact to the sample.

In training a worker's part of the epoch (see plan.py) is repeated until its steps are complete: every rank makes the
same number of steps, and every sample of the epoch is used. Evaluation reads each sample once.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from torch.utils.data import IterableDataset

from certizoo import UserError
from certizoo.reading import Reading
from certizoo.shards.batch import Batch, batches, eval_view, loaded, train_view
from certizoo.shards.format.config import DataConfig
from certizoo.shards.format.tar import Sample, SampleError
from certizoo.shards.plan import (
    Places,
    entries,
    epoch_line,
    line_entries,
    own_batches,
    part,
    rearranged,
    rest,
    segments,
    turns,
    worker_seed,
)
from certizoo.shards.ring import Page, fresh_pages
from certizoo.shards.sets import ShardSet
from certizoo.shards.views.augment import mix


@dataclass(eq=False)
class Stream(IterableDataset, ABC):
    """Batches of one rank.

    A `UserError` is yielded instead of raised, because a loader would wrap it in its traceback.
    """

    shard_set: ShardSet
    config: DataConfig
    batch_size: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[Batch | UserError]:
        """Iterate in the training process."""
        yield from self.turns(0, 1, fresh_pages(*self.page))

    def turns(self, worker: int, workers: int, pages: Iterator[Page]) -> Iterator[Batch | UserError]:
        """Iterate over `read`; a UserError becomes the last item."""
        try:
            yield from self.read(worker, workers, pages)
        except UserError as error:
            yield error

    @property
    def page(self) -> tuple[int, ...]:
        """Return the shape of a batch."""
        return self.batch_size, *self.config.shape

    @property
    def processes(self) -> int:
        """Return the number of loader processes; the choice of batches may depend on it."""
        return self.config.workers

    @abstractmethod
    def read(self, worker: int, workers: int, pages: Iterator[Page]) -> Iterator[Batch]:
        """Iterate over the batches of one of the rank's loader processes."""


@dataclass(eq=False)
class TrainStream(Stream):
    """The `per_epoch` batches of consecutive epochs.

    The n-th remaining batch belongs to loader n mod K, since torch's loader asks its K loaders in turn. In each epoch
    they are workers 0 .. K - 1, starting with the one whose turn it is. `before` says who read the beginning of the
    first epoch; `skip` batches after it are left out.
    """

    epochs: range
    per_epoch: int
    seed: int
    skip: int
    before: Sequence[Reading]

    def read(self, worker: int, workers: int, pages: Iterator[Page]) -> Iterator[Batch]:
        asked = -self.skip
        for epoch in self.epochs:
            yield from self.read_epoch(epoch, (worker - asked) % workers, workers, max(-asked, 0), pages)
            asked += self.batches_of(epoch)

    def batches_of(self, epoch: int) -> int:
        """Return the number of batches of this rank that are left of the epoch after `before`."""
        each = self.world_size * self.batch_size
        drawn = sum(reading.drawn for reading in self.before) if epoch == self.epochs.start else 0
        return max(self.per_epoch - math.ceil(drawn / each), 0)

    def read_epoch(self, epoch: int, worker: int, workers: int, skip: int, pages: Iterator[Page]) -> Iterator[Batch]:
        """Iterate over batches w, w + K, ... of the epoch for worker w of K, without the first `skip` of all."""
        whole = Reading(self.world_size, workers, self.batch_size, self.batches_of(epoch))
        own, skipped = own_batches(whole, worker), len(range(worker, skip, workers))
        if own <= skipped:
            return
        mine = part(self.line(epoch), whole, self.rank, worker)
        seed = worker_seed(mix(self.seed, epoch), self.rank, worker)
        drawn = turns(len(mine), skipped * self.batch_size, own * self.batch_size, seed)
        items = chain.from_iterable(self.samples(mine, places) for places in drawn)
        spare = partial(self.samples, mine, np.arange(len(mine))) if self.config.on_corrupt == "skip" else None
        yield from batches(items, train_view(self.config, self.seed, epoch), pages, spare)

    def line(self, epoch: int) -> Places:
        """Return the line of the epoch, or its rest after `before`."""
        seed = mix(self.seed, epoch)
        line = epoch_line(self.shard_set, self.seed, epoch, self.config.repeats)
        left = self.per_epoch * self.world_size * self.batch_size
        for done in self.before if epoch == self.epochs.start else ():
            whole = done._replace(batches=left // (done.ranks * done.batch_size))
            line, left = rest(line, whole, done, seed), left - done.drawn
        return line

    def samples(self, mine: Places, places: Places) -> Iterator[Sample | SampleError]:
        """Iterate over samples of a part in the order of these places in it; shards are read one after another."""
        rising = np.sort(places)
        numbered = zip(rising.tolist(), line_entries(self.shard_set, mine[rising]), strict=True)
        return loaded(rearranged(places.tolist(), numbered), self.config.num_classes)


@dataclass(eq=False)
class EvalStream(Stream):
    """The rank's part in file order; worker w of K reads batches w, w + K, ..., and the loader restores the order."""

    first: int
    limit: int

    @property
    def processes(self) -> int:
        return min(self.config.workers, cores())

    def read(self, worker: int, workers: int, pages: Iterator[Page]) -> Iterator[Batch]:
        start, stop = (self.first + self.limit * place // self.world_size for place in (self.rank, self.rank + 1))
        line = entries(segments(self.shard_set, np.arange(start, stop)))
        own = (entry for place, entry in enumerate(line) if place // self.batch_size % workers == worker)
        yield from batches(loaded(own, self.config.num_classes), eval_view(self.config), pages, spare=None)


def cores() -> int:
    """Return the number of cores that this process may use; more loaders would only wait for each other."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
