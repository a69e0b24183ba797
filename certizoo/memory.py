"""The memory of this process: its peak, and the handling of what it freed."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def peak_memory() -> int:
    """Return the most memory that this process has had, in MiB; 0 on Windows, which does not say."""
    if os.name == "nt":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)


def keep_freed_memory() -> None:
    """Keep freed memory until the process ends, for CPU loops that need the same memory again and again.

    glibc would return it to the system each time and fetch it again page by page, a tenth of a training pass. Other
    allocators are unchanged.
    """
    mallopt = None if os.name == "nt" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, -1)  # never
        mallopt(M_MMAP_MAX, 0)  # everything comes from the heap, which keeps it
