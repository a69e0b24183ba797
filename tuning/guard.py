"""A process between a Ray worker and its trial: `python guard.py COMMAND...` runs a command and ends it at its own end.

    worker -> guard -> launcher -> ranks          worker -> guard -> guard -> the only rank

A worker that ends kills its children with SIGKILL, and a launcher or rank that is killed leaves its own children
running. The first guard is the child that is killed. The kernel then signals the second one (SIGTERM), and it ends the
rest. Standard library only, so that it starts in milliseconds.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

PATIENCE_SECONDS = 30  # the launcher's patience


class Told(Exception):
    """This process received SIGTERM."""


def end_with_parent() -> None:
    """Request SIGTERM for a new child when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def told(*_: object) -> None:
    """Handle the signal once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Told


def main() -> int:
    """Run the command and return its exit status.

    After a signal the command has time to end; then the rest of the process group is killed.
    """
    child = subprocess.Popen(sys.argv[1:], preexec_fn=end_with_parent)
    signal.signal(signal.SIGTERM, told)
    try:
        return child.wait()
    except Told:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE_SECONDS)
        os.killpg(0, signal.SIGKILL)  # this process as well
        raise


if __name__ == "__main__":
    sys.exit(main())
