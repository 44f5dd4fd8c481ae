"""The images that a person may be asked about: a uniform draw of the stream so far, in a file that never grows."""

import hashlib
import json
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import parse_size
from streamclr.base.statistics import uniform
from streamclr.records.label_budget import (
    DIGEST_SIZE,
    HEADER_SIZE,
    LabelBudget,
    clips_that_fit,
    n_candidates_that_fit,
    record_size,
)
from streamclr.records.plan import RunPlan

UNKNOWN = -1  # track of a frame of which nothing is known


class Candidates:
    """A reservoir of clips, which are consecutive frames: each clip of the stream is in it with the same probability,
    however long the stream is.

    Which place a frame takes depends on its number alone, so that there is no state to keep: offered again after a
    restart it goes where it went before.

    clip: frames in a clip. A file of version 0.1 has single frames without their tracks, and goes on so.
    """

    def __init__(self, path: Path, n_clips: int, shape: tuple[int, ...], seed: int = 0, clip: int = 1):
        self.path, self.shape, self.seed = path, shape, seed
        self.n_clips, self.clip = n_clips, clip
        self._record_size = record_size(shape)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        content = os.pread(self._file, HEADER_SIZE, 0)
        about: dict[str, Any] = {"candidates": n_clips * clip, "shape": list(shape), "seed": seed, "clip": clip}
        self._has_tracks = True
        with suppress(ValueError, AttributeError):  # no JSON, or no object
            known = json.loads(content)
            if known == {"candidates": known.get("candidates"), "shape": list(shape), "seed": seed}:
                about, self._has_tracks, self.n_clips, self.clip = known, False, known["candidates"], 1
        header = json.dumps(about).encode().ljust(HEADER_SIZE - 1) + b"\n"
        if content != header:
            os.truncate(self._file, 0)
            os.pwrite(self._file, header, 0)
        try:  # all of it now, so that a disk that fills up later does no harm
            os.posix_fallocate(self._file, 0, HEADER_SIZE + self.n_clips * self.clip * self._record_size)
        except OSError as error:
            os.close(self._file)
            room = f"no room for {self.n_clips * self.clip} candidates of the label queue in {path.parent}"
            raise UserError(f"{room} ({error.strerror}): use a smaller --label-disk") from None

    def offer(self, images: Tensor, first: int, tracks: Tensor | None = None) -> None:
        """The next images of the stream; `first` is the number of the first of them.

        tracks: int64, see `Candidate`; None: not known.
        """
        numbers = np.arange(first, first + len(images))
        places = place(numbers // self.clip, self.n_clips, self.seed)
        for row in np.flatnonzero(places < self.n_clips):
            track = UNKNOWN if tracks is None else int(tracks[row])
            content = struct.pack("<qd", int(numbers[row]) + 1, time.time()) + images[row].cpu().numpy().tobytes()
            if self._has_tracks:
                content = struct.pack("<q", track) + content
            digest = _digest(content, self._record_size - len(content))  # 8 bytes beside a track, else 16
            slot = int(places[row]) * self.clip + int(numbers[row]) % self.clip
            os.pwrite(self._file, digest + content, HEADER_SIZE + slot * self._record_size)

    def close(self) -> None:
        os.close(self._file)


def open_candidates(path: Path, plan: RunPlan, epoch: int | None = None) -> Candidates | None:
    """The candidates of a run in its directory; None if nobody is to be asked.

    epoch: images of one pass of the stream, if it has passes.
    """
    if plan.label_budget is None:
        return None
    room = n_candidates_that_fit(parse_size(plan.label_disk), plan.size)
    n_frames = min(n for n in (room, plan.images, epoch) if n is not None)
    n_clips, clip = clips_that_fit(n_frames, LabelBudget.parse(plan.label_budget).images)
    return Candidates(path / "candidates.bin", n_clips, (3, plan.size, plan.size), plan.seed, clip)


class Candidate(NamedTuple):
    key: str  # of its pixels: the same image has the same
    arrival: int  # number in the stream
    time: float
    image: Tensor  # 3 x H x W, uint8
    # From 0 on: frames with the same number show the same object. Below: those with different numbers are apart, by a
    # cut or by their camera; those with the same may be the same scene.
    track: int = UNKNOWN


def read_candidates(path: Path) -> list[Candidate]:
    """One frame of each clip, in the order of the stream: the one to ask about."""
    return [middle(clip) for clip in read_clips(path)]


def middle(clip: list[Candidate]) -> Candidate:
    """The frame of a clip to ask about: the others are nearest to it."""
    return clip[len(clip) // 2]


def read_clips(path: Path) -> list[list[Candidate]]:
    """The frames that are complete, clip by clip, in the order of the stream, each image once; a run may be writing
    others meanwhile."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(HEADER_SIZE))
            shape, n_frames, clip = tuple(header["shape"]), header["candidates"], header.get("clip", 1)
            frames: list[Candidate] = []
            for _ in range(n_frames // clip):
                own = [_frame(file.read(record_size(shape)), shape, "clip" in header) for _ in range(clip)]
                known = [frame for frame in own if frame is not None]
                # A newer clip takes the place frame by frame: what is left of the older one is no part of it.
                newest = max((frame.arrival // clip for frame in known), default=0)
                frames += [frame for frame in known if frame.arrival // clip == newest]
    except OSError as error:
        raise UserError(f"no label queue: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} holds no candidates of a label queue") from None
    frames.sort(key=lambda frame: -frame.arrival)
    first = {frame.key: frame for frame in frames}  # of the same images
    clips: dict[int, list[Candidate]] = {}
    for frame in reversed(first.values()):
        clips.setdefault(frame.arrival // clip, []).append(frame)
    return [clips[number] for number in sorted(clips)]


def _frame(record: bytes, shape: tuple[int, ...], has_track: bool) -> Candidate | None:
    """None for a record that is empty, or cut short by a power failure."""
    digest_size = DIGEST_SIZE - 8 if has_track else DIGEST_SIZE
    content = record[digest_size:]
    if len(record) < record_size(shape) or _digest(content, digest_size) != record[:digest_size]:
        return None
    track = UNKNOWN
    if has_track:
        (track,), content = struct.unpack_from("<q", content), content[8:]
    number, when = struct.unpack_from("<qd", content)
    image = torch.frombuffer(bytearray(content[16:]), dtype=torch.uint8).view(shape)
    return Candidate(key_of(image), number - 1, when, image, track)


def key_of(image: Tensor) -> str:
    """The key of an image, by its pixels."""
    return _digest(image.numpy().tobytes(), DIGEST_SIZE).hex()


def place(numbers: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    """Where each clip goes by its number in the stream; the capacity or above is nowhere (Vitter's algorithm R)."""
    drawn = np.minimum((uniform(numbers, seed) * (numbers + 1)).astype(np.int64), numbers)
    return np.where(numbers < capacity, numbers, drawn)


def _digest(content: bytes, size: int) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()
