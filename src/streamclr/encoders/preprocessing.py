"""Images of any size as the encoder takes them: the middle square, scaled, in a form that every export can express."""

import torch
from torch import Tensor


def scaled(images: Tensor, size: int) -> Tensor:
    """What `streams.sight.MIDDLE` sees, as two matrix products: the middle square, scaled, in whole numbers to 255.

    Every runtime gives the same pixels: all sums are whole numbers below 2**24, which float32 holds exactly (up to 64
    pixels of a row per output pixel). They equal Pillow's, except that Pillow scales portraits vertically first and
    rounds in between: up to a quarter of their pixels may differ by 1.
    """
    height, width = images.shape[-2:]
    side = torch.sym_min(height, width)
    coarse, fine = resampling(width, side, size)
    pixels = images.float()
    wide = _whole(pixels @ coarse.T, pixels @ fine.T)  # n x 3 x H x size; Pillow rounds here, too
    coarse, fine = resampling(height, side, size)
    return _whole(coarse @ wide, fine @ wide)


def resampling(length: int, side: int, size: int) -> tuple[Tensor, Tensor]:
    """Pillow's antialiased bilinear filter (Resample.c) for the middle `side` of `length` pixels, size x length.

    Its weights are multiples of 2**-22. They are returned in two parts, multiples of 2**-11 and of 2**-22. The distance
    of pixel x from the centre of output i is (size (2x + 1 - length + side) - (2i + 1) side) / (2 size).
    """
    x, i = torch.arange(length), torch.arange(size)
    distance = (2 * x + 1 - length + side) * size - ((2 * i + 1) * side).unsqueeze(1)
    triangle = (2 * torch.sym_max(side, size) - distance.abs()).clamp(min=0)
    weights = (2**22 * (triangle.double() / triangle.sum(1, keepdim=True)) + 0.5).floor()
    coarse = ((weights + 2**10) / 2**11).floor()
    return coarse.float(), (weights - 2**11 * coarse).float()


def _whole(coarse: Tensor, fine: Tensor) -> Tensor:
    """(2**11 coarse + fine) / 2**22, rounded; at most 255, because the weights of an output add up to 2**22."""
    return ((coarse + 2**10 + (fine / 2**11).floor()) / 2**11).floor()
