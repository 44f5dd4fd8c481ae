"""A stream: segments of uint8 images in order, from any source, with its position, so that it can resume."""

import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.streams.account import Account
from streamclr.streams.cameras.live import Live
from streamclr.streams.datasets.images import readable
from streamclr.streams.shard import Shard
from streamclr.streams.spec import Source, open_source

if TYPE_CHECKING:
    from streamclr.runs.serving import PredictingStream


def open_stream(source: str | Path, **options: Any) -> "Stream | LiveStream":
    """A stream from a source string such as `synthetic:`, `cifar10?stc=500`, `clip.mp4` or `rtsp://camera/1`.

    Options may stand in the string or be given as keywords, which win.
    """
    opened = open_source(source, **options)
    return LiveStream(opened) if isinstance(opened, list) else Stream(opened)


class Stream:
    """The images of a source that can be read; the others are passed over and counted."""

    live = False
    exact = True  # what is read again is the same
    fps = None

    def __init__(self, source: Source):
        self.idle: Callable[[], bool] = lambda: False  # never called: there is always a next image
        self.source = source
        self.position = 0  # the number of the next image
        self.account = Account()
        self.skipped: list[int] = []  # the numbers of the images that were passed over

    @property
    def size(self) -> int:
        """The side of its images in pixels."""
        return Stream(self.source).read(1).shape[-1]

    def shard(self, index: int, n: int, segment: int) -> "Stream":
        """The segments that one of n ranks reads."""
        return Stream(Shard(self.source, index, n, segment))

    def read(self, n: int, until: int | None = None) -> Tensor:
        """The next `n` images that can be read, n x 3 x H x W; fewer where the stream ends, or before `until`."""
        end = min(e for e in (until, self.source.n_images, sys.maxsize) if e is not None)
        parts, n_left, last_good = [torch.empty(0, dtype=torch.uint8)], n, self.position
        while n_left and self.position < end:
            numbers = np.arange(self.position, min(self.position + n_left, end))
            images, good, bad = readable(self.source, numbers)
            self.account.add(Account(len(numbers), len(good), rejected=Counter(e.reason for e in bad.values())))
            self.skipped += bad
            self.position += len(numbers)
            parts.append(torch.from_numpy(images))
            n_left -= len(good)
            if len(good):
                last_good = self.position
            elif self.source.epoch is not None and self.position - last_good >= self.source.epoch:
                raise UserError(f"not one image of a whole pass can be read; {next(iter(bad.values()))}")
        return torch.cat(parts)

    def labels(self, arrivals: Tensor) -> Tensor:
        """The labels of images by the order in which they were read, in which those passed over have no number."""
        skipped = np.array(self.skipped, np.int64)  # at one go: another thread may be reading
        before = skipped - np.arange(len(skipped))  # read when each was passed over
        numbers = arrivals.numpy() + np.searchsorted(before, arrivals.numpy(), side="right")
        return torch.from_numpy(self.source.labels(numbers))

    def segments(self, n: int, until: int | None = None) -> Generator[Tensor]:
        """Segments of `n` images until the stream ends, or until image number `until`; the last may be smaller."""
        if n < 1:
            raise UserError(f"the segment size is {n}: use at least 1")

        def generate() -> Generator[Tensor]:
            while len(images := self.read(n, until)):
                yield images

        return generate()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "account": self.account.state_dict(), "skipped": list(self.skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        # Checkpoints from before there was an account have neither.
        self.account = Account.of(state["account"]) if "account" in state else Account(self.position, self.position)
        self.skipped = list(state.get("skipped", []))

    def take_events(self) -> list[tuple[str, str]]:
        return []

    def connections(self) -> dict[str, tuple[bool, int]]:
        return {}


class LiveStream(Live):
    """The frames of cameras and recordings."""

    def shard(self, index: int, n: int, segment: int) -> "LiveStream":
        """The feeds that one of n ranks takes."""
        if len(self.feeds) < n:
            n_feeds = f"{len(self.feeds)} {'source' if len(self.feeds) == 1 else 'sources'}"
            raise UserError(f"there are {n} ranks and {n_feeds}: each rank needs one, give a list of {n} or more")
        return LiveStream(self.feeds[index::n])

    def segments(self, n: int, until: int | None = None) -> Generator[Tensor]:
        """Segments of `n` frames until all feeds have ended, or until frame number `until`; the last may be smaller."""
        frames = self.frames(n, until)

        def generate() -> Generator[Tensor]:
            with closing(frames):
                for images in frames:
                    yield torch.from_numpy(images)

        return generate()

    def labels(self, arrivals: Tensor) -> Tensor:
        raise UserError("frames of a camera have no labels")


AnyStream: TypeAlias = "Stream | LiveStream | PredictingStream"
