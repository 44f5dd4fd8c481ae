"""The German Traffic Sign Recognition Benchmark (Stallkamp et al. 2012) from its official archives or their folder.

Each training image is a frame of a track: about 30 frames of one sign as the car comes nearer. Its file is named
TTTTT_FFFFF.ppm after track and frame; tracks are counted anew in each class.
"""

import csv
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamclr.base.errors import UserError
from streamclr.base.progress import Progress
from streamclr.streams.datasets.archive import unpacked
from streamclr.streams.datasets.folder import FileImages
from streamclr.streams.datasets.images import Splits, every_fifth_track
from streamclr.streams.frame import dimensions

GTSRB_CLASSES = tuple(  # in the order of their folders, 00000 to 00042
    """speed limit 20, speed limit 30, speed limit 50, speed limit 60, speed limit 70, speed limit 80,
    end of speed limit 80, speed limit 100, speed limit 120, no passing, no passing for trucks,
    right of way at next crossing, priority road, yield, stop, no vehicles, no trucks, no entry, general danger,
    curve left, curve right, double curve, bumpy road, slippery road, road narrows on the right, road work,
    traffic lights, pedestrians, children, bicycles, ice or snow, wild animals, end of all limits, turn right ahead,
    turn left ahead, ahead only, ahead or right, ahead or left, keep right, keep left, roundabout, end of no passing,
    end of no passing for trucks""".replace("\n    ", " ").split(", ")
)
TRAINING_ZIP = "GTSRB_Final_Training_Images.zip"
TEST_ZIPS = ("GTSRB_Final_Test_Images.zip", "GTSRB_Final_Test_GT.zip")
TRACKS_PER_CLASS = 100_000  # the most that five digits can count


class Frames(NamedTuple):
    """Files with their classes and tracks."""

    paths: list[Path]
    labels: np.ndarray
    tracks: np.ndarray


def read_gtsrb(place: Path) -> Splits | None:
    """The dataset from a folder or an archive, tar or zip; None if the training images are not in it.

    An archive may have the official zips of the test part beside it. Without the test images or their labels every
    fifth track of each class is the test set. The images are 32 px if all files are that small, else 64 px.
    """
    if place.is_file():
        beside = [place.with_name(name) for name in TEST_ZIPS]
        with unpacked(place, *(file for file in beside if file.is_file() and file != place)) as directory:
            return read_gtsrb(directory)
    root = next((root for root in (place, place / "GTSRB") if (root / "Final_Training").is_dir()), None)
    if root is None:
        return None
    train, test = _training_frames(root / "Final_Training" / "Images"), _test_frames(root)
    if test is None:
        held_back = every_fifth_track(train.labels, train.tracks)
        train, test = _some(train, ~held_back), _some(train, held_back)
    with Progress("reading GTSRB", None):
        size = 64 if any(max(dimensions(path)) > 32 for path in train.paths + test.paths) else 32
        images = [
            FileImages(part.paths, part.labels.tolist(), GTSRB_CLASSES, size).images(np.arange(len(part.paths)))
            for part in (train, test)
        ]
    return Splits(images[0], train.labels, images[1], test.labels, train.tracks, test.tracks)


def _training_frames(directory: Path) -> Frames:
    paths, labels, tracks = [], [], []
    for label in range(len(GTSRB_CLASSES)):
        folder = directory / f"{label:05}"
        for name, class_ in _listed(folder, folder / f"GT-{label:05}.csv").items():
            if not (numbers := re.fullmatch(r"([0-9]{5})_[0-9]{5}\.ppm", name)):
                raise UserError(f"{folder / name} is not named TTTTT_FFFFF.ppm after track and frame: get it again")
            if class_ != label:
                raise UserError(f"{folder / name} is listed as of class {class_}, not {label}: get it again")
            paths.append(folder / name)
            labels.append(label)
            tracks.append(TRACKS_PER_CLASS * label + int(numbers[1]))
    return Frames(paths, np.array(labels, np.int64), np.array(tracks, np.int64))


def _test_frames(root: Path) -> Frames | None:
    """The official test images, single frames of which each counts as a track; None without them or their labels."""
    folder = root / "Final_Test" / "Images"
    places = [place / "GT-final_test.csv" for place in (folder, folder.parent, root, root.parent)]
    listing = next((file for file in places if file.is_file()), None)
    if listing is None or not folder.is_dir():
        return None
    listed = _listed(folder, listing)
    tracks = TRACKS_PER_CLASS * len(GTSRB_CLASSES) + np.arange(len(listed))
    return Frames([folder / name for name in listed], np.array(list(listed.values()), np.int64), tracks)


def _listed(folder: Path, listing: Path) -> dict[str, int]:
    """Each image of a folder, in the order of their names, with its class by the csv file."""
    if not listing.is_file():
        raise UserError(f"no file {listing}: it lists the images of its folder, get it again")
    try:
        with listing.open(encoding="utf-8-sig", newline="") as rows:
            listed = {row["Filename"]: int(row["ClassId"]) for row in csv.DictReader(rows, delimiter=";")}
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        raise UserError(f"{listing} is not a list with Filename and ClassId ({error}): get it again") from None
    if not_both := listed.keys() ^ {path.name for path in folder.glob("*.ppm")}:
        where = "is missing" if (name := min(not_both)) in listed else f"is not in {listing.name}"
        raise UserError(f"{folder / name} {where}: get it again")
    if wrong := [name for name, class_ in listed.items() if not 0 <= class_ < len(GTSRB_CLASSES)]:
        raise UserError(f"{listing} has a class outside 0 to {len(GTSRB_CLASSES) - 1} for {wrong[0]}: get it again")
    if not listed:
        raise UserError(f"{listing} lists no image: get it again")
    return dict(sorted(listed.items()))


def _some(frames: Frames, chosen: np.ndarray) -> Frames:
    paths = [frames.paths[i] for i in np.flatnonzero(chosen).tolist()]
    return Frames(paths, frames.labels[chosen], frames.tracks[chosen])
