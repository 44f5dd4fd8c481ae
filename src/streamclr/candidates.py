"""The images that a person may be asked about: a uniform draw of the stream so far, in a file that never grows."""

import hashlib
import json
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamclr.errors import UserError

EACH = 8  # candidates for every image that is asked about, where the disk has room for them


class Budget(NamedTuple):
    """How many images a person is asked about: a number, or a share of those seen in a stream without an end."""

    images: int | None
    share: float | None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        number, is_share = text.strip().removesuffix("%"), text.strip().endswith("%")
        with suppress(ValueError):
            if is_share and 0 < float(number) <= 100:
                return cls(None, float(number) / 100)
            if not is_share and int(number) > 0:
                return cls(int(number), None)
        raise UserError(f"label_budget is {text!r}: use a share as 1%, or a number of images as 500")

    def of(self, n_seen: int) -> int:
        """At least one, of so many images."""
        return self.images if self.images is not None else max(1, round((self.share or 0) * n_seen))


def n_that_fit(n_bytes: int, side: int) -> int:
    """How many candidates of `side` pixels a file of so many bytes holds."""
    return max(0, (n_bytes - _HEADER_SIZE) // _record_size((3, side, side)))


class Candidates:
    """A reservoir: each image of the stream is in it with the same probability, however long the stream is.

    Which place an image takes depends on its number alone, so that there is no state to keep: offered again after a
    restart it goes where it went before.
    """

    def __init__(self, path: Path, capacity: int, shape: tuple[int, ...], seed: int = 0):
        self.path, self.capacity, self.shape, self.seed = path, capacity, shape, seed
        self._record_size = _record_size(shape)
        header = json.dumps({"candidates": capacity, "shape": list(shape), "seed": seed}).encode()
        header = header.ljust(_HEADER_SIZE - 1) + b"\n"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.pread(self._file, _HEADER_SIZE, 0) != header:
            os.truncate(self._file, 0)
            os.pwrite(self._file, header, 0)
        try:  # all of it now, so that it never meets a full disk later
            os.posix_fallocate(self._file, 0, _HEADER_SIZE + capacity * self._record_size)
        except OSError as error:
            os.close(self._file)
            raise UserError(
                f"no room for {capacity} candidates of the label queue in {path.parent} ({error.strerror}): "
                "use a smaller --label-disk"
            ) from None

    def offer(self, images: Tensor, first: int) -> None:
        """The next images of the stream; `first` is the number of the first of them."""
        numbers = np.arange(first, first + len(images))
        places = place(numbers, self.capacity, self.seed)
        for row in np.flatnonzero(places < self.capacity):
            content = struct.pack("<qd", int(numbers[row]) + 1, time.time()) + images[row].cpu().numpy().tobytes()
            record = _digest(content) + content
            os.pwrite(self._file, record, _HEADER_SIZE + int(places[row]) * self._record_size)

    def close(self) -> None:
        os.close(self._file)


class Candidate(NamedTuple):
    key: str  # of its pixels: the same image has the same
    arrival: int  # number in the stream
    time: float
    image: Tensor  # 3 x H x W, uint8


def read_candidates(path: Path) -> list[Candidate]:
    """Those that are whole, in the order of the stream, each image once; a run may be writing others meanwhile."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(_HEADER_SIZE))
            shape, capacity = tuple(header["shape"]), header["candidates"]
            found: dict[str, Candidate] = {}
            for _ in range(capacity):
                record = file.read(_record_size(shape))
                content = record[_DIGEST_SIZE:]
                if len(record) < _record_size(shape) or _digest(content) != record[:_DIGEST_SIZE]:
                    continue  # empty, or a write that the power did not last for
                number, when = struct.unpack_from("<qd", content)
                pixels = content[16:]
                image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
                candidate = Candidate(_digest(pixels).hex(), number - 1, when, image)
                if candidate.key not in found or found[candidate.key].arrival > candidate.arrival:
                    found[candidate.key] = candidate
    except OSError as error:
        raise UserError(f"no label queue: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} holds no candidates of a label queue") from None
    return sorted(found.values(), key=lambda candidate: candidate.arrival)


def place(numbers: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    """Where each image goes by its number in the stream; the capacity or above is nowhere (Vitter's algorithm R)."""
    golden = 0x9E3779B97F4A7C15
    x = numbers.astype(np.uint64) * np.uint64(golden) + np.uint64((seed + 1) * golden**2 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finaliser of splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    uniform = (x ^ (x >> np.uint64(31))).astype(np.float64) / 2.0**64
    drawn = np.minimum((uniform * (numbers + 1)).astype(np.int64), numbers)
    return np.where(numbers < capacity, numbers, drawn)


_HEADER_SIZE, _DIGEST_SIZE = 4096, 16


def _record_size(shape: tuple[int, ...]) -> int:
    return _DIGEST_SIZE + 16 + int(np.prod(shape))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_SIZE).digest()
