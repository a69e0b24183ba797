"""What a process does with the memory that it frees."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Until the process ends. For loops on a CPU that need the same memory again and again: glibc would give it back to
    the system each time, and fetch it anew page by page, a tenth of a training pass. Other allocators stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, -1)  # never
        mallopt(M_MMAP_MAX, 0)  # everything comes from the heap, which keeps it
