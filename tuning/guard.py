"""Between a Ray worker and the launcher: `python guard.py COMMAND...` runs the command and ends it with itself.

A worker that ends kills its children without a word (SIGKILL), and a launcher killed so leaves its ranks behind. This
process is the child that is killed; the kernel then tells the launcher, which ends its ranks. Standard library only:
it starts in milliseconds.
"""

import ctypes
import signal
import subprocess
import sys


def end_with_parent() -> None:
    """In a new child, on Linux: SIGTERM when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], preexec_fn=end_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
