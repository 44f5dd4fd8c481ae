"""Labelled images by index, the tracks that they belong to, and their order in a temporally correlated stream."""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from streamclr.base.errors import UserError
from streamclr.base.options import checked_seed, checked_size, checked_stc, one_of
from streamclr.streams.frame import BadFrame

ORDERS = ("tracks", "pairs", "iid")


class Numbered(Protocol):
    """Images by number: a source, or the labelled images of stage two."""

    def images(self, numbers: np.ndarray) -> np.ndarray: ...  # uint8, n x 3 x H x W


class Images(Numbered, Protocol):
    """Random access to images and their labels.

    tracks: a track is a run of frames of one object from one camera; its frames have one number, in the order of the
        images. The images of a stream, for training and for the test share these numbers.
    """

    labels: np.ndarray  # int64, one per image
    classes: tuple[str, ...]
    tracks: np.ndarray | None = None  # int64, one per image; None: not known
    told: str = ""  # what is seen of the pictures, for a person, if it is not all of them
    has_thumbnails: bool = False  # larger than the images

    def __len__(self) -> int: ...

    def file(self, number: int) -> str | None:
        """The path of an image; None if it has no file of its own."""
        return None

    def thumbnail(self, number: int) -> bytes | None:
        """A JPEG of an image for a person; None if the pixels are all there is."""
        return None

    def expect(self, numbers: np.ndarray) -> None:
        """These come next: where an image takes time to read, begin. They take the place of those expected before."""
        return


@runtime_checkable
class Source(Numbered, Protocol):
    """Images by their number in the stream. Labels, where they are known, are for evaluation only.

    >>> import numpy as np
    >>> from streamclr import Source, open_stream
    >>> class Patterns(Source):
    ...     n_images = 100
    ...     def images(self, numbers):
    ...         return np.stack([np.full((3, 16, 16), number, np.uint8) for number in numbers])
    >>> [tuple(images.shape) for images in open_stream(Patterns()).segments(64)]
    [(64, 3, 16, 16), (36, 3, 16, 16)]
    """

    n_images: int | None = None  # None: endless
    epoch: int | None = None  # images in one pass; None: there are no passes
    in_time: bool = True  # consecutive images may be frames of one scene; False if they were shuffled
    classes: tuple[str, ...] = ()  # empty: unlabelled
    train: Images | None = None  # labelled images for stage two
    test: Images | None = None
    told: str = ""  # as of `Images`
    has_thumbnails: bool = False  # as of `Images`

    def labels(self, numbers: np.ndarray) -> np.ndarray: ...

    def tracks(self, numbers: np.ndarray) -> np.ndarray | None:
        """The track of each image, int64; the same in every pass. None: not known."""
        return None

    def thumbnail(self, number: int) -> bytes | None:
        """As of `Images`, by the image's number in the stream."""
        return None

    def expect(self, numbers: np.ndarray) -> None:
        """As of `Images`, by the images' numbers in the stream."""
        return


def readable(source: Numbered, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[int, BadFrame]]:
    """The images that can be read, their numbers, and the errors of the others by number."""
    try:
        return checked_images(source.images(numbers)), numbers, {}
    except BadFrame:  # at least one: again, one by one
        parts, bad = [], {}
    for number in numbers.tolist():
        try:
            parts.append(checked_images(source.images(np.array([number]))))
        except BadFrame as error:
            bad[number] = error
    good = [number for number in numbers.tolist() if number not in bad]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8), np.array(good, np.int64), bad


def checked_images(images: np.ndarray) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3:
        shape = " x ".join(map(str, images.shape))
        raise UserError(f"the images are {shape} of {images.dtype}: give n x 3 x H x W of uint8, with values 0 to 255")
    return images


