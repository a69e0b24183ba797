"""The image list over several processes: batches are dealt out in order and come back in order.

Every process loads the hand-over and measures its weights once, and computes a batch as one process alone would, with
one thread, or on a GPU, of which each takes the next. So rows do not depend on how many there are, beyond the rounding
of sums.
"""

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from certify.rows.row_schema import Row
from certizoo import UserError
from certizoo.memory import keep_freed_memory

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

Batch = tuple[list[str], Tensor, Tensor]  # keys, images (B, C, H, W), labels (B,)
Work = Callable[[Batch], list[Row]]
Make = Callable[[Path, int], Work]  # of a hand-over, for the worker of a number
HERE, RAY = "here", "ray"
PLACES = (HERE, RAY)


@dataclass(frozen=True)
class Crew:
    """Processes of this machine, or actors of a Ray cluster; how many, on 'cpu' or 'cuda'. None: one here, and of a
    cluster as many as it has room for."""

    on: str = HERE
    workers: int | None = None
    device: str = "cpu"


Context = ForkServerContext | SpawnContext

# A fork of this process would share its threads and locks. A server that has only imported what takes long forks in no
# time; CUDA does not survive a fork, so that workers with a GPU import for themselves.
CONTEXTS: dict[str, Context] = {"cpu": get_context("forkserver"), "cuda": get_context("spawn")}
CONTEXTS["cpu"].set_forkserver_preload(["torch._dynamo", "pandas"])  # torchvision imports the first


def by_processes(handover: Path, make: Make, crew: Crew, batches: Iterable[Batch]) -> Generator[list[Row], None, None]:
    """The rows of every batch, by crew.workers processes. The generator is to be closed: what it started must end when
    a full disk or Ctrl-C ends its reader. Raises UserError where a process is killed."""
    workers, context = crew.workers or 1, CONTEXTS[crew.device]
    numbers = context.SimpleQueue()
    for worker in range(workers):
        numbers.put(worker)
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(partial(make, handover), numbers))
    others = active_children()
    waiting: deque[Future[list[Row]]] = deque()
    try:
        for keys, images, labels in batches:
            waiting.append(pool.submit(_rows, keys, images.numpy(), labels.numpy()))
            if len(waiting) > 2 * workers:  # enough for all to be busy, and not all images in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker was killed, for want of memory perhaps; the same command goes on after the last row, with "
            "fewer workers or a smaller batch_size if need be"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():  # those that are in the middle of a batch nobody waits for
            if process not in others and isinstance(process, context.Process):
                process.terminate()


_work: Work | None = None  # of this process, where it is a worker


def _start(make: Callable[[int], Work], numbers: "SimpleQueue[int]") -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    keep_freed_memory()
    _work = make(numbers.get())


def _end_with_parent() -> None:
    """A killed parent tells nobody: a worker would wait for its next batch for ever, with all its memory."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _rows(keys: list[str], images: np.ndarray, labels: np.ndarray) -> list[Row]:
    assert _work is not None
    return _work((keys, torch.from_numpy(images), torch.from_numpy(labels)))
