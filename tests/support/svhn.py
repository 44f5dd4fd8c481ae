"""Small SVHN files."""

import numpy as np
from scipy.io import savemat


def write(directory, n=9, compressed=True):
    rng, made = np.random.default_rng(0), {}
    for split in ("train", "test"):
        images, labels = rng.integers(0, 256, (32, 32, 3, n), np.uint8), rng.integers(1, 11, (n, 1), np.uint8)
        savemat(directory / f"{split}_32x32.mat", {"X": images, "y": labels}, do_compression=compressed)
        made[split] = images, labels
    return made
