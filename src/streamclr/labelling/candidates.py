"""The images that a person may be asked about: a uniform draw of the stream so far, in a file that never grows."""

import hashlib
import json
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import parse_size
from streamclr.base.statistics import uniform
from streamclr.records.label_budget import (
    DIGEST_SIZE,
    HEADER_SIZE,
    N_CANDIDATES_EACH,
    LabelBudget,
    n_candidates_that_fit,
    record_size,
)
from streamclr.records.plan import RunPlan


class Candidates:
    """A reservoir: each image of the stream is in it with the same probability, however long the stream is.

    Which place an image takes depends on its number alone, so that there is no state to keep: offered again after a
    restart it goes where it went before.
    """

    def __init__(self, path: Path, capacity: int, shape: tuple[int, ...], seed: int = 0):
        self.path, self.capacity, self.shape, self.seed = path, capacity, shape, seed
        self._record_size = record_size(shape)
        about = {"candidates": capacity, "shape": list(shape), "seed": seed}
        header = json.dumps(about).encode().ljust(HEADER_SIZE - 1) + b"\n"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.pread(self._file, HEADER_SIZE, 0) != header:
            os.truncate(self._file, 0)
            os.pwrite(self._file, header, 0)
        try:  # all of it now, so that a disk that fills up later does no harm
            os.posix_fallocate(self._file, 0, HEADER_SIZE + capacity * self._record_size)
        except OSError as error:
            os.close(self._file)
            room = f"no room for {capacity} candidates of the label queue in {path.parent}"
            raise UserError(f"{room} ({error.strerror}): use a smaller --label-disk") from None

    def offer(self, images: Tensor, first: int) -> None:
        """The next images of the stream; `first` is the number of the first of them."""
        numbers = np.arange(first, first + len(images))
        places = place(numbers, self.capacity, self.seed)
        for row in np.flatnonzero(places < self.capacity):
            content = struct.pack("<qd", int(numbers[row]) + 1, time.time()) + images[row].cpu().numpy().tobytes()
            record = _digest(content) + content
            os.pwrite(self._file, record, HEADER_SIZE + int(places[row]) * self._record_size)

    def close(self) -> None:
        os.close(self._file)


def open_candidates(path: Path, plan: RunPlan) -> Candidates | None:
    """The candidates of a run in its directory; None if nobody is to be asked."""
    if plan.label_budget is None:
        return None
    room = n_candidates_that_fit(parse_size(plan.label_disk), plan.size)
    n_asked = LabelBudget.parse(plan.label_budget).images
    capacity = room if n_asked is None else min(room, N_CANDIDATES_EACH * n_asked)
    return Candidates(path / "candidates.bin", capacity, (3, plan.size, plan.size), plan.seed)


class Candidate(NamedTuple):
    key: str  # of its pixels: the same image has the same
    arrival: int  # number in the stream
    time: float
    image: Tensor  # 3 x H x W, uint8


def read_candidates(path: Path) -> list[Candidate]:
    """All that are complete, in the order of the stream, each image once; a run may be writing others meanwhile."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(HEADER_SIZE))
            shape, capacity = tuple(header["shape"]), header["candidates"]
            found: dict[str, Candidate] = {}
            for _ in range(capacity):
                record = file.read(record_size(shape))
                content = record[DIGEST_SIZE:]
                if len(record) < record_size(shape) or _digest(content) != record[:DIGEST_SIZE]:
                    continue  # empty, or cut short by a power failure
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
    drawn = np.minimum((uniform(numbers, seed) * (numbers + 1)).astype(np.int64), numbers)
    return np.where(numbers < capacity, numbers, drawn)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_SIZE).digest()
