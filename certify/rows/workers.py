"""The image list over several processes: batches are distributed and returned in order.

Every process loads the hand-over and measures its weights once. It computes a batch as a single process would, with one
thread or on a GPU of its own. Rows therefore do not depend on the number of processes, beyond the rounding of sums.
"""

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from torch import Tensor

from certify.rows.row_schema import Row
from certizoo import UserError
from certizoo.config.schema import Ge, Le
from certizoo.memory import keep_freed_memory
from zoo.user_models import trust, trusted

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

Batch = tuple[list[str], Tensor, Tensor]  # keys, images (B, C, H, W), labels (B,)
Work = Callable[[Batch], list[Row]]
Workers = Annotated[int, Ge(1), Le(1024)] | None
Make = Callable[[Path, int], Work]  # (hand-over, worker number) -> work
PATIENCE = 2.0  # seconds that idle workers get to end
HERE, RAY = "here", "ray"


@dataclass(frozen=True)
class Crew:
    """The processes that compute rows, on this machine or as tasks of a Ray cluster, and their device 'cpu' or 'cuda'.

    `workers` None means one process here, or as many as fit the cluster.
    """

    on: str = HERE
    workers: Workers = None
    device: str = "cpu"


Context = ForkServerContext | SpawnContext

# A fork of this process would share its threads and locks. A fork server that has only imported the slow modules forks
# quickly. CUDA does not survive a fork, so workers with a GPU are spawned and import the modules themselves.
CONTEXTS: dict[str, Context] = {"cpu": get_context("forkserver"), "cuda": get_context("spawn")}
CONTEXTS["cpu"].set_forkserver_preload(["torch._dynamo", "pandas"])  # torchvision imports torch._dynamo


def by_processes(handover: Path, make: Make, crew: Crew, batches: Iterable[Batch]) -> Generator[list[Row], None, None]:
    """Yield the rows of every batch, by crew.workers processes.

    The caller must close the generator: its processes must end when a full disk or Ctrl-C stops the reader. Raises
    UserError if a process is killed.
    """
    workers, context = crew.workers or 1, CONTEXTS[crew.device]
    numbers = context.SimpleQueue()
    for worker in range(workers):
        numbers.put(worker)
    pool = ProcessPoolExecutor(
        workers, context, initializer=_start, initargs=(partial(make, handover), numbers, trusted())
    )
    others = active_children()
    waiting: deque[Future[list[Row]]] = deque()
    patience = 0.0
    try:
        for keys, images, labels in batches:
            waiting.append(pool.submit(_rows, keys, images.numpy(), labels.numpy()))
            if len(waiting) > 2 * workers:  # keeps all busy without all images in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        patience = PATIENCE
    except BrokenProcessPool:
        raise UserError(
            "a worker was killed, perhaps for lack of memory; the same command continues after the last row; set "
            "fewer workers or a smaller batch_size if it happens again"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():  # those in the middle of a batch that is no longer needed
            if process not in others and isinstance(process, context.Process):
                process.join(patience)  # an idle one ends by itself and leaves no locks behind
                process.terminate()


_work: Work | None = None  # of this process, if it is a worker


def _start(make: Callable[[int], Work], numbers: "SimpleQueue[int]", functions: Sequence[str]) -> None:
    global _work
    trust(*functions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    keep_freed_memory()
    _work = make(numbers.get())


def _end_with_parent() -> None:
    """Exit when the parent is killed; otherwise a worker would wait for its next batch forever, with all its memory."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _rows(keys: list[str], images: np.ndarray, labels: np.ndarray) -> list[Row]:
    assert _work is not None
    return _work((keys, torch.from_numpy(images), torch.from_numpy(labels)))
