"""A stream: segments of uint8 images in order, from any source, with its position, so that it can resume."""

import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.options import redacted
from streamclr.scenes import find_scenes
from streamclr.streams.account import MAX_NAMED, Account
from streamclr.streams.cameras.live import CameraFrames, Idle, never
from streamclr.streams.datasets.images import DatasetSource, Images, Source, readable
from streamclr.streams.datasets.own import as_array, is_images, is_sequence, own_source
from streamclr.streams.frame import BadFrame
from streamclr.streams.spec import open_source, split_source

SEGMENTS_AHEAD = 2  # that a source may read before they are asked for
# Called with images, n x 3 x H x W, the name of their camera or dataset, and the path of each that has a file, or "".
Arrived = Callable[[Tensor, str, list[str]], None]


class Stream(Protocol):
    """Segments of uint8 images in order; labels, where they are known, are for evaluation only."""

    live: bool = False  # cameras and recordings: no passes, no labels
    position: int  # the number of the next image
    n_images: int | None = None  # None: endless
    epoch: int | None = None  # images in one pass; None: there are no passes
    in_time: bool = True  # consecutive images may be frames of one scene; False if they were shuffled
    classes: tuple[str, ...] = ()  # empty: unlabelled
    train: Images | None = None  # labelled images for stage two
    test: Images | None = None
    # Of each region of its cameras, or the dataset, the whole name: name of the camera, and of the region or "".
    places: dict[str, tuple[str, str]]
    exact: bool  # reading again gives the same images in the same order
    repeats: bool  # after a resume the same images come again, under the same numbers
    overload: str  # if the learner is too slow: "wait", "drop", or "mixed" if its cameras differ
    account: Account
    has_thumbnails: bool = False  # readable pictures of its images are at hand

    @property
    def size(self) -> int: ...  # side of the images in pixels

    @property
    def fps(self) -> float | None:
        """Frames a second, where that is known before they come."""
        return None

    def __repr__(self) -> str:
        what = ", ".join(redacted(name) for name in self.places)
        length = "" if self.n_images is None else f" of {self.n_images:,}"
        return f"{type(self).__name__}({what}, at image {self.position:,}{length})"

    def segments(
        self,
        n: int,
        until: int | None = None,
        idle: Idle = never,
        arrived: Arrived | None = None,
        thumbnail_every: int = 0,
    ) -> Generator[Tensor]:
        """Segments of `n` images until the stream ends, or until image number `until`; the last may be smaller.

        idle: called at least every few seconds while there is no image; True ends the segments. Never called by a
            dataset, which always has a next image.
        arrived: called with each image once, in order of `position` if the stream is exact. Frames of a camera go there
            as they come, before they are a whole segment, and also those that are dropped when the stream is stopped.
        thumbnail_every: every Nth frame of a camera is to have a `thumbnail`; 0: none.
        """
        if n < 1:
            raise UserError(f"the segment size is {n}: use at least 1")
        return self._segments(n, until, idle, arrived, thumbnail_every)

    def _segments(
        self, n: int, until: int | None, idle: Idle, arrived: Arrived | None, thumbnail_every: int
    ) -> Generator[Tensor]: ...

    def labels(self, arrivals: Tensor) -> Tensor:
        """The labels of images by the order in which they were handed out: skipped images are not counted."""
        ...

    def tracks(self, arrivals: Tensor) -> Tensor | None:
        """The tracks of images, int64, numbered as for `labels`. None: not known."""
        return None

    def thumbnail(self, arrival: int) -> bytes | None:
        """A JPEG of an image for a person, in which it can be recognised; None if there is none. Of a camera: of the
        last segment."""
        return None

    def take_told(self) -> list[str]:
        """What is seen of the source's pictures, for a person, where that is not all of them; told once."""
        return []

    def take_events(self) -> list[tuple[str, str]]:
        """Camera and event, such as a lost connection, since the last call; `rejected` and which image, and why."""
        return []

    def connections(self) -> dict[str, tuple[bool, int]]:
        """For each camera whether it sends frames, and how often its connection was lost."""
        return {}

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@overload
def open_stream(source: str | Path, **options: Any) -> "DatasetStream | CameraStream": ...
@overload
def open_stream(source: Any, **options: Any) -> "Stream": ...
def open_stream(source: Any, **options: Any) -> "Stream":
    """A stream from a source string such as `synthetic:`, `cifar10?stc=500`, `clip.mp4` or `rtsp://camera/1`.

    Or from images of the program: uint8, n x 3 x H x W; a torch Dataset or a list of images, with the options `labels`,
    `tracks`, `classes`, `size`, `stc`, `seed`, `passes` and `order`; any other iterable of frames, such as a generator,
    with `classes` and `size`; or a Source.

    Options may stand in the string or be given as keywords, which win.

    >>> import torch
    >>> from streamclr import open_stream
    >>> stream = open_stream("synthetic:?seed=1", size=16)
    >>> next(stream.segments(8)).shape
    torch.Size([8, 3, 16, 16])
    >>> images = torch.zeros(20, 3, 16, 16, dtype=torch.uint8)
    >>> [len(segment) for segment in open_stream(images, passes=2).segments(16)]
    [16, 16, 8]
    """
    if not isinstance(source, str | Path):
        return _open_own(source, options)
    opened = open_source(source, **options)
    if isinstance(opened, list):
        return CameraStream(opened)
    kind, path, _ = split_source(source)
    return DatasetStream(opened, f"{kind}:{path}" if path else kind)


