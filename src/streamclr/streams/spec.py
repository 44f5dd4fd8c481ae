"""Parses source strings such as `cifar10?stc=500`, `clip.mp4` or `rtsp://camera/1`.

Needs no torch, so that a device without it can classify from any source.
"""

import glob
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.files import near
from streamclr.streams.cameras.feed import KINDS, Feed, make_feed
from streamclr.streams.datasets.folder import folder, imagenet
from streamclr.streams.datasets.images import Source
from streamclr.streams.datasets.registry import DATASETS, dataset
from streamclr.streams.datasets.synthetic import Synthetic
from streamclr.streams.frame import SUFFIXES
from streamclr.streams.sight import FIT, MIDDLE

SOURCES: dict[str, Callable[..., Source]] = {
    "synthetic": Synthetic,
    **{name: partial(dataset, name) for name in DATASETS},
    "imagenet": imagenet,
    "folder": folder,
}
FEEDS: dict[str, Callable[..., Feed]] = {kind: partial(make_feed, kind) for kind in KINDS}
URLS = {"rtsp": "rtsp", "rtsps": "rtsp", "http": "http", "https": "http"}  # scheme: kind of feed
VIDEOS = {".mp4", ".mkv", ".avi", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".mjpeg", ".mjpg", ".h264"}


def open_source(source: str | Path, **options: Any) -> Source | list[Feed]:
    """The source of a source string: images by their numbers, or a list of cameras and recordings.

    Options may stand in the string or be given as keywords, which win.
    """
    name, path, written = split_source(source)
    given = written | {key: value for key, value in options.items() if value is not None}
    if name in SOURCES:
        return opts.build(SOURCES[name], given, f"the source {name}", path)
    lines = [(name, path, {})] if name in FEEDS else [_listed(line, path) for line in _lines(path)]
    feeds = []
    for kind, where, own in lines:
        if kind not in FEEDS:
            raise UserError(f"{path} lists {kind}:{where}: a list may only have cameras and recordings")
        feeds.append(opts.build(FEEDS[kind], given | own, f"the source {kind}", where))
    return feeds


def _listed(line: str, path: str) -> tuple[str, str, dict[str, str]]:
    try:
        return split_source(line)
    except UserError as error:
        raise UserError(f"{path} is read as a list of cameras and recordings: {error}") from None


def takes(source: str | Path, option: str) -> bool:
    """Whether a source has an option."""
    name = split_source(source)[0]
    return option in inspect.signature(SOURCES.get(name) or make_feed).parameters


def split_source(source: str | Path) -> tuple[str, str, dict[str, str]]:
    """Name, path and options of a source such as `folder:DIR?size=64`. Without a name its kind is recognised.

    The options of a URL come after a `#`, as in `http://camera/video?id=1#fps=5`. Without a `#`, those in its query
    that have the name of an option are taken.
    """
    text = str(source)
    if not text.strip():
        raise UserError("the source is empty: give a file, a directory, a camera (0, rtsp://…) or a dataset")
    scheme, _, rest = text.partition("://")
    if rest and scheme in URLS:
        url, _, fragment = text.partition("#")
        if fragment:
            if "=" not in fragment or "@" in fragment:
                raise UserError(
                    "the text after the # of a URL is not an option such as fps=5: write a # in a password as %23"
                )
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
    if file.is_file() and file.suffix.lower() in SUFFIXES:
        return "folder", text, options  # of one image
    if file.is_file() and file.suffix.lower() in (".txt", ".list"):
        return "list", text, options
    raise UserError(_not_a_source(text, file, name))


def _not_a_source(text: str, file: Path, name: str) -> str:
    """What is wrong with a source that is none."""
    if text and file.exists():
        kinds = f"a directory, a video ({', '.join(sorted(VIDEOS)[:6])} …), an image or a list of cameras (.txt)"
        return f"{text} is no file that can be read as images: give {kinds}; for a video of another name video:{text}"
    if glob.has_magic(text):
        inside = f", it has {_contents(file.parent)}" if file.parent.is_dir() else ""
        return f"no file matches {text!r}: look into {file.parent}{inside}"
    if "://" not in text and (file.suffix.lower() in {*VIDEOS, *SUFFIXES, ".txt", ".list"} or "/" in text):
        return f"no file {text}: {near(file) or 'give one that exists'}"
    what, meant = "a file, a directory, a camera (0, rtsp://…) or a dataset", "://" not in text and near(file)
    return f"no source {opts.redacted(text)!r}: it is not {what}; {meant or opts.one_of(name, [*SOURCES, *FEEDS])}"


def _contents(directory: Path) -> str:
    """What kinds of files a directory has, the most frequent first."""
    kinds = Counter(path.suffix.lower() or "without a suffix" for path in directory.iterdir() if path.is_file())
    return ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(3)) or "no files"


def absolute_source(source: str) -> str:
    """The same source with absolute paths, and with what it sees of each picture where it leaves that open."""
    name, path, options = split_source(source)
    if mask := options.get("mask"):
        options["mask"] = os.path.abspath(os.path.expanduser(mask))
    # Links are not resolved: /dev/v4l/by-id/… is the same camera after a restart, /dev/video0 may be another.
    if name == "imagenet" and os.path.isfile(listed := os.path.expanduser(options.get("classes", ""))):
        options["classes"] = os.path.abspath(listed)
    if takes(source, "fit"):
        options.setdefault("fit", FIT)
    if path and name not in URLS.values():
        path = os.path.abspath(os.path.expanduser(path))
    return _written(name, path, options, source)


def with_fit(source: str, fit: str = MIDDLE.fit) -> str:
    """The same source, with this fit unless it has one. Runs of versions that had no choice took the middle square."""
    name, path, options = split_source(source)
    if "fit" in options or not takes(source, "fit"):
        return source
    return _written(name, path, {**options, "fit": fit}, source)


def fit_of(source: str) -> str:
    """How the frames of a source become squares."""
    return split_source(source)[2].get("fit", MIDDLE.fit)


def _written(name: str, path: str, options: dict[str, str], source: str) -> str:
    """The source string of what `split_source` finds."""
    query = urlencode(options)
    if name in URLS.values():
        return path + (f"#{query}" if query else "")
    if name == "stdin":
        return "-" + (f"?{query}" if query else "")
    where = f":{path}" if path else ":" * (":" in source)
    return name + where + (f"?{query}" if query else "")


def _lines(path: str) -> list[str]:
    """The sources that a file lists, one a line; lines that begin with `#` are comments."""
    if not Path(path).is_file():
        raise UserError(f"no file {path}: {near(path) or 'a list has a source on each line'}")
    lines = [line.strip() for line in Path(path).read_text("utf-8", errors="replace").splitlines()]
    if not (sources := [line for line in lines if line and not line.startswith("#")]):
        raise UserError(f"{path} lists no source: write one on each line")
    return sources
