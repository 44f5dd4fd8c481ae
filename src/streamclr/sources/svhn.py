"""Street View House Numbers, format 2 (cropped digits), from its official .mat files."""

from pathlib import Path

import numpy as np

from streamclr.errors import UserError
from streamclr.sources.dataset import Splits

SVHN_CLASSES = tuple("0123456789")


def read_svhn(place: Path) -> Splits | None:
    """The dataset in a folder with train_32x32.mat and test_32x32.mat; None if neither is there."""
    folder = place.parent if place.is_file() else place
    files = [folder / "train_32x32.mat", folder / "test_32x32.mat"]
    if not any(file.exists() for file in files):
        return None
    return Splits(*_read(files[0]), *_read(files[1]))


def _read(file: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError("SVHN's files need scipy: pip install -c constraints.txt 'streamclr[svhn]'") from None
    if not file.exists():
        raise UserError(f"no file {file}: SVHN needs it beside the other")
    try:
        content = loadmat(file)
        images, labels = content["X"], content["y"].ravel()
    except Exception as error:  # noqa: BLE001  scipy raises nearly anything on a damaged file
        raise UserError(f"{file} cannot be read ({error}): get it again") from None
    if images.dtype != np.uint8 or images.shape[:3] != (32, 32, 3) or images.shape[3:] != labels.shape:
        raise UserError(f"{file} holds X {images.shape} and y {labels.shape}, not 32 x 32 x 3 x n and n: get it again")
    if labels.dtype.kind not in "uif" or not np.isin(labels, range(1, 11)).all() or not len(labels):
        raise UserError(f"{file} has labels that are not 1 to 10, or none: get it again")
    digits = labels.astype(np.int64) % 10  # the digit 0 is stored as 10
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), digits
