"""This process among the others, before and after there is a process group."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from certizoo import UserError
from certizoo.errors import EXIT_USER_ERROR

GRACE_SECONDS = 5.0


def place() -> tuple[int, int, int]:
    """(rank, local rank, world size) as the launcher set them; (0, 0, 1) without one."""
    rank, local, size = (int(os.environ.get(key, default)) for key, default in _DEFAULTS.items())
    return rank, local, size


_DEFAULTS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@contextmanager
def said_once() -> Iterator[None]:
    """Around what fails on all ranks alike: one rank of each machine speaks, the others leave without a word.

    They wait a little first: a launcher that sees one rank go ends the rest, perhaps before the message is out.
    """
    try:
        yield
    except UserError:
        if place()[1] == 0:
            raise
        time.sleep(GRACE_SECONDS)
        raise SystemExit(EXIT_USER_ERROR) from None
