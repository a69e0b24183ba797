"""The ranks of a run as the launcher set them, and errors common to all ranks; needs no process group."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from certizoo import UserError
from certizoo.errors import EXIT_USER_ERROR

PEER_GONE = ("by peer", "Broken pipe")  # gloo's words for a closed connection
GRACE_SECONDS = 5.0
PATIENCE_SECONDS = 60.0  # on a busy machine the first rank may be this much later


def rank() -> int:
    """Return the rank of this process, as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank among the ranks of this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of ranks on all machines; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def said_once() -> Iterator[None]:
    """Raise a UserError that all ranks meet on one rank of each machine only; the others end silently.

    They wait until the launcher ends them. It does so when it sees one rank end, perhaps before the message is out.
    """
    try:
        yield
    except UserError:
        if local_rank() == 0:
            raise
        # During training the signal is a stop request (trainers/engine/preempt.py).
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE_SECONDS)
        raise SystemExit(EXIT_USER_ERROR) from None
