"""The encoder f with its projection head g (Sec. II-A)."""

from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.encoders.inference import PIXELS_AT_ONCE, infer


class ContrastiveModel(nn.Module):
    """Encoder and projection head: images in [0, 1] to unit vectors z = g(f(x)) / |g(f(x))|.

    encoder: any module that maps standardised images (n x 3 x H x W) to features (n x d).
    """

    mean: Tensor
    std: Tensor
    pixels_at_once = PIXELS_AT_ONCE

    def __init__(self, encoder: nn.Module, projection_size: int = 128):
        super().__init__()
        self.n_features = n = count_features(encoder)
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(n, n), nn.ReLU(), nn.Linear(n, projection_size))
        # ImageNet's, because public pre-trained weights expect them; no other stream's are known in advance.
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def standardise(self, images: Tensor) -> Tensor:
        return (images - self.mean).div_(self.std)

    def features(self, images: Tensor) -> Tensor:
        """h = f(x), n x d."""
        return self.encoder(self.standardise(images)).flatten(1)

    def project(self, features: Tensor) -> Tensor:
        """z = g(h) / |g(h)|, n x projection_size."""
        return F.normalize(self.head(features), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(self.features(images))


def count_features(encoder: nn.Module) -> int:
    """How many features an encoder gives: its `n_features`, or what comes out of a blank image."""
    if isinstance(n := getattr(encoder, "n_features", None), int):
        return n
    found = set()
    for size in (8, 16, 28, 32, 64, 96, 128, 224):
        with suppress(RuntimeError, ValueError, AssertionError, IndexError):  # not made for images of this size
            found.add(infer(encoder, torch.zeros(1, 3, size, size, dtype=torch.uint8)).flatten(1).shape[1])
    if len(found) != 1:
        why = "that depends on the size of the image" if found else "it takes no blank image"
        raise UserError(f"cannot tell how many features the encoder gives, {why}: set the attribute encoder.n_features")
    return found.pop()
