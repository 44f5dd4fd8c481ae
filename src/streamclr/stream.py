"""A stream: segments of uint8 images in order, from any source, with its position, so that it can resume."""

import glob
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode

import torch
from torch import Tensor

from streamclr import options as opts
from streamclr.account import Account
from streamclr.data import DATASETS, dataset
from streamclr.errors import UserError
from streamclr.live import KINDS, LiveStream, make_feed
from streamclr.sources.capture import Feed
from streamclr.sources.dataset import Images, readable
from streamclr.sources.folder import folder, imagenet
from streamclr.sources.synthetic import Synthetic


class Source(Protocol):
    """Images by their number in the stream. Labels, where they are known, are for evaluation only."""

    @property
    def n_images(self) -> int | None: ...  # None: endless

    @property
    def epoch(self) -> int | None: ...  # images in one pass; None: there is no such thing

    @property
    def classes(self) -> tuple[str, ...]: ...  # empty: unlabelled

    @property
    def train(self) -> Images | None: ...  # labelled images for stage two

    @property
    def test(self) -> Images | None: ...

    def images(self, numbers: Tensor) -> Tensor: ...

    def labels(self, numbers: Tensor) -> Tensor: ...


SOURCES: dict[str, Callable[..., Source]] = {
    "synthetic": Synthetic,
    **{name: partial(dataset, name) for name in DATASETS},
    "imagenet": imagenet,
    "folder": folder,
}
FEEDS: dict[str, Callable[..., Feed]] = {kind: partial(make_feed, kind) for kind in KINDS}
URLS = {"rtsp": "rtsp", "rtsps": "rtsp", "http": "http", "https": "http"}  # scheme: kind of feed
VIDEOS = {".mp4", ".mkv", ".avi", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".mjpeg", ".mjpg", ".h264"}


def open_stream(source: str | Path, **options: Any) -> "AnyStream":
    """A stream from a source string such as `synthetic:`, `cifar10?stc=500`, `clip.mp4` or `rtsp://camera/1`.

    Options may stand in the string or be given as keywords, which win.
    """
    name, path, written = split_source(source)
    given = written | {key: value for key, value in options.items() if value is not None}
    if name in SOURCES:
        return Stream(opts.build(SOURCES[name], given, f"the source {name}", path))
    lines = [(name, path, {})] if name in FEEDS else [split_source(line) for line in _lines(path)]
    feeds = []
    for kind, where, own in lines:
        if kind not in FEEDS:
            raise UserError(f"{path} lists {kind}:{where}: a list is of cameras and recordings")
        feeds.append(opts.build(FEEDS[kind], given | own, f"the source {kind}", where))
    return LiveStream(feeds)


def takes(source: str | Path, option: str) -> bool:
    """Whether a source has an option."""
    name = split_source(source)[0]
    return option in inspect.signature(SOURCES.get(name) or make_feed).parameters


def split_source(source: str | Path) -> tuple[str, str, dict[str, str]]:
    """`folder:DIR?size=64` as name, path and options; what is written without a name is found by what it is.

    The options of a URL stand behind a `#`, as in `http://camera/video?id=1#fps=5`, or, if there is none, among those
    of its query that are ours.
    """
    text = str(source)
    scheme, _, rest = text.partition("://")
    if rest and scheme in URLS:
        url, _, fragment = text.partition("#")
        if fragment:
            if "=" not in fragment or "@" in fragment:
                raise UserError("what stands behind the # of a URL is no option: write a # in a password as %23")
            return URLS[scheme], url, opts.split(f"?{fragment}")[1]
        url, _, query = url.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        ours = {key: value for key, value in pairs if key in list(inspect.signature(make_feed).parameters)[2:]}
        left = urlencode([(key, value) for key, value in pairs if key not in ours])
        return URLS[scheme], (text if not ours else url + (f"?{left}" if left else "")), ours
    text, options = opts.split(text)
    name, _, path = text.partition(":")
    if name in SOURCES or name in FEEDS or name == "list":
        return name, path, options
    file = Path(text)
    if text == "-":
        return "stdin", "", options
    if re.fullmatch("[0-9]+|/dev/video[0-9]+", text):
        return "camera", text if text.startswith("/") else f"/dev/video{text}", options
    if (text and file.is_dir()) or (glob.has_magic(text) and glob.glob(text)):
        return "folder", text, options
    if file.is_file() and file.suffix.lower() in VIDEOS:
        return "video", text, options
    if file.is_file() and file.suffix.lower() in (".txt", ".list"):
        return "list", text, options
    names = opts.one_of(name, [*SOURCES, *FEEDS])
    raise UserError(f"no source {opts.redacted(text)!r}: it is no directory, no video file, no URL, and {names}")


def absolute_source(source: str) -> str:
    """The same source, to be found from any working directory."""
    name, path, options = split_source(source)
    if name in URLS.values() or name == "stdin":
        return source
    # A link stays one: /dev/v4l/by-id/… is the same camera after a restart, /dev/video0 may be another.
    where = f":{os.path.abspath(os.path.expanduser(path))}" if path else ":" * (":" in source)
    return name + where + (f"?{urlencode(options)}" if options else "")


def _lines(path: str) -> list[str]:
    """The sources that a file lists, one a line; `#` begins a line that is not one."""
    if not Path(path).is_file():
        raise UserError(f"no file {path!r}: a list has a source on each line")
    lines = [line.strip() for line in Path(path).read_text("utf-8", errors="replace").splitlines()]
    if not (sources := [line for line in lines if line and not line.startswith("#")]):
        raise UserError(f"{path} lists no source: write one on each line")
    return sources


class Stream:
    """The images of a source that can be read; the others are passed over and counted."""

    live = False
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

    def read(self, n: int, until: int | None = None) -> Tensor:
        """The next `n` images that can be read, n x 3 x H x W; fewer where the stream ends, or before `until`."""
        end = min(e for e in (until, self.source.n_images, sys.maxsize) if e is not None)
        parts, n_left, last_good = [torch.empty(0, dtype=torch.uint8)], n, self.position
        while n_left and self.position < end:
            numbers = torch.arange(self.position, min(self.position + n_left, end))
            images, good, bad = readable(self.source, numbers)
            self.account.add(Account(len(numbers), len(good), rejected=Counter(e.reason for e in bad.values())))
            self.skipped += bad
            self.position += len(numbers)
            parts.append(images)
            n_left -= len(good)
            if len(good):
                last_good = self.position
            elif self.source.epoch is not None and self.position - last_good >= self.source.epoch:
                raise UserError(f"not one image of a whole pass can be read; {next(iter(bad.values()))}")
        return torch.cat(parts)

    def labels(self, arrivals: Tensor) -> Tensor:
        """The labels of images by the order in which they were read, in which those passed over have no number."""
        skipped = torch.tensor(self.skipped, dtype=torch.long)
        before = skipped - torch.arange(len(skipped))  # how many had been read when each was passed over
        return self.source.labels(arrivals + torch.searchsorted(before, arrivals, right=True))

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


AnyStream = Stream | LiveStream
