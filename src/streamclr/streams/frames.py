"""Frames of a program that come one after the other: a stream of any iterable."""

from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import checked_size
from streamclr.streams.account import Account
from streamclr.streams.cameras.live import Idle
from streamclr.streams.datasets.own import pixels_of, stacked
from streamclr.streams.stream import Arrived, Stream

UNKNOWN = -1  # the label or track of a frame without one


class FrameStream(Stream):
    """Each frame is taken once, when its segment is asked for.

    frames: of each frame the image, or a tuple of image and label, or of image, label and track; a label may be None.
        Images are what `pixels_of` takes. After a resume an iterable that can begin anew is read from its beginning up
        to where it was; an iterator, such as a generator, goes on with what comes.
    classes: names of the labels.
    size: side of the images in pixels, to which they are scaled; default: as they are.
    """

    exact = True
    overload = "wait"

    def __init__(self, frames: Iterable[Any], classes: Sequence[str] = (), size: int | None = None):
        self.name, self.classes = "frames", tuple(classes)
        self.places = {self.name: (self.name, "")}
        self.repeats = iter(frames) is not frames
        self._frames, self._size = frames, None if size is None else checked_size(size)
        self._coming: Iterator[Any] = iter(frames)
        self._next: list[np.ndarray] = []  # a frame that was looked at and not yet handed out
        # Number, label and track of each frame whose label or track is not that of the frame before.
        self._marks = tuple(array("q") for _ in range(3))
        self.position, self.account = 0, Account()

    @property
    def size(self) -> int:
        if not self._next:
            self._next = self._read(1)
        if not self._next:
            raise UserError("there are no frames: give an iterable of images")
        return self._next[0].shape[-1]

    def _read(self, n: int) -> list[np.ndarray]:
        """The next frames, which are handed out after the one that was looked at."""
        images = []
        for number, item in enumerate(islice(self._coming, n), self.position + len(self._next)):
            image, label, track = (*item, None, None)[:3] if isinstance(item, tuple) else (item, None, None)
            images.append(pixels_of(image, f"frame {number}", self._size))
            self._mark(number, UNKNOWN if label is None else int(label), UNKNOWN if track is None else int(track))
        return images

    def _mark(self, number: int, label: int, track: int) -> None:
        if (label, track) != self._mark_of(number):
            for column, value in zip(self._marks, (number, label, track), strict=True):
                column.append(value)

    def _mark_of(self, number: int) -> tuple[int, int]:
        numbers, labels, tracks = self._marks
        place = bisect_right(numbers, number) - 1
        return (UNKNOWN, UNKNOWN) if place < 0 else (labels[place], tracks[place])

    def _segments(
        self, n: int, until: int | None, idle: Idle, arrived: Arrived | None, thumbnail_every: int
    ) -> Generator[Tensor]:
        while until is None or self.position < until:
            wanted = n if until is None else min(n, until - self.position)
            images = stacked(self._next + self._read(wanted - len(self._next)))
            self._next = []
            if not len(images):
                return
            self.position += len(images)
            self.account.add(Account(len(images), len(images)))
            segment = torch.from_numpy(images)
            if arrived:
                arrived(segment, self.name, [""] * len(segment))
            yield segment

    def labels(self, arrivals: Tensor) -> Tensor:
        """-1 for a frame without one."""
        return self._column(0, arrivals)

    def tracks(self, arrivals: Tensor) -> Tensor | None:
        tracks = self._column(1, arrivals)
        return None if bool((tracks == UNKNOWN).all()) else tracks

    def _column(self, column: int, arrivals: Tensor) -> Tensor:
        return torch.tensor([self._mark_of(number)[column] for number in arrivals.tolist()], dtype=torch.long)

    def state_dict(self) -> dict[str, Any]:
        marks = torch.tensor(list(map(list, self._marks)), dtype=torch.long)
        marks = marks[:, marks[0] < self.position]
        return {"position": self.position, "account": self.account.state_dict(), "marks": marks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ahead = self._mark_of(self.position)
        self.position, self.account = state["position"], Account.of(state["account"])
        if self.repeats:
            self._coming, self._next = islice(self._frames, self.position, None), []
        self._marks = tuple(array("q", column) for column in state["marks"].tolist())
        if self._next:
            self._mark(self.position, *ahead)
