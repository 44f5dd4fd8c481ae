"""The C library's allocator, told to keep what a step frees for the next step."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Serve large tensors from the heap and never give it back, instead of mapping them anew each time.

    A step allocates the same tensors again and again; with glibc's defaults a quarter of its time is page faults.
    Changes no result. For a process of our own (the command line): a library leaves its host's allocator alone.
    Elsewhere than on glibc it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
