"""Arithmetic on indices."""

import numpy as np


def evenly_spaced(n: int, most: int) -> np.ndarray:
    """At most `most` of the indices below n, from the first to the last, as int64.

    They are those of `torch.linspace(0, n - 1, m).long()`, which rounds a fused multiply-add to float32 and counts from
    the nearer end: draws of images that were made with it stay the same.
    """
    m = min(n, most)
    if m < 2:
        return np.zeros(m, np.int64)
    i = np.arange(m)
    step = float(np.float32(n - 1) / np.float32(m - 1))
    exact = np.where(i < m // 2, step * i, np.float32(n - 1) - step * (m - 1 - i))
    return exact.astype(np.float32).astype(np.int64)
