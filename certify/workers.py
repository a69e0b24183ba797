"""The image list over several processes: batches are dealt out in order and come back in order.

Every process loads the hand-over and measures its weights once, and computes a batch as one process alone would, with
one thread, or on a GPU, of which each takes the next. So rows do not depend on how many there are, beyond the rounding
of sums.
"""

import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

import zoo
from certify.api import certifier
from certify.bake import LOGIT_TOLERANCE, logit_differences
from certify.certificate import Certifier
from certify.evaluate import Row, rows_of
from certify.served_adjoint import ServedAdjoint
from certizoo import UserError

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from certify.stage import Settings

# A fork of this process would share its threads and locks. A server that has only imported what takes long forks in no
# time; CUDA does not survive a fork, so that workers with a GPU import for themselves.
CONTEXTS: dict[str, ForkServerContext | SpawnContext]
CONTEXTS = {"cpu": get_context("forkserver"), "cuda": get_context("spawn")}
CONTEXTS["cpu"].set_forkserver_preload(["torch._dynamo", "pandas"])  # torchvision imports the first
DEVICES = ("cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COARSE = 0.25  # LOGIT_TOLERANCE of bfloat16, whose rounding is part of the certificate
Batch = tuple[list[str], Tensor, Tensor]


class InType(nn.Module):
    """A model of another type between float32 images and float32 logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dtype = model, next(model.parameters()).dtype

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.model(x_BCHW.to(self.dtype)).float()


def device_of(worker: int, name: str) -> torch.device:
    """The device of one of the processes. Raises UserError where there is none of that name."""
    if name == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if not gpus:
        raise UserError("device=cuda: torch finds no GPU on this machine; use device=cpu")
    return torch.device("cuda", worker % gpus)


class Prover:
    """A hand-over and its certifier, on one device: a batch in, its rows out."""

    def __init__(self, handover: Path, settings: "Settings", worker: int = 0) -> None:
        self.device = device_of(worker, settings.device)
        self.model, self.config = zoo.handover.load(handover)
        self.model.to(self.device)
        self.settings = settings
        self.certifier: Certifier
        if settings.served_dtype is None:
            self.certifier = certifier(self.model, settings.method)
        else:
            dtype = DTYPES[settings.served_dtype]
            self.certifier, self.model = ServedAdjoint(self.model, dtype), InType(self.model.to(dtype))

    def __call__(self, batch: Batch) -> list[Row]:
        """The rows of `certify.evaluate`, and how far the served logits of each image are from the certified ones."""
        keys, images, labels = batch[0], batch[1].to(self.device), batch[2].to(self.device)
        tolerance = COARSE if self.settings.served_dtype == "bfloat16" else LOGIT_TOLERANCE
        differences = logit_differences(self.model, self.certifier.baked, images, tolerance).tolist()
        rows = rows_of(
            self.certifier,
            self.model,
            keys,
            images,
            labels,
            method=self.settings.method,
            eps_grid=self.settings.eps,
            attack=self.settings.attack,
            explain_at=self.settings.headline_eps,
        )
        return [{**row, "served_difference": difference} for row, difference in zip(rows, differences, strict=True)]


def in_order(handover: Path, settings: "Settings", batches: Iterable[Batch]) -> Iterator[list[Row]]:
    """The rows of every batch by `settings.workers` processes. Raises UserError where one of them is killed."""
    context = CONTEXTS[settings.device]
    numbers = context.SimpleQueue()
    for worker in range(settings.workers):
        numbers.put(worker)
    pool = ProcessPoolExecutor(settings.workers, context, initializer=_start, initargs=(handover, settings, numbers))
    others = active_children()
    waiting: deque[Future[list[Row]]] = deque()
    try:
        for keys, images, labels in batches:
            waiting.append(pool.submit(_rows, keys, images.numpy(), labels.numpy()))
            if len(waiting) > 2 * settings.workers:  # enough for all to be busy, and not all images in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker of the certify stage was killed, for want of memory perhaps; the same command goes on after the "
            "last row, with a smaller certify.workers or batch_size if need be"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():  # those that are in the middle of a batch nobody waits for
            if process not in others and isinstance(process, context.Process):
                process.terminate()


_prover: Prover | None = None  # of this process, where it is a worker


def _start(handover: Path, settings: "Settings", numbers: "SimpleQueue[int]") -> None:
    global _prover
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    torch.set_num_threads(1)
    _prover = Prover(handover, settings, numbers.get())


def _rows(keys: list[str], images: np.ndarray, labels: np.ndarray) -> list[Row]:
    assert _prover is not None
    return _prover((keys, torch.from_numpy(images), torch.from_numpy(labels)))
