"""The built-in default: textured objects that move through changing backgrounds and light, rendered on demand.

Colour, place, size, angle, background and light are independent of the class; shape and texture together define it, and
neither does alone.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from streamclr.base.errors import UserError
from streamclr.base.options import checked_seed, checked_size, checked_stc
from streamclr.streams.datasets.images import Images, Source

if TYPE_CHECKING:
    from torch import Tensor

# Class: shape, texture.
CLASSES = {
    "target": ("disc", "rings"),
    "beach ball": ("disc", "rays"),
    "ladybird": ("disc", "dots"),
    "tile": ("square", "checks"),
    "flag": ("square", "stripes"),
    "dice": ("square", "dots"),
    "pyramid": ("triangle", "stripes"),
    "sail": ("triangle", "rays"),
    "flower": ("petals", "rings"),
    "star": ("star", "checks"),
}
N_PARAMETERS = 48
MAX_LABELLED = 100_000  # images in train and in test
FIRST_TEST_TRACK = 2**62  # tracks of the test set have numbers that the stream never reaches


class Synthetic(Source):
    """An endless stream of tracks: `stc` consecutive frames of one object, then of an object of another class.

    Image p is the same whatever was read before it. The labelled images of stage two are single frames of tracks of the
    stream; those of the test set come from tracks that the stream never shows.

    train, test: numbers of labelled images. Fewer are the first of more.
    """

    classes = tuple(CLASSES)

    def __init__(
        self, path: str = "", size: int = 32, seed: int = 0, stc: int = 100, train: int = 5000, test: int = 2000
    ):
        if path:
            raise UserError(f"the source 'synthetic:' takes no path ({path!r}): give options, as in synthetic:?seed=1")
        self.size, self.seed, self.stc = checked_size(size), checked_seed(seed), checked_stc(stc)
        for name, n in (("train", train), ("test", test)):
            if not len(CLASSES) <= n <= MAX_LABELLED:
                raise UserError(f"{name} is {n}: use {len(CLASSES)} to {MAX_LABELLED:,} labelled images")
        self.train, self.test = SyntheticImages(self, train, split=0), SyntheticImages(self, test, split=1)

    def images(self, numbers: np.ndarray) -> np.ndarray:
        return self._frames(0, numbers // self.stc, numbers % self.stc)

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        return self._labels(0, numbers // self.stc)

    def tracks(self, numbers: np.ndarray) -> np.ndarray:
        return numbers // self.stc

    def _labels(self, split: int, tracks: np.ndarray) -> np.ndarray:
        """Every ten tracks show each class once, and no class follows itself."""
        n = len(CLASSES)
        labels = np.empty_like(tracks)
        for block in np.unique(tracks // n).tolist():
            order = self._order(split, block)
            if block and order[0] == self._order(split, block - 1)[-1]:
                order[[0, 1]] = order[[1, 0]]
            here = tracks // n == block
            labels[here] = order[tracks[here] % n]
        return labels

    def _order(self, split: int, block: int) -> np.ndarray:
        return np.random.default_rng([self.seed, split, 1, block]).permutation(len(CLASSES))

    def _frames(self, split: int, tracks: np.ndarray, frames: np.ndarray) -> np.ndarray:
        import torch  # only to draw: to read the other sources a device needs none

        unique, row = np.unique(tracks, return_inverse=True)
        drawn = [np.random.default_rng([self.seed, split, 0, t]).random(N_PARAMETERS) for t in unique.tolist()]
        parameters = torch.from_numpy(np.array(drawn, np.float32).reshape(-1, N_PARAMETERS))[row]
        noise = [
            np.random.default_rng([self.seed, split, 2, t, f]).standard_normal((3, self.size, self.size), np.float32)
            for t, f in zip(tracks.tolist(), frames.tolist(), strict=True)
        ]
        labels, frame = torch.from_numpy(self._labels(split, tracks)), torch.from_numpy(frames).float()
        images = render(labels, parameters, frame, self.size)
        images += 0.03 * torch.from_numpy(np.array(noise, np.float32).reshape(images.shape))
        return (images.clamp_(0, 1) * 255).round_().byte().numpy()


class SyntheticImages(Images):
    """One frame from each of `n` tracks."""

    def __init__(self, source: Synthetic, n: int, split: int):
        self._source, self._split, self.classes = source, split, source.classes
        self._tracks = np.arange(n)
        self.labels = source._labels(split, self._tracks)
        self.tracks = self._tracks + split * FIRST_TEST_TRACK

    def __len__(self) -> int:
        return len(self._tracks)

    def images(self, numbers: np.ndarray) -> np.ndarray:
        tracks = self._tracks[numbers]
        return self._source._frames(self._split, tracks, (tracks * 37) % self._source.stc)


def render(labels: "Tensor", parameters: "Tensor", frame: "Tensor", size: int) -> "Tensor":
    """n x 3 x size x size in about [0, 1]: each object over its background, lit."""
    import torch

    drawn = iter(parameters[:, :, None, None].unbind(1))  # each n x 1 x 1, uniform in [0, 1)

    def between(low: float, high: float) -> "Tensor":
        return low + (high - low) * next(drawn)

    def swing(low: float, high: float) -> "Tensor":
        """A value that moves slowly to and fro in [low, high] as the frames go by."""
        phase = between(0, 2 * math.pi) + between(0.02, 0.08) * t
        return (low + high) / 2 + (high - low) / 2 * phase.sin()

    def colour(low: float, high: float) -> "Tensor":  # n x 3 x 1 x 1: a grey with a tint
        grey = between(low, high)
        return torch.stack([grey + between(-0.08, 0.08) for _ in range(3)], 1)

    t = frame[:, None, None]
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")

    # Background: two colours mixed by drifting waves.
    waves = torch.zeros(len(labels), size, size)
    for _ in range(3):
        angle, frequency = between(0, 2 * math.pi), between(1, 7)
        waves += (frequency * (x * angle.cos() + y * angle.sin()) + swing(-4, 4)).sin()
    mix = (0.5 + waves / 6)[:, None]
    image = colour(0.3, 0.5) * mix + colour(0.5, 0.7) * (1 - mix)

    # Object coordinates: moved, turned, scaled.
    radius = between(0.6, 0.9) * swing(0.9, 1.1)
    dx, dy, turn = x - swing(-0.3, 0.3), y - swing(-0.3, 0.3), between(0, 2 * math.pi) + swing(-0.7, 0.7)
    u, v = (dx * turn.cos() + dy * turn.sin()) / radius, (dy * turn.cos() - dx * turn.sin()) / radius
    r, phi = (u**2 + v**2).sqrt(), torch.atan2(v, u)

    def polygon(sides: int) -> "Tensor":
        sector = 2 * math.pi / sides
        return math.cos(sector / 2) / ((phi % sector) - sector / 2).cos()

    borders = {
        "disc": torch.full_like(r, 0.9),
        "square": polygon(4) * 1.1,
        "triangle": polygon(3) * 1.3,
        "petals": 0.8 + 0.25 * (6 * phi).cos(),
        "star": 0.75 + 0.35 * (5 * phi).cos(),
    }
    scale = between(0.85, 1.2)
    patterns = {
        "rings": (12 * scale * r).sin(),
        "rays": (8 * phi).sin(),
        "dots": (8 * scale * u).cos() * (8 * scale * v).cos() * 2 - 0.6,
        "checks": (7 * scale * u).sin() * (7 * scale * v).sin() * 2,
        "stripes": (11 * scale * u).sin(),
    }
    shape_of = torch.tensor([list(borders).index(shape) for shape, _ in CLASSES.values()])[labels]
    texture_of = torch.tensor([list(patterns).index(texture) for _, texture in CLASSES.values()])[labels]
    every = torch.arange(len(labels))
    border = torch.stack(list(borders.values()))[shape_of, every]
    pattern = torch.stack(list(patterns.values()))[texture_of, every]

    edge = size / 2 * radius  # pixels per unit: edges are one or two pixels soft at any size
    mask = ((border - r) * edge + 0.5).clamp(0, 1)[:, None]
    paint = (pattern * size / 12 + 0.5).clamp(0, 1)[:, None]
    body, ink = colour(0.7, 1.0), colour(0.0, 0.3)
    image = image * (1 - mask) + (body * paint + ink * (1 - paint)) * mask

    # Light: a gain and a gradient across the picture, both drifting.
    direction = swing(0, 2 * math.pi)
    light = swing(0.6, 1.1) + 0.25 * (x * direction.cos() + y * direction.sin())
    return image * light[:, None]
