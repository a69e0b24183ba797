"""A watchdog that ends a run that makes no progress: a hanging loader, a stopped rank, a lost network.

Each rank has a thread that expects a heartbeat after every step. After `patience` seconds without one it prints in one
line where the rank is, writes all stacks to the rank's log, and ends the process; the launcher ends the others. A rank
that only waits for other ranks does so `grace` seconds later, after the rank that blocks it.
"""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trainers.ranks import GRACE_SECONDS

HERE = str(Path(__file__).resolve().parents[2])
WAITING = ("/torch/distributed/", "/deepspeed/")  # files of a rank that waits for other ranks
STATUS = 1


class Watchdog:
    """A watchdog; call `heartbeat` after every step. `patience` and `grace` are in seconds."""

    def __init__(self, patience: float, rank: int, log: Path, grace: float = GRACE_SECONDS) -> None:
        self.patience, self.rank, self.log, self.grace = patience, rank, log, grace
        self._done = threading.Event()
        self._main = threading.main_thread().ident
        self.heartbeat()

    def heartbeat(self) -> None:
        """Record that a step was made."""
        self._last = time.monotonic()

    @contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        """End the process during the block if heartbeats stop."""
        self.heartbeat()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        try:
            yield self
        finally:
            self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(min(self.patience / 10, 5.0)):
            silent = time.monotonic() - self._last
            if silent > self.patience + self.grace * self._waits_for_others():
                self._end()

    def _waits_for_others(self) -> bool:
        return any(words in frame.filename for frame in self._stack() for words in WAITING)

    def _stack(self) -> traceback.StackSummary:
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        return traceback.extract_stack(frame)

    def _end(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as file:
            faulthandler.dump_traceback(file)
        what = "waits for another rank that does not answer" if self._waits_for_others() else "is stuck"
        sys.stderr.write(
            f"error: no step in {self.patience / 60:.3g} minutes (deepspeed.timeout_minutes): rank {self.rank} {what} "
            f"at {self._where()}, its stacks are in {self.log}; repeat the command with resume=auto\n"
        )
        sys.stderr.flush()
        os._exit(STATUS)

    def _where(self) -> str:
        """Return the innermost line of this project that the rank executes."""
        own = [frame for frame in self._stack() if frame.filename.startswith(HERE) and ".venv" not in frame.filename]
        inner = own[-1] if own else self._stack()[-1]
        return f"{os.path.relpath(inner.filename, HERE)}:{inner.lineno} ({inner.name})"
