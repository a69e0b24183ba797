"""The memory of a rank on CPUs: what a step frees, the next one takes again.

glibc hands large blocks back when they are freed, and the kernel clears them page by page when they are next touched.
The activations of small models are such blocks: a step of cert_gpsa_vit_c10 (batch 128, `lmce`) met 12,000 to 24,000
page faults, 12 to 15 % of its time; now some hundred (tests/trainers/engine/test_memory.py).
"""

import ctypes
import os

# Parameters of mallopt (malloc.h) by their names in the environment. glibc refuses more than 32 MB of the first.
THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1)}


def keep_freed_memory() -> None:
    """For this process, from now on. Nothing where malloc is not glibc's; what the environment says wins."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for variable, (parameter, size) in THRESHOLDS.items():
        if variable not in os.environ:
            mallopt(parameter, size)
