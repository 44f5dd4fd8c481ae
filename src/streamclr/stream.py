"""A stream: segments of uint8 images in order, from any source, with its position, so that it can resume."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import torch
from torch import Tensor

from streamclr import options as opts
from streamclr.data import DATASETS, dataset
from streamclr.errors import UserError
from streamclr.sources.dataset import Images
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


def open_stream(source: str | Path, **options: Any) -> "Stream":
    """A stream from a source string such as `synthetic:`, `cifar10?stc=500&seed=1` or `folder:DIR`.

    Options may stand in the string or be given as keywords, which win.
    """
    name, path, written = split_source(source)
    given = written | {key: value for key, value in options.items() if value is not None}
    return Stream(opts.build(SOURCES[name], given, f"the source {name}", path))


def split_source(source: str | Path) -> tuple[str, str, dict[str, str]]:
    """`folder:DIR?size=64` as name, path and options; a directory alone is a folder."""
    text, options = opts.split(str(source))
    name, _, path = text.partition(":")
    if name not in SOURCES:
        if not text or not Path(text).is_dir():
            raise UserError(f"no source {text!r}: it is no directory, and {opts.one_of(name, SOURCES)}")
        name, path = "folder", text
    return name, path, options


def absolute_source(source: str) -> str:
    """The same source, to be found from any working directory."""
    name, path, options = split_source(source)
    where = f":{Path(path).expanduser().resolve()}" if path else ":" * (":" in source)
    return name + where + (f"?{urlencode(options)}" if options else "")


class Stream:
    def __init__(self, source: Source):
        self.source = source
        self.position = 0  # the number of the next image

    def read(self, n: int) -> Tensor:
        """The next `n` images, n x 3 x H x W."""
        images = self.source.images(torch.arange(self.position, self.position + n))
        self.position += n
        return images

    def segments(self, n: int, until: int | None = None) -> Iterator[Tensor]:
        """Segments of `n` images until the stream ends, or until image number `until`; the last may be smaller."""
        if n < 1:
            raise UserError(f"the segment size is {n}: use at least 1")
        ends = [end for end in (until, self.source.n_images) if end is not None]

        def generate() -> Iterator[Tensor]:
            while not ends or self.position < min(ends):
                yield self.read(min([n] + [end - self.position for end in ends]))

        return generate()

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
