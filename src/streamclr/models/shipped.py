"""The classifier as it is shipped: pictures of any size in, probabilities and features out."""

import copy

import torch
from torch import Tensor, nn

from streamclr.classifier import Head
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import PointwiseConv


class Shipped(nn.Module):
    """Encoder and classifier with the pre-processing of frame.py in the graph.

    size: side of the images that the encoder learned from.
    """

    def __init__(self, model: ContrastiveModel, head: Head, size: int):
        super().__init__()
        self.model, self.head, self.size = model, head, size
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """uint8, n x 3 x H x W, of any height and width. Returns probabilities, n x classes, and features, n x d."""
        features = self.model.features(scaled(images, self.size) / 255)
        return self.head(features).softmax(1), features

    def plain(self) -> "Shipped":
        """A copy with strided convolutions where the encoder leaves pixels out first, and no projection head: both are
        for training."""
        plain = copy.deepcopy(self)
        plain.model.head = nn.Sequential()
        for module in list(plain.modules()):
            for name, conv in module.named_children():
                if isinstance(conv, PointwiseConv):
                    strided = nn.Conv2d(conv.in_channels, conv.out_channels, 1, conv.stride, bias=False)  # type: ignore[arg-type]
                    strided.weight = conv.weight
                    setattr(module, name, strided)
        return plain.eval().requires_grad_(False)


def scaled(images: Tensor, size: int) -> Tensor:
    """`frame.square` as two matrix products, which every format can express: the middle, scaled, in whole 0 to 255.

    The same pixels in every runtime: sums of whole numbers below 2**24, which float32 holds (for certain where up to 64
    pixels a row go into one). They are Pillow's, but for portraits that it scales downwards first: because it rounds in
    between, up to a quarter of their pixels may differ by 1.
    """
    height, width = images.shape[-2:]
    side = torch.sym_min(height, width)
    coarse, fine = resampling(width, side, size)
    pixels = images.float()
    wide = _whole(pixels @ coarse.T, pixels @ fine.T)  # n x 3 x H x size; Pillow rounds in between, too
    coarse, fine = resampling(height, side, size)
    return _whole(coarse @ wide, fine @ wide)


def resampling(length: int, side: int, size: int) -> tuple[Tensor, Tensor]:
    """Pillow's antialiased bilinear filter (Resample.c) for the middle `side` of `length` pixels, size x length.

    Its weights are multiples of 2**-22: here, of 2**-11 and of 2**-22. The distance of pixel x from the centre of
    output i is (size (2x + 1 - length + side) - (2i + 1) side) / (2 size).
    """
    x, i = torch.arange(length), torch.arange(size)
    distance = (2 * x + 1 - length + side) * size - ((2 * i + 1) * side).unsqueeze(1)
    triangle = (2 * torch.sym_max(side, size) - distance.abs()).clamp(min=0)
    weights = (2**22 * (triangle.double() / triangle.sum(1, keepdim=True)) + 0.5).floor()
    coarse = ((weights + 2**10) / 2**11).floor()
    return coarse.float(), (weights - 2**11 * coarse).float()


def _whole(coarse: Tensor, fine: Tensor) -> Tensor:
    """(2**11 coarse + fine) / 2**22, rounded; never above 255, since the weights of an output add up to 2**22."""
    return ((coarse + 2**10 + (fine / 2**11).floor()) / 2**11).floor()
