"""Image files: a folder with one sub-folder per class and perhaps per track, a flat folder, and subsets of ImageNet."""

import glob
import os
import re
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from streamclr.base.errors import UserError
from streamclr.base.files import near
from streamclr.base.options import checked_size, one_of
from streamclr.streams.datasets.decoders import Decoders
from streamclr.streams.datasets.images import DatasetSource, Images, every_fifth_track
from streamclr.streams.frame import SUFFIXES, BadFrame, dimensions, natural_key, open_frame, track_name
from streamclr.streams.sight import FIT, MIDDLE, Sight, decode, make_sights, spare_of_thumbnails

TRACKS = ("folder", "name", "none")  # what a track is


class FileImages(Images):
    """Images that are read from their files on demand, as squares of `size` pixels.

    sight: what is seen of each picture.
    decoders: read the files, but for a single one that was not expected; None: this process does.
    """

    def __init__(
        self,
        paths: list[Path],
        labels: list[int],
        classes: tuple[str, ...],
        size: int | None,
        tracks: np.ndarray | None = None,
        decoders: Decoders | None = None,
        sight: Sight = MIDDLE,
    ):
        self.paths, self.labels, self.classes, self.tracks = paths, np.array(labels, np.int64), classes, tracks
        self.sight, self.decoders = sight, decoders
        first = _first_size(paths, is_needed=size is None)
        sight.check(*first)
        left, top, right, bottom = sight.box(*first)
        self.size = checked_size(min(224, right - left, bottom - top) if size is None else size)
        self.told, self.has_thumbnails = sight.told(*first), max(right - left, bottom - top) > self.size
        self._coming: dict[int, Future[np.ndarray]] = {}  # by number

    def __len__(self) -> int:
        return len(self.paths)

    def images(self, numbers: np.ndarray) -> np.ndarray:
        images = np.empty((len(numbers), 3, self.size, self.size), np.uint8)
        coming = self._begun(numbers.tolist()) if len(numbers) != 1 or int(numbers[0]) in self._coming else {}
        try:
            for row, number in enumerate(numbers.tolist()):
                pixels = coming[number].result() if coming else decode(self.paths[number], self.size, self.sight)
                images[row] = pixels.transpose(2, 0, 1)
        except BadFrame:
            self._coming |= coming if len(numbers) > 1 else {}  # they are asked for again, one by one
            raise
        return images

    def expect(self, numbers: np.ndarray) -> None:
        begun = self._begun(numbers.tolist())
        for future in self._coming.values():  # of images that are not expected any more
            future.cancel()
        self._coming = begun

    def _begun(self, numbers: list[int]) -> "dict[int, Future[np.ndarray]]":
        """The images of the decoders, if there are any."""
        if self.decoders is None:
            return {}
        begun = {}
        for number in dict.fromkeys(numbers):
            known = self._coming.pop(number, None)
            begun[number] = known or self.decoders.decode(self.paths[number], self.size, self.sight)
        return begun

    def thumbnail(self, number: int) -> bytes | None:
        if not self.has_thumbnails:
            return None
        with suppress(BadFrame):  # it may be gone by now
            return self.sight.thumbnail(open_frame(self.paths[number], partial(spare_of_thumbnails, [self.sight])))
        return None

    def file(self, number: int) -> str | None:
        return str(self.paths[number])

    def subset(self, chosen: np.ndarray) -> "FileImages":
        """The images for which `chosen` is true."""
        paths = [self.paths[i] for i in np.flatnonzero(chosen).tolist()]
        tracks = None if self.tracks is None else self.tracks[chosen]
        labels, how = self.labels[chosen].tolist(), (self.decoders, self.sight)
        return FileImages(paths, labels, self.classes, self.size, tracks, *how)


