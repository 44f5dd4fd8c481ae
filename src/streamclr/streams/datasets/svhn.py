"""Street View House Numbers, format 2 (cropped digits), from its official .mat files."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from streamclr.base.errors import UserError
from streamclr.streams.datasets.images import Splits

SVHN_CLASSES = tuple("0123456789")
# Types of elements in a MATLAB 5 file. scipy's reader knows more, but crashes the process on some damaged files.
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}


def read_svhn(place: Path) -> Splits | None:
    """The dataset from a folder with train_32x32.mat and test_32x32.mat; None if neither is there."""
    files = [(place.parent if place.is_file() else place) / f"{split}_32x32.mat" for split in ("train", "test")]
    if not any(file.exists() for file in files) or (place.is_file() and place not in files):
        return None
    return Splits(*_read(files[0]), *_read(files[1]))


def _read(file: Path) -> tuple[np.ndarray, np.ndarray]:
    if not file.exists():
        raise UserError(f"no file {file}: SVHN needs it beside the other")
    try:
        content = _arrays(file.read_bytes())
        images, labels = content["X"], content["y"].ravel()
    except KeyError as error:
        raise UserError(f"{file} has no {error}: SVHN's files have X and y, get it again") from None
    except (OSError, ValueError, IndexError, OverflowError, MemoryError, struct.error, zlib.error) as error:
        raise UserError(f"{file} cannot be read ({error}): get it again") from None
    if images.dtype != np.uint8 or images.shape[:3] != (32, 32, 3) or images.shape[3:] != labels.shape:
        holds = f"X {images.shape} of {images.dtype} and y {labels.shape}"
        raise UserError(f"{file} holds {holds}, not 32 x 32 x 3 x n of uint8 and n: get it again")
    if not np.isin(labels, range(1, 11)).all() or not len(labels):
        raise UserError(f"{file} has labels that are not 1 to 10, or none: get it again")
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10  # 0 is stored as 10


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    """The arrays X and y of a MATLAB 5 file, compressed or not; others are ignored."""
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if order is None or data[125 if order == "<" else 124] != 1:
        hdf5 = data.startswith((b"MATLAB 7.3", b"\x89HDF"))
        raise ValueError(f"it is {'MATLAB 7.3 in HDF5, ' if hdf5 else ''}not MATLAB 5 as the official file is")
    found = {}
    for kind, content in _elements(memoryview(data)[128:], order):
        if kind == _COMPRESSED:
            ((kind, content),) = _elements(memoryview(zlib.decompress(content)), order)
        if kind == _MATRIX and (array := _array(content, order)):
            found[array[0]] = array[1]
    return found


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Each element's kind and content; those inside a matrix begin at multiples of eight bytes."""
    start = 0
    while start < len(data):
        kind, size = struct.unpack_from(f"{order}II", data, start)
        begin = start + 8
        if kind >> 16:  # up to four bytes of content, inside the tag
            kind, size, begin = kind & 0xFFFF, kind >> 16, start + 4
        end = begin + size
        if end > len(data) or (begin == start + 4 and size > 4):
            raise ValueError("it is truncated or damaged")
        yield kind, data[begin:end]
        start = end if kind == _COMPRESSED else start + 8 if begin == start + 4 else end + -size % 8


def _array(content: memoryview, order: str) -> tuple[str, np.ndarray] | None:
    """Name and numbers of a matrix; None if it is neither X nor y."""
    parts = _elements(content, order)
    (_, flags), (_, shape), (_, name) = (next(parts, (0, content[:0])) for _ in range(3))
    title = bytes(name).decode("latin1")
    if title not in ("X", "y"):
        return None
    kind, numbers = next(parts, (0, content[:0]))
    # 6 to 15 are the classes of numbers; MATLAB stores them in the smallest type that holds them
    if len(flags) < 4 or not 6 <= struct.unpack(f"{order}I", flags[:4])[0] & 0xFF <= 15 or kind not in _NUMBERS:
        raise ValueError(f"{title} does not hold plain numbers")
    return title, np.frombuffer(numbers, order + _NUMBERS[kind]).reshape(np.frombuffer(shape, f"{order}i4"), order="F")
