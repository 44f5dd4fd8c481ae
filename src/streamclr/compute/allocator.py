"""Settings of the C library's allocator: keep the memory that a step frees, or return it to the system."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Allocate tensors from the heap and never return it, instead of mapping them anew each time.

    Every step allocates the same tensors; with glibc's defaults a quarter of its time is page faults. The largest are
    mapped all the same: a step takes a twentieth longer, and a tenth less memory, because the heap has no holes of
    their size. Changes no result. Only for our own processes (the command line): a library must not change its host's
    allocator.
    """
    _set_malloc(mmap_threshold=40 * 2**20, trim_threshold=2**31 - 1)


def release_freed_memory() -> None:
    """Map every large tensor separately, so that freed memory is returned at once and nothing is fragmented.

    For a memory limit; a step takes a third longer. With a threshold of 1 MiB small chunks would go to the heap, and
    the peak would vary by 20 MiB.
    """
    _set_malloc(mmap_threshold=2**17, trim_threshold=2**22)


def _set_malloc(mmap_threshold: int, trim_threshold: int) -> None:
    """Does nothing without glibc."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_THRESHOLD, mmap_threshold)
        libc.mallopt(M_TRIM_THRESHOLD, trim_threshold)