class ArrayImages(Images):
    """Images in one array, n x 3 x H x W of uint8.

    size: they are scaled to it as they are read, so that an array that is mapped from a file stays there.

    >>> import numpy as np
    >>> from streamclr import ArrayImages
    >>> ArrayImages(np.zeros((6, 3, 32, 32), np.uint8), labels=np.array([0, 1, 0, 1, 0, 1]), classes=["cat", "dog"])
    ArrayImages(6 x 3 x 32 x 32, 2 classes)
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        tracks: np.ndarray | None = None,
        size: int | None = None,
    ):
        self.size = None if size is None else checked_size(size)
        self._images, self.labels = checked_images(images), labels.astype(np.int64, copy=False)
        self.classes, self.tracks = tuple(classes), tracks
        for name, given in (("label", labels if classes else None), ("track", tracks)):
            if given is not None and len(given) != len(images):
                n = f"{len(images)} images and {len(given)} {name}s"
                raise UserError(f"there are {n}: give one {name} for each image")

    def __len__(self) -> int:
        return len(self._images)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self._images.shape))
        return f"ArrayImages({shape}, {len(self.classes)} classes{'' if self.tracks is None else ', tracks'})"

    def images(self, numbers: np.ndarray) -> np.ndarray:
        return _resized(self._images[numbers], self.size)


def _resized(images: np.ndarray, size: int | None) -> np.ndarray:
    if size is None or images.shape[-2:] == (size, size):
        return images
    import torch
    import torch.nn.functional as F

    chunks = (
        F.interpolate(chunk.float(), (size, size), mode="bilinear", antialias=True)
        for chunk in torch.from_numpy(images).split(256)
    )
    return torch.cat([chunk.round().clamp(0, 255).byte() for chunk in chunks]).numpy()


class Splits(NamedTuple):
    """A dataset that fits in memory: uint8 images n x 3 x H x W, int64 labels and tracks."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    train_tracks: np.ndarray | None = None
    test_tracks: np.ndarray | None = None


def every_fifth_track(labels: np.ndarray, tracks: np.ndarray) -> np.ndarray:
    """Whether an image is held back for the test: it is in the 5th, 10th, … track of its class, in their order."""
    held_back = []
    for label in np.unique(labels):
        own, first = np.unique(tracks[labels == label], return_index=True)
        held_back.append(own[np.argsort(first)][4::5])
    return np.isin(tracks, np.concatenate([tracks[:0], *held_back]))


