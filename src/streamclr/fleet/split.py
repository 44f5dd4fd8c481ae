"""A dataset dealt out to the devices of a simulated fleet."""

from functools import cache

import numpy as np

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.streams.datasets.images import DatasetSource, Images
from streamclr.streams.spec import open_source


class Subset(Images):
    """Some of the images of a dataset."""

    def __init__(self, whole: Images, numbers: np.ndarray):
        self.whole, self.numbers = whole, numbers
        self.labels, self.classes = whole.labels[numbers], whole.classes
        self.tracks = None if whole.tracks is None else whole.tracks[numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def images(self, numbers: np.ndarray) -> np.ndarray:
        return self.whole.images(self.numbers[numbers])

    def file(self, number: int) -> str | None:
        return self.whole.file(int(self.numbers[number]))


def deal(labels: np.ndarray, split: str, n_devices: int, seed: int) -> list[np.ndarray]:
    """The numbers of the images that each device sees; every image goes to one device at most.

    split: `classes:2`, two classes for each device, as many devices for each class as for any other, give or take
        one; or `stc`, an even share of all classes for each.
    """
    if n_devices < 1:
        raise UserError(f"devices is {n_devices}: use at least 1")
    kind, _, text = split.partition(":")
    present = np.unique(labels)
    n_each = len(present)
    if kind == "classes":
        n_each = opts.convert(text, int, "the classes of --split")
        if not 1 <= n_each <= len(present):
            raise UserError(f"--split {split} is for 1 to {len(present)} classes: the dataset has no more")
    elif split != "stc":
        raise UserError(f"no split {split!r}: {opts.one_of(split, ['classes:2', 'stc'])}")
    rng = np.random.default_rng(seed)
    # Around and around a shuffled circle of the classes: no device has one twice.
    circle = rng.permutation(present)
    owned = [[circle[(d * n_each + i) % len(circle)] for i in range(n_each)] for d in range(n_devices)]
    parts: list[list[np.ndarray]] = [[] for _ in range(n_devices)]
    for label in present:
        owners = [device for device in range(n_devices) if label in owned[device]]
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        for owner, share in zip(owners, np.array_split(shuffled, max(1, len(owners))), strict=False):
            parts[owner].append(share)
    dealt = [np.sort(np.concatenate(part)) for part in parts]
    if empty := [device for device, numbers in enumerate(dealt) if not len(numbers)]:
        raise UserError(f"{len(labels)} images are too few for {n_devices} devices: device {empty[0]} has none")
    return dealt


def shard(
    source: str, split: str, device: int, n_devices: int, stc: int | None, seed: int, size: int | None = None
) -> DatasetSource:
    """The stream of one device: its part of the dataset, again and again, in runs of `stc` images of a class."""
    whole = whole_of(source, size)
    own = Subset(whole.streamed, deal(whole.streamed.labels, split, n_devices, seed)[device])
    stc, order = (whole.stc, whole.order) if stc is None else (stc, None)
    return DatasetSource(own, whole.train, whole.test, stc, seed=seed + device, order=order)


@cache
def whole_of(source: str, size: int | None = None) -> DatasetSource:
    """The dataset itself; a process that plays several devices opens it once."""
    opened = open_source(source, size=size)
    if isinstance(opened, DatasetSource) and opened.classes:
        return opened
    raise UserError(f"{source} cannot be dealt out to devices: use a dataset with classes, as cifar10 or folder:DIR")
