"""The memory in which batches are assembled, image by image: a loader process reuses it.

A batch in fresh memory costs a page fault per 4 KB on either side, in virtual machines as much time as decoding its
JPEGs. Here worker w puts its n-th batch into its slot n mod S, and the training process reads it there before it asks
for another one. `DataLoader` has at most PREFETCH batches of a worker in flight besides the one being read, and perhaps
one more after another worker has ended: S = PREFETCH + 2. Every slot holds the number of its batch, so that one that
was overwritten too early would be detected.

Letters: W loader processes, S slots; B images of a batch, C channels, H, W: height, width.
"""

import math
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from certizoo import UserError

PREFETCH = 2  # DataLoader's default
SLOTS = PREFETCH + 2


class Slot(NamedTuple):
    """Batch `number` of a worker."""

    worker: int
    number: int


class Page(NamedTuple):
    """Memory for a batch; `slot` is its place if it lies in a ring."""

    images_BCHW: Tensor
    slot: Slot | None


def fresh_pages(*shape: int) -> Iterator[Page]:
    """Iterate over pages of a shape (B, ...) in fresh memory, for a process that reads for itself."""
    while True:
        yield Page(torch.empty(shape, dtype=torch.uint8), None)


def shared_bytes(workers: int, *shape: int) -> int:
    """Return the shared memory that a ring of pages of a shape needs."""
    return workers * SLOTS * math.prod(shape)


class Ring:
    """Shared memory for `workers` loader processes, with pages of a shape (B, ...).

    Raises `UserError` if the machine has too little of it.
    """

    def __init__(self, workers: int, *shape: int) -> None:
        try:
            self.images_WSBCHW = torch.empty((workers, SLOTS, *shape), dtype=torch.uint8).share_memory_()
            self.number_WS = torch.full((workers, SLOTS), -1, dtype=torch.int64).share_memory_()
        except RuntimeError as error:
            raise UserError(
                f"no shared memory for {workers} loader processes with batches of {shape[0]} "
                f"({str(error).splitlines()[0]}); give the machine more of /dev/shm, or use fewer data.workers"
            ) from None

    def pages(self, worker: int) -> Iterator[Page]:
        """Iterate over this worker's slots in turn, in a loader process."""
        for number in count():
            place = number % SLOTS
            self.number_WS[worker, place] = number
            yield Page(self.images_WSBCHW[worker, place], Slot(worker, number))

    def page(self, slot: Slot) -> Page:
        """Return the page in the training process; copy it before the next batch is requested."""
        place = slot.number % SLOTS
        if self.number_WS[slot.worker, place] != slot.number:
            raise RuntimeError(f"batch {slot.number} of loader process {slot.worker} is gone; report this")
        return Page(self.images_WSBCHW[slot.worker, place], slot)
