"""The loaders: streams (streams.py) in processes of their own, and their batches as tensors of the training process."""

import atexit
import gc
import logging
import math
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from certizoo import UserError
from certizoo.memory import keep_freed_memory
from certizoo.reading import Reading
from certizoo.shards.batch import Batch, loaded
from certizoo.shards.format.config import DataConfig
from certizoo.shards.format.tar import Sample, SampleError
from certizoo.shards.plan import entries, segments, steps_per_epoch
from certizoo.shards.ring import PREFETCH, Ring, Slot
from certizoo.shards.sets import ShardSet
from certizoo.shards.streams import EvalStream, Stream, TrainStream

log = logging.getLogger(__name__)


class Sent(NamedTuple):
    """A batch between processes: its images lie in the slot."""

    keys: list[str]
    labels: list[int]
    faults: list[str]
    slot: Slot


@dataclass(eq=False)
class Processes(IterableDataset):
    """A stream in loader processes, whose batches lie in a ring."""

    stream: Stream
    ring: Ring

    def __iter__(self) -> Iterator[Sent | UserError]:
        info = get_worker_info()
        assert info is not None, "a ring is for loader processes"
        for item in self.stream.turns(info.id, info.num_workers, self.ring.pages(info.id)):
            if isinstance(item, Batch):
                assert item.page.slot is not None
                yield Sent(item.keys, item.labels, item.faults, item.page.slot)
            else:
                yield item


@dataclass(frozen=True)
class Batches:
    """The common part of the loaders: batches from loader processes, one-line errors, `len()` batches."""

    stream: Stream
    steps: int

    def __len__(self) -> int:
        return self.steps

    def received(self) -> Iterator[Batch]:
        """Iterate over batches. Copy the images before the next batch is requested."""
        workers = self.stream.processes
        ring = Ring(workers, *self.stream.page) if workers else None
        loader = DataLoader(
            Processes(self.stream, ring) if ring else self.stream,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=PREFETCH if workers else None,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # a loader draws a seed: keep the global generator unchanged
            worker_init_fn=_settle,
        )
        try:
            for item in _started(loader):
                if isinstance(item, UserError):
                    raise item
                yield Batch(item.keys, item.labels, item.faults, ring.page(item.slot)) if ring else item
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise UserError(
                f"a loader process of {self.stream.config.name} died ({str(error).splitlines()[0]}); give it more "
                "memory (also /dev/shm) or use fewer data.workers"
            ) from None


@dataclass(frozen=True)
class TrainBatches(Batches):
    """Iterates over (images_BCHW float32 in [0, 1], labels_B int64), on `device`; of text, tokens_BT int64."""

    device: torch.device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        faults: set[str] = set()
        served = 0
        for batch in self.received():
            self.note(batch.faults, faults)
            served += 1
            yield _values(self.sent(_cropped(batch.images_BCHW))), self.sent(torch.tensor(batch.labels))
        if served != self.steps:
            raise UserError(f"{self.stream.config.name}: {served} batches instead of {self.steps}; report this")

    def sent(self, values: Tensor) -> Tensor:
        """Copy to the device; a GPU copies from pinned memory while it computes."""
        gpu = self.device.type == "cuda"
        return (values.pin_memory() if gpu else values).to(self.device, non_blocking=gpu)

    def note(self, new: list[str], known: set[str]) -> None:
        """Log each skipped sample once. Raises `UserError` beyond `max_corrupt` of them."""
        limit = self.stream.config.max_corrupt
        for fault in sorted(set(new) - known):
            known.add(fault)
            log.warning("skipped corrupt sample %d of at most %d: %s", len(known), limit, fault)
            if len(known) > limit:
                raise UserError(f"more than data.max_corrupt={limit} corrupt samples, the last: {fault}")


class EvalBatches(Batches):
    """Iterates over (keys, images_BCHW float32 in [0, 1], labels_B int64); of text, tokens_BT int64."""

    def __iter__(self) -> Iterator[tuple[list[str], Tensor, Tensor]]:
        seen: set[str] = set()
        for batch in self.received():
            for key in batch.keys:
                if key in seen:
                    raise UserError(
                        f"{self.stream.config.root}: two samples have the key {key}; write the shards again"
                    )
                seen.add(key)
            yield batch.keys, _values(batch.images_BCHW), torch.tensor(batch.labels)


