"""Image files: a folder with one sub-folder per class, a flat folder, and subsets of ImageNet."""

import glob
import os
import re
from pathlib import Path

import numpy as np

from streamclr.base.errors import UserError
from streamclr.base.options import checked_size
from streamclr.streams.datasets.images import DatasetSource
from streamclr.streams.frame import SUFFIXES, BadFrame, decode, dimensions, natural_key


class FileImages:
    """Images that are read from their files on demand, scaled and cropped to a square of `size` pixels."""

    tracks: np.ndarray | None = None

    def __init__(self, paths: list[Path], labels: list[int], classes: tuple[str, ...], size: int | None):
        self.paths, self.labels, self.classes = paths, np.array(labels, np.int64), classes
        self.size = checked_size(_default_size(paths) if size is None else size)

    def __len__(self) -> int:
        return len(self.paths)

    def images(self, numbers: np.ndarray) -> np.ndarray:
        images = np.empty((len(numbers), 3, self.size, self.size), np.uint8)
        for row, number in enumerate(numbers.tolist()):
            images[row] = decode(self.paths[number], self.size).transpose(2, 0, 1)
        return images

    def file(self, number: int) -> str | None:
        return str(self.paths[number])

    def subset(self, numbers: list[int]) -> "FileImages":
        labels = self.labels[numbers].tolist()
        return FileImages([self.paths[i] for i in numbers], labels, self.classes, self.size)


def folder(
    path: str, stc: int | None = None, seed: int = 0, size: int | None = None, passes: int | None = None
) -> DatasetSource:
    """The images of a folder, or of a pattern as `DIR/*.jpg`, in natural order, once; with `stc` without end.

    A folder that has `train/` and `val/` (or `test/`) streams the first and is tested on the second. Any other folder
    with classes streams all images and is tested on every fifth of each class, which stage two does not train on.
    """
    if glob.has_magic(path) and not Path(path).is_dir():
        paths = sorted(filter(Path.is_file, map(Path, glob.glob(str(Path(path).expanduser())))), key=natural_key)
        if not paths:
            raise UserError(f"no file matches {path!r}: give a pattern of image files")
        return DatasetSource(FileImages(paths, [], (), size), None, None, stc, seed, 1 if passes is None else passes)
    root = _directory(path, "folder")
    splits = [root / name for name in ("val", "test") if (root / "train").is_dir() and (root / name).is_dir()]
    images = _images(root / "train" if splits else root, size)
    train = test = None
    if splits:
        train, test = images, _images(splits[0], images.size, images.classes)
    elif images.classes:
        each = [np.flatnonzero(images.labels == label) for label in range(len(images.classes))]
        held_back = {i for numbers in each for i in numbers[4::5].tolist()}
        if held_back:
            train = images.subset([i for i in range(len(images)) if i not in held_back])
            test = images.subset(sorted(held_back))
    if passes is None and stc is None:
        passes = 1
    return DatasetSource(images, train, test, stc, seed, passes)


def imagenet(
    path: str,
    classes: int | str | Path = "100",
    stc: int | None = 100,
    seed: int = 0,
    size: int = 224,
    passes: int | None = None,
) -> DatasetSource:
    """ImageNet or a subset of it: `train/` and `val/`, one folder per class in each.

    classes: how many, in the order of their names, or a file that lists the folders, one per line.
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
        if not os.path.isfile(wanted):
            raise UserError(f"classes={classes} is neither a number nor a file that lists class folders")
        lines = Path(wanted).read_text("utf-8-sig", errors="replace").splitlines()
        names = [line.split()[0] for line in lines if line.strip()]
        for i, name in enumerate(names):
            if name not in present:
                raise UserError(f"{classes} lists {name!r}, which is not in {root / 'train'}")
            if name in names[:i]:
                raise UserError(f"{classes} lists {name!r} twice: list each class once")
        if not names:
            raise UserError(f"{classes} lists no class: write one folder name per line")
    train, test = (_images(root / split, size, tuple(names)) for split in ("train", "val"))
    return DatasetSource(train, train, test, stc, seed, passes)


def class_folders(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.is_dir() and not p.name.startswith("."))


def _directory(path: str, scheme: str) -> Path:
    if not path:
        raise UserError(f"the source {scheme!r} needs a directory: write {scheme}:DIR")
    root = Path(path).expanduser()
    if not root.is_dir():
        raise UserError(f"no directory {path!r}: give the {scheme} source one that exists")
    return root


def _images(root: Path, size: int | None, classes: tuple[str, ...] | None = None) -> FileImages:
    """The images of `classes`, or of all sub-folders that hold images; if none does, those in `root`, unlabelled."""

    def files(directory: Path) -> list[Path]:
        found = (p for p in directory.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        return sorted(found, key=natural_key)

    if classes is None:
        folders = sorted(map(Path, class_folders(root)), key=natural_key)
        classes = tuple(p.name for p in folders if files(root / p))
    paths, labels = ([], []) if classes else (files(root), [])
    for label, name in enumerate(classes):
        if not (root / name).is_dir() or not (found := files(root / name)):
            raise UserError(f"no images in {root / name}: the class needs at least one")
        paths += found
        labels += [label] * len(found)
    if not paths:
        kinds = ", ".join(sorted(SUFFIXES))
        raise UserError(f"no images in {root}: it needs {kinds} files, flat or one folder per class")
    return FileImages(paths, labels, classes, size)


def _default_size(paths: list[Path]) -> int:
    """The size of the first image that can be read, at most 224."""
    first = None
    for path in paths:
        try:
            return min(224, *dimensions(path))
        except BadFrame as error:
            first = first or error
    raise UserError(f"none of {len(paths)} images can be read; {first}")
