"""A stream: segments of uint8 images in order, from any source, with its position, so that it can resume."""

import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.streams.account import Account
from streamclr.streams.cameras.live import CameraFrames, checked_segment, never
from streamclr.streams.datasets.images import Images, readable
from streamclr.streams.shard import Shard
from streamclr.streams.spec import Source, open_source

# Called with images, n x 3 x H x W, and the name of their camera (None if there is only one).
Arrived = Callable[[Tensor, str | None], None]


class Stream(Protocol):
    """Segments of uint8 images in order; labels, where they are known, are for evaluation only."""

    @property
    def live(self) -> bool: ...  # cameras and recordings: no passes, no labels

    @property
    def position(self) -> int: ...  # the number of the next image

    @property
    def size(self) -> int: ...  # side of the images in pixels

    @property
    def n_images(self) -> int | None: ...  # None: endless

    @property
    def epoch(self) -> int | None: ...  # images in one pass; None: there are no passes

    @property
    def classes(self) -> tuple[str, ...]: ...  # empty: unlabelled

    @property
    def train(self) -> Images | None: ...  # labelled images for stage two

    @property
    def test(self) -> Images | None: ...

    @property
    def exact(self) -> bool: ...  # reading again gives the same images in the same order

    @property
    def overload(self) -> str: ...  # if the learner is too slow: "wait", "drop", or "mixed" if its cameras differ

    @property
    def account(self) -> Account: ...

    def segments(
        self, n: int, until: int | None = None, idle: Callable[[], bool] = never, arrived: Arrived | None = None
    ) -> Generator[Tensor]:
        """Segments of `n` images until the stream ends, or until image number `until`; the last may be smaller.

        idle: called at least every few seconds while there is no image; True ends the segments.
        arrived: called with each image once, in order of `position` if the stream is exact. Frames of a camera go there
            as they come, before they are a whole segment, and also those that are dropped when the stream is stopped.
        """
        ...

    def labels(self, arrivals: Tensor) -> Tensor:
        """The labels of images by the order in which they were handed out."""
        ...

    def pass_over(self, n: int, reason: str) -> None:
        """Correct the account: `n` images that were handed out are not learned from."""
        ...

    def take_account(self) -> Account:
        """The account so far; a new one begins."""
        ...

    def take_events(self) -> list[tuple[str, str]]:
        """Camera and event, such as a lost connection, since the last call."""
        ...

    def connections(self) -> dict[str, tuple[bool, int]]:
        """For each camera whether it sends frames, and how often its connection was lost."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def open_stream(source: str | Path, **options: Any) -> "DatasetStream | CameraStream":
    """A stream from a source string such as `synthetic:`, `cifar10?stc=500`, `clip.mp4` or `rtsp://camera/1`.

    Options may stand in the string or be given as keywords, which win.
    """
    opened = open_source(source, **options)
    return CameraStream(opened) if isinstance(opened, list) else DatasetStream(opened)


class DatasetStream:
    """The images of a source by their numbers. Those that cannot be read are skipped and counted."""

    live = False
    exact = True
    overload = "wait"
    fps = None

    def __init__(self, source: Source):
        self.source, self.classes, self.n_images, self.epoch = source, source.classes, source.n_images, source.epoch
        self.train, self.test = source.train, source.test
        self.position = 0  # the number of the next image
        self.account = Account()
        self._skipped: list[int] = []  # numbers of the images that could not be read

    @property
    def size(self) -> int:
        return DatasetStream(self.source).read(1).shape[-1]

    def shard(self, index: int, n: int, segment: int) -> "DatasetStream":
        """The segments that one of n ranks reads."""
        return DatasetStream(Shard(self.source, index, n, segment))

    def measured_fps(self) -> None:
        """None: a dataset has no rate."""

    def read(self, n: int, until: int | None = None) -> Tensor:
        """The next `n` images that can be read, n x 3 x H x W; fewer where the stream ends, or before `until`."""
        end = min(e for e in (until, self.n_images, sys.maxsize) if e is not None)
        parts, n_left, last_good = [torch.empty(0, dtype=torch.uint8)], n, self.position
        while n_left and self.position < end:
            numbers = np.arange(self.position, min(self.position + n_left, end))
            images, good, bad = readable(self.source, numbers)
            self.account.add(Account(len(numbers), len(good), rejected=Counter(e.reason for e in bad.values())))
            self._skipped += bad
            self.position += len(numbers)
            parts.append(torch.from_numpy(images))
            n_left -= len(good)
            if len(good):
                last_good = self.position
            elif self.epoch is not None and self.position - last_good >= self.epoch:
                raise UserError(f"not one image of a whole pass can be read; {next(iter(bad.values()))}")
        return torch.cat(parts)

    def labels(self, arrivals: Tensor) -> Tensor:
        """The labels of images by the order in which they were handed out: skipped images are not counted."""
        skipped = np.array(self._skipped, np.int64)  # one copy: another thread may be reading
        before = skipped - np.arange(len(skipped))  # images handed out before each skipped one
        numbers = arrivals.numpy() + np.searchsorted(before, arrivals.numpy(), side="right")
        return torch.from_numpy(self.source.labels(numbers))

    def segments(
        self, n: int, until: int | None = None, idle: Callable[[], bool] = never, arrived: Arrived | None = None
    ) -> Generator[Tensor]:
        """See `Stream`; `idle` is never called, because there is always a next image."""
        checked_segment(n)

        def generate() -> Generator[Tensor]:
            while len(images := self.read(n, until)):
                if arrived:
                    arrived(images, None)
                yield images

        return generate()

    def pass_over(self, n: int, reason: str) -> None:
        self.account.pass_over(n, reason)

    def take_account(self) -> Account:
        account, self.account = self.account, Account()
        return account

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "account": self.account.state_dict(), "skipped": list(self._skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        # Old checkpoints have neither an account nor skipped images.
        self.account = Account.of(state["account"]) if "account" in state else Account(self.position, self.position)
        self._skipped = list(state.get("skipped", []))

    def take_events(self) -> list[tuple[str, str]]:
        return []

    def connections(self) -> dict[str, tuple[bool, int]]:
        return {}


class CameraStream(CameraFrames):
    """The frames of cameras and recordings; unlabelled."""

    live = True
    classes: tuple[str, ...] = ()
    n_images = epoch = train = test = None

    def shard(self, index: int, n: int, segment: int) -> "CameraStream":
        """The cameras and recordings that one of n ranks takes."""
        if len(self.feeds) < n:
            n_feeds = f"{len(self.feeds)} {'source' if len(self.feeds) == 1 else 'sources'}"
            raise UserError(f"there are {n} ranks and {n_feeds}: each rank needs one, give a list of {n} or more")
        return CameraStream(self.feeds[index::n])

    def segments(
        self, n: int, until: int | None = None, idle: Callable[[], bool] = never, arrived: Arrived | None = None
    ) -> Generator[Tensor]:
        """See `Stream`; it ends when all cameras and recordings have ended."""
        frames = self.frames(n, until, idle, arrived and (lambda frames, name: arrived(torch.from_numpy(frames), name)))

        def generate() -> Generator[Tensor]:
            with closing(frames):
                for images in frames:
                    yield torch.from_numpy(images)

        return generate()

    def labels(self, arrivals: Tensor) -> Tensor:
        raise UserError("frames of a camera have no labels")