def folder(
    path: str,
    stc: int | None = None,
    seed: int = 0,
    size: int | None = None,
    passes: int | None = None,
    order: str | None = None,
    tracks: str | None = None,
    decoders: int = 0,
    crop: str | None = None,
    fit: str = FIT,
    mask: str | None = None,
) -> DatasetSource:
    """The images of a folder, of a pattern as `DIR/*.jpg`, or one file, in natural order, once; with stc or order
    without end.

    A folder that has `train/` and `val/` (or `test/`) streams the first and is tested on the second. Any other folder
    with classes streams all images and is tested on every fifth of each class, which stage two does not train on; on
    every fifth track of each class where the tracks are known.

    tracks: what a track is. `folder`: each folder below that of a class, or, where there is no such folder, each folder
        below `path`, without classes. `name`: the part of the file name before the last `_`. `none`: not known.
        Default: `folder` if all images are in folders below those of the classes, else `none`.
    decoders: processes that read the files, in part ahead of when they are needed; 0: this process does.
    crop, fit, mask: see `Sight`.
    """
    pool = Decoders(decoders) if decoders else None
    (sight,) = make_sights(crop, fit, mask, None)
    if tracks not in (None, *TRACKS):
        raise UserError(f"tracks is {tracks!r}: {one_of(str(tracks), TRACKS)}")
    given = Path(path).expanduser()
    if given.is_file() or (glob.has_magic(path) and not given.is_dir()):
        found = [given] if given.is_file() else map(Path, glob.glob(str(given)))
        paths = sorted(filter(Path.is_file, found), key=natural_key)
        if not paths:
            raise UserError(f"no file matches {path!r}: give a pattern of image files")
        images = FileImages(paths, [], (), size, _tracks(paths, tracks or "none"), pool, sight)
        return DatasetSource(images, None, None, stc, seed, 1 if passes is None else passes, order)
    root = _directory(path, "folder")
    splits = [root / name for name in ("val", "test") if (root / "train").is_dir() and (root / name).is_dir()]
    streamed = root / "train" if splits else root
    classes, tracks = _layout(streamed, tracks)
    images = _images(streamed, size, classes, tracks, pool, sight)
    train = test = None
    if splits and classes:
        train, test = images, _images(splits[0], images.size, classes, tracks, pool, sight)
        if images.tracks is not None and test.tracks is not None:
            test.tracks += images.tracks.max() + 1
    elif classes:
        each_its_own = np.arange(len(images))
        held_back = every_fifth_track(images.labels, each_its_own if images.tracks is None else images.tracks)
        if held_back.any():
            train, test = images.subset(~held_back), images.subset(held_back)
    if passes is None and stc is None and order is None:
        passes = 1
    return DatasetSource(images, train, test, stc, seed, passes, order)


def imagenet(
    path: str,
    classes: int | str | Path = "100",
    stc: int | None = 100,
    seed: int = 0,
    size: int = 224,
    passes: int | None = None,
    decoders: int = 0,
) -> DatasetSource:
    """ImageNet or a subset of it: `train/` and `val/`, one folder per class in each.

    classes: how many, in the order of their names; a file that lists the folders, one per line; or their names, with
        commas between.
    """
    root = _directory(path, "imagenet")
    for split in ("train", "val"):
        if not (root / split).is_dir():
            expected = "train/CLASS/*.JPEG and val/CLASS/*.JPEG"
            raise UserError(f"{root} has no folder {split}: ImageNet is expected as {expected}")
    if not (present := class_folders(root / "train")):
        raise UserError(f"{root / 'train'} has no folder: ImageNet is expected unpacked, as train/CLASS/*.JPEG")
    wanted = os.path.expanduser(str(classes))
    if re.fullmatch("-?[0-9]{1,9}", wanted):
        if not 1 <= int(wanted) <= len(present):
            raise UserError(f"classes={classes}, and {root / 'train'} has {len(present)}: use 1 to {len(present)}")
        names = present[: int(wanted)]
    else:
        names = listed_classes(wanted, root / "train")
    pool = Decoders(decoders) if decoders else None
    train, test = (_images(root / split, size, tuple(names), decoders=pool) for split in ("train", "val"))
    return DatasetSource(train, train, test, stc, seed, passes)