class DatasetSource(Source):
    """A stream of a dataset, pass after pass, each image once a pass.

    streamed: the images of the stream.
    train, test: labelled images for stage two; None if there are none.
    stc: strength of temporal correlation, the length of the runs of one class (Sec. IV-A). The last run of a class may
        be shorter. 1 is iid: a new shuffle each pass. None is the order of the dataset.
    order: instead of stc: `tracks`, whole tracks in a new random order each pass, the frames of a track in their order;
        `pairs`, pairs of frames of one track, all in random order; or `iid`, the same as stc=1.
    passes: how often the dataset is streamed; None: without end.
    """

    epoch: int

    def __init__(
        self,
        streamed: Images,
        train: Images | None,
        test: Images | None,
        stc: int | None,
        seed: int = 0,
        passes: int | None = None,
        order: str | None = None,
    ):
        if order is not None:
            _check_order(order, stc, streamed)
        if order == "iid":
            stc, order = 1, None
        if passes is not None and passes < 1:
            raise UserError(f"passes is {passes}: use at least 1, or leave it out for an endless stream")
        if stc is not None and stc > 1 and not streamed.classes:
            raise UserError(f"stc={stc} needs classes, and these images have none: leave it out, or use stc=1")
        self.streamed, self.train, self.test, self.classes = streamed, train, test, streamed.classes
        self.stc, self.order = None if stc is None else checked_stc(stc), order
        self.in_time = stc is None
        self.seed, self.epoch = checked_seed(seed), len(streamed)
        self.n_images = None if passes is None else passes * len(streamed)
        self.told, self.has_thumbnails = streamed.told, streamed.has_thumbnails
        self._last_classes: list[int] = []  # last class of each pass so far: the next pass starts with another
        self._indices_of = lru_cache(maxsize=32)(self._make_order)

    def images(self, numbers: np.ndarray) -> np.ndarray:
        return self.streamed.images(self._indices(numbers))

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        return self.streamed.labels[self._indices(numbers)]

    def tracks(self, numbers: np.ndarray) -> np.ndarray | None:
        return None if self.streamed.tracks is None else self.streamed.tracks[self._indices(numbers)]

    def thumbnail(self, number: int) -> bytes | None:
        return self.streamed.thumbnail(int(self._indices(np.array([number]))[0]))

    def expect(self, numbers: np.ndarray) -> None:
        self.streamed.expect(self._indices(numbers))

    def file(self, number: int) -> str | None:
        """The path of an image by its number in the stream."""
        return self.streamed.file(int(self._indices(np.array([number]))[0]))

    def _indices(self, numbers: np.ndarray) -> np.ndarray:
        passes, places = numbers // self.epoch, numbers % self.epoch
        indices = np.empty_like(numbers)
        for pass_ in np.unique(passes).tolist():
            here = passes == pass_
            indices[here] = self._indices_of(pass_)[places[here]]
        return indices

    def _make_order(self, pass_: int) -> np.ndarray:
        if self.order == "tracks":
            return self._track_after_track(np.random.default_rng([self.seed, pass_]))
        if self.order == "pairs":
            return self._pair_after_pair(np.random.default_rng([self.seed, pass_]))
        if self.stc is None:
            return np.arange(self.epoch)
        if self.stc == 1:
            return np.random.default_rng([self.seed, pass_]).permutation(self.epoch)
        for earlier in range(len(self._last_classes), pass_):
            self._runs(earlier)
        return np.concatenate(self._runs(pass_))

    def _track_after_track(self, rng: np.random.Generator) -> np.ndarray:
        assert self.streamed.tracks is not None
        _, track = np.unique(self.streamed.tracks, return_inverse=True)  # 0 to n - 1
        places = rng.permutation(track.max() + 1)  # of each track in this pass
        return np.argsort(places[track], kind="stable")

    def _pair_after_pair(self, rng: np.random.Generator) -> np.ndarray:
        """A track with an odd number of frames ends with a single one."""
        assert self.streamed.tracks is not None
        shuffled = np.lexsort((rng.random(self.epoch), self.streamed.tracks))  # track after track, each in random order
        tracks = self.streamed.tracks[shuffled]
        place = np.arange(self.epoch) - np.searchsorted(tracks, tracks)  # of a frame in its track
        pair = (place % 2 == 0).cumsum() - 1
        return shuffled[np.argsort(rng.permutation(pair[-1] + 1)[pair], kind="stable")]

    def _runs(self, pass_: int) -> list[np.ndarray]:
        """The runs of one pass. Neighbours have different classes, across passes too, where that is possible."""
        rng = np.random.default_rng([self.seed, pass_])
        labels, stc = self.streamed.labels, self.stc or 1
        runs = []
        for label in np.unique(labels):
            shuffled = rng.permutation(np.flatnonzero(labels == label))
            cuts = [shuffled[i : i + stc] for i in range(0, len(shuffled), stc)]
            rng.shuffle(order := np.arange(len(cuts)))
            runs.append([cuts[i] for i in order])
        last = self._last_classes[pass_ - 1] if pass_ else None
        places = _arrange([len(r) for r in runs], last, random.Random(int(rng.integers(2**63))))
        if len(self._last_classes) == pass_:
            self._last_classes.append(places[-1])
        return [runs[place].pop() for place in places]


def _check_order(order: str, stc: int | None, streamed: Images) -> None:
    if order not in ORDERS:
        raise UserError(f"order is {order!r}: {one_of(order, ORDERS)}")
    if stc is not None:
        raise UserError(f"order={order} and stc={stc} are two orders: use one of them")
    if order != "iid" and streamed.tracks is None:
        raise UserError(f"order={order}, and these images have no tracks: use order=iid, or for a folder tracks=name")


def _arrange(counts: list[int], last: int | None, rng: random.Random) -> list[int]:
    """A random sequence with `counts[c]` times each c, in which neighbours differ and the first is not `last`.

    If there is no such sequence, the most frequent class repeats as rarely as possible.
    """
    counts, places = list(counts), []
    for left in range(sum(counts), 0, -1):
        # Runs of one class need others between them: a class with more than half of what is left must be next.
        weights = [0 if c == last else n for c, n in enumerate(counts)]
        most = max(range(len(counts)), key=lambda c: (counts[c], c != last))
        must = 2 * counts[most] > left and most != last
        chosen = most if must or not any(weights) else rng.choices(range(len(counts)), weights)[0]
        counts[chosen] -= 1
        places.append(chosen)
        last = chosen
    return places
