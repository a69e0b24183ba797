"""Exit statuses in words."""

import signal
import subprocess
import sys

import pytest

from certizoo.processes import ending


@pytest.mark.parametrize("status", [-9, 247, 137])
def test_a_killed_process_is_called_killed(status: int) -> None:
    """The status may come from this process, DeepSpeed's launcher or a shell."""
    assert ending(status) == "killed (SIGKILL): out of memory?"


def test_other_ends() -> None:
    assert ending(-signal.SIGTERM) == ending(256 - signal.SIGTERM) == "killed (SIGTERM)"
    assert [ending(status) for status in (0, 1, 2, 77)] == [f"exit status {status}" for status in (0, 1, 2, 77)]


def test_the_launchers_status_is_the_one_meant() -> None:
    """The launcher ends by sys.exit(-9)."""
    child = subprocess.run([sys.executable, "-c", "import sys; sys.exit(-9)"], timeout=30)
    assert ending(child.returncode) == "killed (SIGKILL): out of memory?"
