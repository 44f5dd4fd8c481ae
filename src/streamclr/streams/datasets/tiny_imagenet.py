"""Twenty classes of ImageNet at 64 px: train/ and val/ with one folder per class in each, or an archive of these."""

from pathlib import Path

import numpy as np

from streamclr.base.errors import UserError
from streamclr.streams.datasets.archive import unpacked
from streamclr.streams.datasets.folder import class_folders, imagenet
from streamclr.streams.datasets.images import Images, Splits

TINY_IMAGENET_20_CLASSES = tuple(  # in the order of their folders, n01774750 to n09428293
    "tarantula, tabby, dragonfly, bison, baboon, altar, backpack, basketball, computer keyboard, confectionery, "
    "gasmask, kimono, lifeboat, neck brace, organ, scoreboard, syringe, vestment, ice lolly, seashore".split(", ")
)


def read_tiny_imagenet(place: Path) -> Splits | None:
    """The dataset from a folder or its archive; None if there is no train/."""
    if place.is_file():
        with unpacked(place) as directory:
            return read_tiny_imagenet(directory)
    if not (place / "train").is_dir():
        return None
    source = imagenet(str(place), classes=(n := len(TINY_IMAGENET_20_CLASSES)), size=64)
    if (n_there := len(class_folders(place / "train"))) > n:
        raise UserError(f"{place / 'train'} has {n_there} classes, not the {n} of Tiny ImageNet-20: give its archive")
    return Splits(*_all(source.train), *_all(source.test))


def _all(images: Images | None) -> tuple[np.ndarray, np.ndarray]:
    assert images is not None
    return images.images(np.arange(len(images))), images.labels
