"""Process groups, how to end them, and the description of exit statuses."""

import os
import signal
import subprocess
from contextlib import suppress


def end_group(process: "subprocess.Popen[bytes]", patience: float = 10.0) -> None:
    """Send SIGTERM to the group that the process leads, and SIGKILL to the rest after `patience` seconds."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(status: int) -> str:
    """Describe an exit status in words.

    A launcher passes on its child's end as its own: SIGKILL is -9 to the process that waited, 247 (256 - 9) if that
    exits with it, and 137 (128 + 9) in a shell.
    """
    for number in (-status, 256 - status, status - 128):
        if 0 < number < signal.NSIG:
            with suppress(ValueError):
                name = signal.Signals(number).name
                return f"killed ({name}){': out of memory?' if name == 'SIGKILL' else ''}"
    return f"exit status {status}"
