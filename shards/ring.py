"""Where batches are put together, image by image: in a loader process, memory that is used again and again.

A batch in memory of its own is a page fault for every 4 KB of it, on either side: in virtual machines as much time as
decoding its JPEGs. Here worker w puts its n-th batch into slot n mod S of its own, and the process of the step reads it
there before it asks for another one. `DataLoader` has at most PREFETCH batches of a worker under way beside the one
that is read, and where a worker has ended perhaps one more of another: S = PREFETCH + 2. Every slot holds the number of
its batch, so that one which was overwritten too early would be seen.

Letters: W loader processes, S slots; B images of a batch, C channels, H, W: height, width.
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from certizoo import UserError

PREFETCH = 2  # DataLoader's own choice
SLOTS = PREFETCH + 2


class Slot(NamedTuple):
    """Batch `number` of a worker."""

    worker: int
    number: int


class Page(NamedTuple):
    """Room for a batch; `slot` is where it lies, if that is in a ring."""

    images_BCHW: Tensor
    slot: Slot | None


def fresh_pages(size: int, channels: int, side: int) -> Iterator[Page]:
    """Each in memory of its own, for a process that reads for itself."""
    while True:
        yield Page(torch.empty((size, channels, side, side), dtype=torch.uint8), None)


def shared_bytes(workers: int, size: int, channels: int, side: int) -> int:
    """What a ring takes of the machine's shared memory."""
    return workers * SLOTS * size * channels * side * side


class Ring:
    """Shared memory for so many loader processes, with batches of `size` images.

    Raises `UserError` where the machine has too little of it.
    """

    def __init__(self, workers: int, size: int, channels: int, side: int) -> None:
        shape = (workers, SLOTS, size, channels, side, side)
        try:
            self.images_WSBCHW = torch.empty(shape, dtype=torch.uint8).share_memory_()
            self.number_WS = torch.full(shape[:2], -1, dtype=torch.int64).share_memory_()
        except RuntimeError as error:
            raise UserError(
                f"no shared memory for {workers} loader processes with batches of {size} "
                f"({str(error).splitlines()[0]}); give the machine more of /dev/shm, or use fewer data.workers"
            ) from None

    def pages(self, worker: int) -> Iterator[Page]:
        """In a loader process: its slots, in turns."""
        for number in count():
            place = number % SLOTS
            self.number_WS[worker, place] = number
            yield Page(self.images_WSBCHW[worker, place], Slot(worker, number))

    def page(self, slot: Slot) -> Page:
        """In the process of the step: the page, to be copied before the next batch is asked for."""
        place = slot.number % SLOTS
        if self.number_WS[slot.worker, place] != slot.number:
            raise RuntimeError(f"batch {slot.number} of loader process {slot.worker} is gone; report this")
        return Page(self.images_WSBCHW[slot.worker, place], slot)
