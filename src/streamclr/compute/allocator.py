"""The C library's allocator: keep what a step frees for the next step, or give it back."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Serve large tensors from the heap and never give it back, instead of mapping them anew each time.

    A step allocates the same tensors again and again; with glibc's defaults a quarter of its time is page faults.
    Changes no result. For a process of our own (the command line): a library leaves its host's allocator alone.
    """
    _set_malloc(mmap_threshold=2**30, trim_threshold=2**31 - 1)


def release_freed_memory() -> None:
    """Map every large tensor by itself, so that what is freed is given back at once and nothing is fragmented.

    The price of keeping to a budget of memory: a step takes a third longer. With the threshold at 1 MiB small chunks
    go to the heap, where chance decides on 20 MiB.
    """
    _set_malloc(mmap_threshold=2**17, trim_threshold=2**22)


def _set_malloc(mmap_threshold: int, trim_threshold: int) -> None:
    """Elsewhere than on glibc this does nothing."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_THRESHOLD, mmap_threshold)
        libc.mallopt(M_TRIM_THRESHOLD, trim_threshold)
