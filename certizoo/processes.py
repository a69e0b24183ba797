"""Processes with groups of their own, and their end."""

import os
import signal
import subprocess
from contextlib import suppress


def end_group(process: "subprocess.Popen[bytes]", patience: float = 10.0) -> None:
    """SIGTERM to the group that the process leads, and SIGKILL to what is left of it after `patience` seconds."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
