"""The handling of freed memory in a process."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Keep freed memory until the process ends, for CPU loops that need the same memory again and again.

    glibc would return it to the system each time and fetch it again page by page, a tenth of a training pass. Other
    allocators are unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, -1)  # never
        mallopt(M_MMAP_MAX, 0)  # everything comes from the heap, which keeps it
