"""The contrast score (Sec. III-B)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.encoder import infer
from streamclr.views import flip


def contrast_score(model: nn.Module, images: Tensor) -> Tensor:
    """S(x) = 1 - z(x)·z(flip x) in [0, 2] for stored uint8 images (Eq. 2): high where the encoder has yet to learn.

    Deterministic: it depends on the image and the model alone.
    """

    def score(x: Tensor) -> Tensor:
        z0, z1 = F.normalize(model(torch.cat([x, flip(x)])), dim=1).chunk(2)
        return (z0 - z1).square().sum(1) / 2  # = 1 - z0·z1 for unit vectors, without its cancellation near 0

    return infer(model, images, score).clamp_(max=2)
