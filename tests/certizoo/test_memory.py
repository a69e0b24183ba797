"""The process keeps its freed memory for its next allocation."""

import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from certizoo.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        bytearray(2**26)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

hasattr(ctypes.CDLL(None), "mallopt") or exit()
keep_freed_memory()
bytearray(2**26)
print(faults())
"""


def test_what_was_freed_is_not_fetched_again() -> None:
    """Allocate 64 MiB twenty times; without the setting every 4 KiB would cost a page fault each time."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("another allocator than glibc's")
    assert int(done.stdout) < 100
