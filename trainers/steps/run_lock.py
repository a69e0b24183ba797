"""A lock for one trainer at a time in a run folder; rank 0 holds it, for any number of machines."""

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
    """Hold the folder until the block ends. Collective; nothing is written before.

    The lock belongs to the kernel: it ends with rank 0's process, however that ends.

    Args:
        unchanged: raises UserError if the folder, once locked, differs from what all ranks have seen.

    Raises:
        UserError: on rank 0 if the lock is taken; the other ranks end silently.
    """
    with ExitStack() as lock:
        refusal = _refusal(lock, run_dir, unchanged) if world.rank == 0 else None
        if world.sums(torch.tensor([float(refusal is not None)])).item():
            if refusal is not None:
                raise refusal
            # The launcher ends all ranks of a machine after the first exit: let it see rank 0 first.
            time.sleep(ranks.GRACE_SECONDS)
            raise SystemExit(EXIT_USER_ERROR)
        yield


def _refusal(lock: ExitStack, run_dir: Path, unchanged: Callable[[], None]) -> UserError | None:
    try:
        lock.enter_context(held(run_dir))
        unchanged()
    except UserError as error:
        return error
    return None
