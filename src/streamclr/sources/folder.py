"""Image files: a folder with one sub-folder per class, a flat folder, and subsets of ImageNet."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from streamclr.errors import UserError
from streamclr.options import checked_size
from streamclr.sources.dataset import DatasetSource

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


class FileImages:
    """Images that are read from their files when asked for, scaled and cut to a square of `size` pixels."""

    def __init__(self, paths: list[Path], labels: list[int], classes: tuple[str, ...], size: int):
        self.paths, self.labels, self.classes, self.size = paths, torch.tensor(labels, dtype=torch.long), classes, size

    def __len__(self) -> int:
        return len(self.paths)

    def images(self, numbers: Tensor) -> Tensor:
        images = torch.empty(len(numbers), 3, self.size, self.size, dtype=torch.uint8)
        for row, number in enumerate(numbers.tolist()):
            images[row] = read_image(self.paths[number], self.size)
        return images

    def subset(self, numbers: list[int]) -> "FileImages":
        labels = self.labels[numbers].tolist()
        return FileImages([self.paths[i] for i in numbers], labels, self.classes, self.size)


def read_image(path: Path, size: int) -> Tensor:
    """3 x size x size, uint8: the upright image in RGB, its shorter side scaled to `size`, the middle cut out."""
    with _opened(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow would cut 16 bits at 255 instead of scaling them
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("RGB")
        if image.size != (size, size):
            image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:  # Pillow's decoders raise them all
        raise UserError(f"cannot read the image {path} ({error}): remove it or replace it") from None


def natural_key(path: Path) -> list[tuple[int, int | str]]:
    """frame2 before frame10; the plain name where that leaves a tie."""
    parts = re.split("([0-9]+)", path.name.lower())
    key: list[tuple[int, int | str]] = [(0, int(p)) if p[0] in "0123456789" else (1, p) for p in parts if p]
    return [*key, (2, path.name)]


def folder(
    path: str, stc: int | None = None, seed: int = 0, size: int | None = None, passes: int | None = None
) -> DatasetSource:
    """The images of a folder, in natural order, once; `stc=` makes an endless stream of its classes.

    A folder that has `train/` and `val/` (or `test/`) streams the first and is tested on the second. One without is
    tested on every fifth image of each class, whose labels stage two never sees; the stream shows all images.
    """
    root = _directory(path, "folder")
    splits = [root / name for name in ("val", "test") if (root / "train").is_dir() and (root / name).is_dir()]
    images = _images(root / "train" if splits else root, size)
    train = test = None
    if splits:
        train, test = images, _images(splits[0], images.size, images.classes)
    elif images.classes:
        each = [(images.labels == label).nonzero()[:, 0] for label in range(len(images.classes))]
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

    classes: how many, the first in the order of their names, or a file that lists the folders, one per line.
    """
    root = _directory(path, "imagenet")
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise UserError(
                f"{root} has no folder {split}: ImageNet is expected as train/CLASS/*.JPEG and val/CLASS/*.JPEG"
            )
    present = sorted(p.name for p in (root / "train").iterdir() if p.is_dir() and not p.name.startswith("."))
    wanted = str(classes)
    if re.fullmatch("-?[0-9]+", wanted):
        if not 1 <= int(wanted) <= len(present):
            raise UserError(f"classes={classes}, and {root / 'train'} has {len(present)}: use 1 to {len(present)}")
        names = present[: int(wanted)]
    else:
        if not Path(wanted).is_file():
            raise UserError(f"classes={classes} is neither a number nor a file that lists class folders")
        lines = Path(wanted).read_text("utf-8", errors="replace").splitlines()
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


def _directory(path: str, scheme: str) -> Path:
    if not path:
        raise UserError(f"the source {scheme!r} needs a directory: write {scheme}:DIR")
    root = Path(path).expanduser()
    if not root.is_dir():
        raise UserError(f"no directory {path!r}: give the {scheme} source one that exists")
    return root


def _images(root: Path, size: int | None, classes: tuple[str, ...] | None = None) -> FileImages:
    """All images below `root`; those of `classes`, or of the sub-folders that hold images, or flat and unlabelled."""

    def files(directory: Path) -> list[Path]:
        found = (p for p in directory.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        return sorted(found, key=natural_key)

    if classes is None:
        folders = sorted((p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=natural_key)
        classes = tuple(p.name for p in folders if files(p))
    paths, labels = ([], []) if classes else (files(root), [])
    for label, name in enumerate(classes):
        if not (root / name).is_dir() or not (found := files(root / name)):
            raise UserError(f"no images in {root / name}: the class needs at least one")
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise UserError(
            f"no images in {root}: it needs {', '.join(sorted(SUFFIXES))} files, flat or one folder per class"
        )
    if size is None:
        with _opened(paths[0]) as image:
            size = min(224, *image.size)
    return FileImages(paths, labels, classes, checked_size(size))
