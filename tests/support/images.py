"""Images and folders of images."""

import numpy as np
import torch
from PIL import Image

from streamclr.streams.frame import Frame
from streamclr.streams.sight import MIDDLE


def random_images(n, size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=generator)


def middle_square(pixels, size):
    """As the streams make it of a decoded picture, H x W x 3."""
    return MIDDLE.square(Frame(Image.fromarray(pixels), pixels.shape[1::-1]), size)


def make_folder(root, n=20, size=16, classes=("ant", "bee")):
    """Two classes of noise around two colours."""
    rng = np.random.default_rng(0)
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(n):
            image = rng.integers(0, 100, (size, size, 3), np.uint8)
            image[..., c] += 120
            Image.fromarray(image).save(root / name / f"{i}.png")
    return root