def listed_classes(classes: str, train: Path) -> list[str]:
    """The classes that a file lists, one per line, or that are written with commas between; all are folders there."""
    is_file = os.path.isfile(classes)
    if not is_file and "," not in classes:
        raise UserError(f"classes={classes} is neither a number nor a file that lists class folders")
    lines = Path(classes).read_text("utf-8-sig", errors="replace").splitlines() if is_file else classes.split(",")
    what, present = classes if is_file else "classes", class_folders(train)
    names = [line.split()[0] for line in lines if line.strip()]
    for i, name in enumerate(names):
        if name not in present:
            raise UserError(f"{what} lists {name!r}, which is not in {train}")
        if name in names[:i]:
            raise UserError(f"{what} lists {name!r} twice: list each class once")
    if not names:
        raise UserError(f"{what} lists no class: write one folder name per line")
    return names


def class_folders(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.is_dir() and not p.name.startswith("."))


def _directory(path: str, scheme: str) -> Path:
    if not path:
        raise UserError(f"the source {scheme!r} needs a directory: write {scheme}:DIR")
    root = Path(path).expanduser()
    if not root.is_dir():
        raise UserError(f"no directory {path!r}: {near(root) or f'give the {scheme} source one that exists'}")
    return root


def _layout(root: Path, tracks: str | None) -> tuple[tuple[str, ...], str]:
    """The classes, which are the sub-folders that hold images, and what a track is: one of TRACKS."""
    folders = _folders(root)
    flat = tuple(p.name for p in folders if _files(p))
    if tracks in ("name", "none") or (tracks is None and flat):
        return flat, tracks or "none"
    deep = {p.name for p in folders if any(map(_files, _folders(p)))}
    if tracks == "folder" and not deep:  # one level: its folders are the tracks
        if not flat:
            raise UserError(f"tracks=folder, and {root} has no folder with images: leave it out, or use tracks=name")
        return (), "folder"
    if tracks is None and deep and deep <= {"train", "val", "test"}:
        only = ", ".join(sorted(deep))
        raise UserError(f"{root} has only {only}: it needs train and val (or test), or give one of them")
    return tuple(p.name for p in folders if p.name in deep.union(flat)), "folder" if deep else "none"


def _images(
    root: Path,
    size: int | None,
    classes: tuple[str, ...],
    tracks: str = "none",
    decoders: Decoders | None = None,
    sight: Sight = MIDDLE,
) -> FileImages:
    """The images of `classes`; if there are none, those in `root`, unlabelled."""

    def files(directory: Path) -> list[Path]:
        below = _folders(directory) if tracks == "folder" else []
        return [file for one in (directory, *below) for file in _files(one)]

    paths, labels = ([], []) if classes else (files(root), [])
    for label, name in enumerate(classes):
        if not (root / name).is_dir() or not (found := files(root / name)):
            raise UserError(f"no images in {root / name}: the class needs at least one")
        paths += found
        labels += [label] * len(found)
    if not paths:
        kinds = ", ".join(sorted(SUFFIXES))
        raise UserError(f"no images in {root}: it needs {kinds} files, flat or one folder per class")
    tops = {root / name for name in classes} or {root}
    return FileImages(paths, labels, classes, size, _tracks(paths, tracks, tops), decoders, sight)


def _folders(directory: Path) -> list[Path]:
    return sorted((directory / name for name in class_folders(directory)), key=natural_key)


def _files(directory: Path) -> list[Path]:
    found = (p for p in directory.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return sorted(found, key=natural_key)


def _tracks(paths: list[Path], tracks: str, tops: Collection[Path] = ()) -> np.ndarray | None:
    """The number of each file's track. A file in one of `tops`, the folders above those of tracks, is its own."""
    if tracks == "none":
        return None
    if tracks == "folder":
        names = [path if path.parent in tops else path.parent for path in paths]
    else:
        names = [path.with_name(track_name(path)) for path in paths]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def _first_size(paths: list[Path], is_needed: bool) -> tuple[int, int]:
    """Width and height of the first image that can be read; of a square, if there is none and none is needed."""
    first = None
    for path in paths:
        try:
            return dimensions(path)
        except BadFrame as error:
            first = first or error
    if is_needed:
        raise UserError(f"none of {len(paths)} images can be read; {first}")
    return 1, 1
