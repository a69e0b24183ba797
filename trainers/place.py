"""This process among the others, before and after there is a process group."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from certizoo import UserError
from certizoo.errors import EXIT_USER_ERROR

PEER_GONE = ("by peer", "Broken pipe")  # gloo's words for a closed connection
GRACE_SECONDS = 5.0
PATIENCE_SECONDS = 60.0  # on a busy machine the first rank may be so much later


def place() -> tuple[int, int, int]:
    """(rank, local rank, world size) as the launcher set them; (0, 0, 1) without one."""
    rank, local, size = (int(os.environ.get(key, default)) for key, default in _DEFAULTS.items())
    return rank, local, size


_DEFAULTS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@contextmanager
def said_once() -> Iterator[None]:
    """Around what fails on all ranks alike: one rank of each machine speaks, the others leave without a word.

    They wait until the launcher ends them, which it does when it sees one rank go, perhaps before the message is out.
    """
    try:
        yield
    except UserError:
        if place()[1] == 0:
            raise
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # a run in its steps takes it for a request (trainers/engine/preempt.py)
        time.sleep(PATIENCE_SECONDS)
        raise SystemExit(EXIT_USER_ERROR) from None
