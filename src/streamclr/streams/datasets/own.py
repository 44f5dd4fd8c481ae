"""Images of a program: an array, a torch Dataset or another sequence of images, perhaps with labels and tracks."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from streamclr.base.errors import UserError
from streamclr.base.options import checked_size
from streamclr.streams.datasets.images import ArrayImages, DatasetSource, Images
from streamclr.streams.frame import Frame, eight_bits, on_white
from streamclr.streams.sight import FIT, Sight


class Sized(Protocol):
    """A torch Dataset, a list: items by their numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Any: ...


def as_images(
    data: Any, labels: Any = None, tracks: Any = None, classes: Sequence[str] | None = None, size: int | None = None
) -> Images:
    """Images by number, of one of these:

    data: images already; uint8, n x 3 x H x W or n x H x W x 3; a sequence of what `pixels_of` takes, such as a torch
        Dataset, whose labels are its `targets` unless they are given; or a pair of images and labels.
    labels, tracks: a whole number for each image.
    classes: the names of the labels 0, 1 and so on; default: those of the dataset, or these numbers.
    size: side of the images in pixels, to which they are scaled; default: as they are.
    """
    if is_images(data):
        given = {"labels": labels, "tracks": tracks, "classes": classes, "size": size}
        if extra := [name for name, value in given.items() if value is not None]:
            raise UserError(f"{extra[0]} is given, and the {type(data).__name__} has its own: leave it out")
        return data
    if isinstance(data, tuple) and len(data) == 2 and labels is None:
        data, labels = data
    array = as_array(data)
    if array is None and not is_sequence(data):
        raise UserError(f"a {type(data).__name__} is no images: {DUE}")
    if labels is None and array is None:
        labels = getattr(data, "targets", None)
    if classes is None and array is None:
        classes = getattr(data, "classes", None)
    labels, tracks = (_whole_numbers(name, one) for name, one in (("labels", labels), ("tracks", tracks)))
    if labels is None:
        labels, classes = np.empty(0, np.int64), ()
    elif classes is None:
        classes = [str(label) for label in range(labels.max(initial=-1) + 1)]
    if len(labels) and (labels.min() < 0 or labels.max() >= len(classes)):
        raise UserError(f"the labels are {labels.min()} to {labels.max()}, and there are {len(classes)} classes")
    if array is not None:
        return ArrayImages(array, labels, classes, tracks, size)
    return SequenceImages(data, labels, classes, tracks, size)


DUE = "give uint8, n x 3 x H x W, a torch Dataset or a list of images"


def own_source(
    data: Any,
    labels: Any = None,
    tracks: Any = None,
    classes: Any = None,
    size: int | None = None,
    stc: int | None = None,
    seed: int = 0,
    passes: int | None = None,
    order: str | None = None,
) -> DatasetSource:
    """A stream of them, in their order, once; with stc or order without end. See `as_images` and `DatasetSource`."""
    images = as_images(data, labels, tracks, classes, size)
    if not len(images):
        raise UserError(f"there are no images: {DUE}")
    if passes is None and stc is None and order is None:
        passes = 1
    return DatasetSource(images, images if images.classes else None, None, stc, seed, passes, order)


def is_images(data: Any) -> bool:
    return hasattr(data, "__len__") and callable(getattr(data, "images", None))


def is_sequence(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping | str | bytes)


def as_array(data: Any) -> np.ndarray | None:
    """A tensor or an array as n x 3 x H x W; None of anything else. What is mapped from a file stays there."""
    if not isinstance(data, np.ndarray):
        if not hasattr(data, "detach"):  # a tensor, without an import of torch
            return None
        data = data.detach().cpu().numpy()
    return np.moveaxis(data, -1, 1) if data.ndim == 4 and data.shape[1] != 3 and data.shape[-1] == 3 else data


def _whole_numbers(name: str, given: Any) -> np.ndarray | None:
    if given is None:
        return None
    numbers = np.asarray(given)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        due = "give one whole number for each image"
        raise UserError(f"the {name} are {numbers.dtype} of shape {numbers.shape}: {due}")
    return numbers.astype(np.int64)


def pixels_of(item: Any, what: str, size: int | None = None) -> np.ndarray:
    """3 x H x W of uint8. item: uint8, 3 x H x W or H x W x 3, or a picture of Pillow.

    size: what of it becomes a square of this side is as in a folder of images.
    """
    if isinstance(item, Image.Image):
        picture = on_white(eight_bits(item, what))
        pixels = np.asarray(picture).transpose(2, 0, 1)
    else:
        pixels = np.asarray(item.detach().cpu() if hasattr(item, "detach") else item)
        if pixels.ndim == 3 and pixels.shape[0] != 3 and pixels.shape[-1] == 3:
            pixels = pixels.transpose(2, 0, 1)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[0] != 3:
            is_what = (
                f"{pixels.dtype} of shape {pixels.shape}" if pixels.dtype != object else f"a {type(item).__name__}"
            )
            due = "give uint8, 3 x H x W or H x W x 3, with values 0 to 255, or a picture of Pillow"
            raise UserError(f"{what} is {is_what}: {due}; leave out a transform to floats")
    if size is None or pixels.shape[1:] == (size, size):
        return pixels
    picture = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    return Sight(fit=FIT).square(Frame(picture, picture.size), size).transpose(2, 0, 1)


class SequenceImages(Images):
    """Images that are read one by one, of a torch Dataset or a list; of an item that is a tuple, the first."""

    def __init__(
        self,
        items: Sized,
        labels: np.ndarray,
        classes: Sequence[str],
        tracks: np.ndarray | None = None,
        size: int | None = None,
    ):
        self.items, self.labels, self.classes, self.tracks = items, labels, tuple(classes), tracks
        self.size = None if size is None else checked_size(size)
        for name, given in (("label", labels if classes else None), ("track", tracks)):
            if given is not None and len(given) != len(items):
                n = f"{len(items)} images and {len(given)} {name}s"
                raise UserError(f"there are {n}: give one {name} for each image")

    def __len__(self) -> int:
        return len(self.items)

    def images(self, numbers: np.ndarray) -> np.ndarray:
        return stacked([self._pixels(number) for number in numbers.tolist()])

    def _pixels(self, number: int) -> np.ndarray:
        item = self.items[number]
        return pixels_of(item[0] if isinstance(item, tuple | list) else item, f"image {number}", self.size)


def stacked(images: list[np.ndarray]) -> np.ndarray:
    """n x 3 x H x W."""
    if not images:
        return np.empty(0, np.uint8)
    if len(shapes := sorted({image.shape[1:] for image in images})) > 1:
        sizes = ", ".join(f"{height} x {width}" for height, width in shapes[:3])
        raise UserError(f"the images have several sizes ({sizes}): give size=, to which they are scaled")
    return np.stack(images)
