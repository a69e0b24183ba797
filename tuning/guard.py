"""Between a Ray worker and its trial: `python guard.py COMMAND...` runs the command and ends it with itself.

    worker -> guard -> launcher -> ranks          worker -> guard -> guard -> the only rank

A worker that ends kills its children without a word (SIGKILL), and a launcher or a rank killed so leaves its own
children behind. The first guard is the child that is killed; the kernel then tells who comes next (SIGTERM), and it
ends the rest. Standard library only: it starts in milliseconds.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

PATIENCE_SECONDS = 30  # the launcher's


class Told(Exception):
    """This process was told to end (SIGTERM)."""


def end_with_parent() -> None:
    """In a new child, on Linux: SIGTERM when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def told(*_: object) -> None:
    """The signal's handler, once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Told


def main() -> int:
    """The command's exit status. Told to end, the command has time to; then nothing of the process group is left."""
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