def train_loader(
    shard_set: ShardSet,
    config: DataConfig,
    *,
    batch_size: int,
    epoch: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    before: Sequence[Reading] = (),
    skip_batches: int = 0,
    epochs: int = 1,
    per_epoch: int | None = None,
    device: torch.device | str = "cpu",
) -> TrainBatches:
    """Return the `steps_per_epoch` batches of an epoch on every rank, without the first `skip_batches`.

    The batches are a function of (seed, epoch, before, rank, world_size, config.workers). A run that skips k continues
    exactly like one that stopped after k, and several epochs together equal the same epochs one by one. Nothing of what
    is skipped is read. The global random generators are left unchanged. Images travel to the device as bytes.

    Args:
        before: what other numbers of ranks, one after another, have read of the first epoch; these ranks share the
            rest.
        epochs: continue with the following epochs in the same loader processes, without a pause.
        per_epoch: the number of batches that make an epoch, if it is not `steps_per_epoch`.
    """
    each = steps_per_epoch(shard_set, batch_size, world_size) if per_epoch is None else per_epoch
    ahead = range(epoch, epoch + epochs)
    stream = TrainStream(shard_set, config, batch_size, rank, world_size, ahead, each, seed, skip_batches, before)
    steps = sum(map(stream.batches_of, ahead)) - skip_batches
    return TrainBatches(stream, max(steps, 0), torch.device(device))


def eval_loader(
    shard_set: ShardSet,
    config: DataConfig,
    *,
    batch_size: int,
    first: int = 0,
    limit: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> EvalBatches:
    """Return `limit` samples (None: all) from sample `first` in file order, each on one rank; none is skipped."""
    left = max(shard_set.samples - first, 0)
    limit = left if limit is None else min(limit, left)
    own = limit * (rank + 1) // world_size - limit * rank // world_size
    return EvalBatches(
        EvalStream(shard_set, config, batch_size, rank, world_size, first, limit), math.ceil(own / batch_size)
    )


def eval_samples(
    shard_set: ShardSet, config: DataConfig, *, first: int = 0, limit: int | None = None
) -> Iterator[Sample]:
    """Iterate over the samples of `eval_loader` in its order, still encoded, to identify the images."""
    stop = shard_set.samples if limit is None else min(first + limit, shard_set.samples)
    line = entries(segments(shard_set, np.arange(first, stop)))
    for sample in loaded(line, config.num_classes):
        if isinstance(sample, SampleError):
            raise sample
        yield sample


def _started(loader: "DataLoader[Any]") -> Iterator[Any]:
    """Start the loader processes.

    Objects of the rank are frozen first: a loader process that collected the rank's connection to a web server would
    wait for a thread that does not exist there.
    """
    gc.freeze()  # permanently, in the processes that start here
    try:
        return iter(loader)
    finally:
        gc.unfreeze()


def _settle(worker: int) -> None:
    """Prepare a loader process: reuse memory, and ignore the signals that stop a training.

    A launcher that is asked to stop signals the whole process tree, as a terminal does at Ctrl-C, but the rank still
    needs its loaders to finish a step.
    """
    keep_freed_memory()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@atexit.register
def _end_loaders() -> None:
    """Kill loader processes that are left at exit.

    multiprocessing, whose own function runs after this one, would send them the SIGTERM that they ignore and then wait
    forever: a training on a GPU, where something kept the exhausted loader alive, never returned.
    """
    left = [process for process in multiprocessing.active_children() if process.daemon]
    if left:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a killed loader process
    for process in left:
        process.kill()


def _as_it_is(item: Any) -> Any:
    return item


def _cropped(bytes_B: Tensor) -> Tensor:
    """Return images as they are, and tokens (B, T, 2) without the columns that are padding in all sentences."""
    if bytes_B.ndim == 4:
        return bytes_B
    return bytes_B[:, : int(bytes_B.any(2).any(0).sum())]


def _values(bytes_B: Tensor) -> Tensor:
    """Return images (B, C, H, W) in [0, 1], or of pairs of bytes (B, T, 2) the numbers of tokens (B, T)."""
    if bytes_B.ndim == 4:
        return bytes_B.to(torch.float32).div_(255)
    low_BT, high_BT = bytes_B.long().unbind(-1)
    return low_BT + 256 * high_BT
