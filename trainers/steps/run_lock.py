"""One trainer at a time in a run folder: rank 0 holds it, whatever number of machines there are."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from certizoo import UserError
from certizoo.errors import EXIT_USER_ERROR
from trainers import ranks
from trainers.engine.world import World
from trainers.job.folder import held


@contextmanager
def run_lock(run_dir: Path, world: World, unchanged: Callable[[], None]) -> Iterator[None]:
    """Collective: the folder is this run's until the end, and nothing is written before. `unchanged` raises UserError
    where the folder, now that it is held, is not as all ranks have seen it.

    Raises UserError on rank 0 where it cannot be had; the other ranks end without a word. The lock is the kernel's: it
    goes with rank 0's process, however that ends.
    """
    with ExitStack() as lock:
        refusal = _refusal(lock, run_dir, unchanged) if world.rank == 0 else None
        if world.sums(torch.tensor([float(refusal is not None)])).item():
            if refusal is not None:
                raise refusal
            time.sleep(ranks.GRACE_SECONDS)  # the launcher, which ends a machine's ranks with the first, sees rank 0
            raise SystemExit(EXIT_USER_ERROR)
        yield


def _refusal(lock: ExitStack, run_dir: Path, unchanged: Callable[[], None]) -> UserError | None:
    try:
        lock.enter_context(held(run_dir))
        unchanged()
    except UserError as error:
        return error
    return None