def _open_own(source: Any, options: dict[str, Any]) -> Stream:
    from streamclr.streams.frames import FrameStream

    if isinstance(source, Source):
        return opts.build(DatasetStream, options, "a stream of a Source", source)
    if is_images(source) or is_sequence(source) or as_array(source) is not None:
        return DatasetStream(opts.build(own_source, options, "a stream of images", source), "images")
    if isinstance(source, Iterable) and not isinstance(source, Mapping | bytes):
        return opts.build(FrameStream, options, "a stream of frames", source)
    due = "give one such as 'clip.mp4', images, a torch Dataset, an iterable of frames, or a class derived from Source"
    raise UserError(f"a {type(source).__name__} is no source: {due}")


class DatasetStream(Stream):
    """The images of a source by their numbers. Those that cannot be read are skipped and counted."""

    exact = repeats = True
    overload = "wait"

    def __init__(self, source: Source, name: str = "dataset"):
        self.name, self.places = name, {name: (name, "")}
        self.source, self.classes, self.n_images, self.epoch = source, source.classes, source.n_images, source.epoch
        self.train, self.test, self.in_time = source.train, source.test, source.in_time
        self.has_thumbnails = source.has_thumbnails
        self._told = [source.told] if source.told else []
        self.position = 0
        self.account = Account()
        self._before_skipped = array("q")  # of each image that could not be read: how many were handed out before it
        self._named: dict[str, None] = {}  # what was said of them
        self._events: list[tuple[str, str]] = []

    @property
    def size(self) -> int:
        return DatasetStream(self.source).read(1).shape[-1]

    def shard(self, index: int, n: int, segment: int) -> "DatasetStream":
        """The segments that one of n ranks reads."""
        return DatasetStream(Shard(self.source, index, n, segment), self.name)

    def measured_fps(self, seconds: float = 3.0) -> None:
        """None: a dataset has no rate."""

    def read(self, n: int, until: int | None = None) -> Tensor:
        """The next `n` images that can be read, n x 3 x H x W; fewer where the stream ends, or before `until`."""
        end = min(e for e in (until, self.n_images, sys.maxsize) if e is not None)
        parts, n_left, last_good = [torch.empty(0, dtype=torch.uint8)], n, self.position
        while n_left and self.position < end:
            numbers = np.arange(self.position, min(self.position + n_left, end))
            images, good, bad = readable(self.source, numbers)
            self.account.add(Account(len(numbers), len(good), rejected=Counter(e.reason for e in bad.values())))
            self._before_skipped.extend(number - i for i, number in enumerate(bad, len(self._before_skipped)))
            self._name(list(bad.values()))
            self.position += len(numbers)
            parts.append(torch.from_numpy(images))
            n_left -= len(good)
            if len(good):
                last_good = self.position
            elif self.epoch is not None and self.position - last_good >= self.epoch:
                raise UserError(f"not one image of a whole pass can be read; {next(iter(bad.values()))}")
        return torch.cat(parts)

    def _name(self, bad: list[BadFrame]) -> None:
        """Keep an event for the first images that cannot be used: which file, and why."""
        for error in bad:
            if str(error) not in self._named and len(self._named) < MAX_NAMED:
                self._named[str(error)] = None
                self._events.append(("rejected", str(error)))

    def take_events(self) -> list[tuple[str, str]]:
        events, self._events = self._events, []
        return events

    def labels(self, arrivals: Tensor) -> Tensor:
        return torch.from_numpy(self.source.labels(self._numbers(arrivals)))

    def tracks(self, arrivals: Tensor) -> Tensor | None:
        tracks = self.source.tracks(self._numbers(arrivals))
        return None if tracks is None else torch.from_numpy(tracks)

    def thumbnail(self, arrival: int) -> bytes | None:
        return self.source.thumbnail(int(self._numbers(torch.tensor([arrival]))[0]))

    def take_told(self) -> list[str]:
        told, self._told = self._told, []
        return told

    def _numbers(self, arrivals: Tensor) -> np.ndarray:
        """The numbers in the source of images that were handed out."""
        numbers = [arrival + bisect_right(self._before_skipped, arrival) for arrival in arrivals.tolist()]
        return np.array(numbers, np.int64)

    def _segments(
        self, n: int, until: int | None, idle: Idle, arrived: Arrived | None, thumbnail_every: int
    ) -> Generator[Tensor]:
        try:
            while len(images := self.read(n, until)):
                self._expect(SEGMENTS_AHEAD * n, until)
                if arrived:
                    arrived(images, self.name, self._files(len(images)))
                yield images
        finally:
            self.source.expect(np.empty(0, np.int64))

    def _files(self, n: int) -> list[str]:
        """The paths of the last `n` images that were read."""
        if not isinstance(self.source, DatasetSource):
            return [""] * n
        end = self.position - len(self._before_skipped)
        return [self.source.file(number) or "" for number in self._numbers(torch.arange(end - n, end)).tolist()]

    def _expect(self, n: int, until: int | None) -> None:
        """The source may begin to read the next `n` images. Position and account are those of the images read."""
        end = min(e for e in (until, self.n_images, self.position + n) if e is not None)
        self.source.expect(np.arange(self.position, end))

    def state_dict(self) -> dict[str, Any]:
        before = np.array(self._before_skipped, np.int64)
        skipped = before + np.arange(len(before))  # their numbers
        return {"position": self.position, "account": self.account.state_dict(), "skipped": skipped.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        # Old checkpoints have neither an account nor skipped images.
        self.account = Account.of(state["account"]) if "account" in state else Account(self.position, self.position)
        self._before_skipped = array("q", (number - i for i, number in enumerate(state.get("skipped", []))))


class Shard(Source):
    """The segments number index, index + n, index + 2n, … of a source.

    Together, n ranks see in each step what one process with segments of n times the size would see. Images are numbered
    anew. The shard ends with the last segment that is whole on every rank.
    """

    def __init__(self, whole: Source, index: int, n: int, segment: int):
        self.whole, self.index, self.n, self.segment = whole, index, n, segment
        self.classes, self.train, self.test, self.in_time = whole.classes, whole.train, whole.test, whole.in_time
        self.n_images = None if whole.n_images is None else whole.n_images // (n * segment) * segment
        self.epoch = None if whole.epoch is None else -(-whole.epoch // n)
        self.told, self.has_thumbnails = whole.told if index == 0 else "", whole.has_thumbnails

    def images(self, numbers: np.ndarray) -> np.ndarray:
        return self.whole.images(self._in_whole(numbers))

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        return self.whole.labels(self._in_whole(numbers))

    def tracks(self, numbers: np.ndarray) -> np.ndarray | None:
        return self.whole.tracks(self._in_whole(numbers))

    def thumbnail(self, number: int) -> bytes | None:
        return self.whole.thumbnail(int(self._in_whole(np.array(number))))

    def expect(self, numbers: np.ndarray) -> None:
        self.whole.expect(self._in_whole(numbers))

    def _in_whole(self, numbers: np.ndarray) -> np.ndarray:
        return (numbers // self.segment * self.n + self.index) * self.segment + numbers % self.segment


class CameraStream(CameraFrames, Stream):
    """The frames of cameras and recordings, until all of them have ended; unlabelled."""

    live = True
    has_thumbnails = True
    _scenes = torch.empty(0, dtype=torch.long)

    def shard(self, index: int, n: int, segment: int) -> "CameraStream":
        """The cameras and recordings that one of n ranks takes."""
        if len(self.feeds) < n:
            n_feeds = f"{len(self.feeds)} {'source' if len(self.feeds) == 1 else 'sources'}"
            raise UserError(f"there are {n} ranks and {n_feeds}: each rank needs one, give a list of {n} or more")
        return CameraStream(self.feeds[index::n])

    def _segments(
        self, n: int, until: int | None, idle: Idle, arrived: Arrived | None, thumbnail_every: int
    ) -> Generator[Tensor]:
        frames = self.frames(
            n, until, idle, arrived and (lambda frames, *of: arrived(torch.from_numpy(frames), *of)), thumbnail_every
        )
        with closing(frames):
            for images in frames:
                segment = torch.from_numpy(images)
                self._scenes = find_scenes(segment, torch.from_numpy(self.tracks_named))
                yield segment

    def tracks(self, arrivals: Tensor) -> Tensor:
        """The scenes of frames of the last segment: no cut in their pixels, one camera, one track if it has a name."""
        return self._scenes[arrivals - (self.position - len(self._scenes))]

    def labels(self, arrivals: Tensor) -> Tensor:
        raise UserError("frames of a camera have no labels")
