"""Stop requests: SIGTERM (clusters, launchers), SIGUSR1 (Slurm) or Ctrl-C ends a run after a step, resumable.

    signal -> a flag on this rank -> after each step the flags of all ranks are summed -> checkpoint -> exit status 0,
    after Ctrl-C 130 so that a shell does not go on with the next command

One signal on any rank is enough. The `deepspeed` launcher sends SIGTERM to one rank after another, waits up to 30 s for
each, and exits with 1 whatever the ranks return. The outer `deepspeed` command forwards nothing and leaves its ranks
running; they notice that it has ended. SIGUSR1 would kill both commands unless they start with the signal ignored:
`#SBATCH --signal=USR1@120`, `trap '' USR1`, `srun deepspeed ...` exits with 0.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from trainers.engine.launcher import ended, launchers
from trainers.engine.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST = 5.0  # seconds: a cluster signals every process, and the launcher forwards its own signal


class Stopped(SystemExit):
    """The run stopped as requested, with a checkpoint. Exit status 0, or 130 after Ctrl-C."""

    def __init__(self, signum: int | None = None) -> None:
        super().__init__(128 + signal.SIGINT if signum == signal.SIGINT else 0)


class Request:
    """A stop request and its signal, if one has arrived. A second signal ends the process at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.signum: int | None = None
        self._at = 0.0
        self._launchers = launchers()

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.reason is None:
            self.reason, self.signum, self._at = signal.Signals(signum).name, signum, time.monotonic()
        elif time.monotonic() - self._at > SAME_REQUEST:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def agreed(self, world: World) -> bool:
        """Return True if any rank has a request. Collective."""
        if self.reason is None and any(map(ended, self._launchers)):
            self.reason = "the end of its launcher"
        return bool(world.sums(torch.tensor([float(self.reason is not None)])).item())


@contextmanager
def listening() -> Iterator[Request]:
    """Turn signals into a `Request` during the block; a request that nobody acted on ends the process afterwards."""
    request = Request()
    caught = [number for number in SIGNALS if number != signal.SIGINT or _listens_to_keys()]
    before = {number: signal.signal(number, request.on_signal) for number in caught}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if request.signum is not None:
        os.kill(os.getpid(), request.signum)


def _listens_to_keys() -> bool:
    """Return False for a run in the background of a script, which starts with Ctrl-C ignored."""
    return signal.getsignal(signal.SIGINT) != signal.SIG_IGN
