"""The strong random views that are trained on, and the deterministic flip that is scored, batched on tensors."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

GREY = (0.299, 0.587, 0.114)  # ITU-R 601 luma
# The hue rotates in the plane of I and Q (YIQ), where a rotation is linear and keeps the luma.
RGB_TO_YIQ = (GREY, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def as_float(images: Tensor) -> Tensor:
    """Stored uint8 images as float in [0, 1]; views are that already."""
    return images / 255 if images.dtype == torch.uint8 else images


def flip(images: Tensor) -> Tensor:
    """The weak view x+ of Sec. III-B: mirrored left to right, no randomness."""
    return images.flip(-1)


class StrongViews:
    """SimCLR's random views: resized crop, flip, colour jitter, grey, and blur for images of 64 px and more.

    strength: scales the jitter of brightness, contrast, saturation (0.8 each) and hue (0.2); None is 0.5 below 64 px
        and 1 from there on, as SimCLR does for CIFAR-10 and ImageNet.
    blur: probability of a Gaussian blur; None is 0 below 64 px and 0.5 from there on.
    """

    def __init__(
        self,
        scale: tuple[float, float] = (0.2, 1.0),
        strength: float | None = None,
        jitter: float = 0.8,
        grey: float = 0.2,
        blur: float | None = None,
    ):
        self.scale, self.strength, self.jitter, self.grey, self.blur = scale, strength, jitter, grey, blur

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One view of each stored uint8 image: n x 3 x H x W in [0, 1], on the images' device."""
        large = min(images.shape[-2:]) >= 64
        blur = self.blur if self.blur is not None else 0.5 * large
        strength = self.strength if self.strength is not None else (1.0 if large else 0.5)
        views = self._crop_and_flip(as_float(images), generator)
        views = self._recolour(views, strength, generator)
        return _blur(views, blur, generator) if blur else views

    def _crop_and_flip(self, images: Tensor, generator: torch.Generator) -> Tensor:
        n = len(images)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.empty(n, *shape, device=images.device).uniform_(low, high, generator=generator)

        # The first of ten tries that fits into the image, else the whole image, as torchvision does.
        area, ratio = uniform(*self.scale, 10), uniform(math.log(3 / 4), math.log(4 / 3), 10).exp()
        width, height = (area * ratio).sqrt(), (area / ratio).sqrt()  # as shares of the image
        fits = (width <= 1) & (height <= 1)
        first = fits.int().argmax(1, keepdim=True)
        width, height = (torch.where(fits, side, 1.0).gather(1, first)[:, 0] for side in (width, height))
        left, top = (1 - width) * uniform(-1, 1), (1 - height) * uniform(-1, 1)  # centre, in [-1, 1]
        mirror = (uniform(0, 1) < 0.5).float() * 2 - 1
        theta = torch.zeros(n, 2, 3, device=images.device)
        theta[:, 0, 0], theta[:, 0, 2], theta[:, 1, 1], theta[:, 1, 2] = width * mirror, left, height, top
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)

    def _recolour(self, images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
        """Brightness, contrast, saturation and hue in random order, then grey, as one affine map of RGB per image.

        Each of the five is affine in RGB (contrast needs the image's mean, which follows the map too), so they are
        multiplied as 4 x 4 matrices and the pixels are touched once, clamped once at the end.
        """
        n, device = len(images), images.device

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.empty(n, *shape, device=device).uniform_(low, high, generator=generator)

        def affine(linear: Tensor) -> Tensor:  # n x 3 x 3 -> n x 4 x 4
            map_ = torch.eye(4, device=device).repeat(n, 1, 1)
            map_[:, :3, :3] = linear
            return map_

        eye, luma = torch.eye(3, device=device), torch.tensor(GREY, device=device).expand(3, 3)
        s = min(1.0, 0.8 * strength)
        brightness, contrast, saturation = uniform(1 - s, 1 + s, 3, 1, 1).unbind(1)
        ops = torch.stack(
            [
                affine(brightness * eye),
                affine(contrast * eye),  # its offset follows below
                affine(saturation * eye + (1 - saturation) * luma),
                affine(_hue_rotation(uniform(-1, 1) * 2 * math.pi * min(0.5, 0.2 * strength))),
            ],
            dim=1,
        )  # n x 4 x 4 x 4
        colour = affine(eye)
        mean = F.pad(images.mean((2, 3)), (0, 1), value=1.0)[:, :, None]  # n x 4 x 1
        order = uniform(0, 1, 4).argsort(1)
        for i in range(4):
            grey_mean = luma[:1] @ (colour @ mean)[:, :3]  # n x 1 x 1
            ops[:, 1, :3, 3:] = (1 - contrast) * grey_mean
            colour = ops[torch.arange(n, device=device), order[:, i]] @ colour
        jittered = uniform(0, 1, 1, 1) < self.jitter
        colour = torch.where(jittered, colour, affine(eye))
        colour = torch.where(uniform(0, 1, 1, 1) < self.grey, affine(luma) @ colour, colour)
        pixels = torch.baddbmm(colour[:, :3, 3:], colour[:, :3, :3], images.flatten(2))
        return pixels.clamp_(0, 1).view_as(images)


def _hue_rotation(angle: Tensor) -> Tensor:
    """n x 3 x 3: RGB to YIQ, I and Q turned by the angle, and back."""
    yiq = torch.tensor(RGB_TO_YIQ, device=angle.device)
    turn = torch.eye(3, device=angle.device).repeat(len(angle), 1, 1)
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 2, 1] = angle.sin()
    turn[:, 1, 2] = -angle.sin()
    return torch.linalg.inv(yiq) @ turn @ yiq


def _blur(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Gaussian blur, in place, of a random share of the images: sigma 0.1 to 2 px, the kernel a tenth of the side."""
    device = images.device
    chosen = torch.rand(len(images), generator=generator, device=device) < probability
    sigma = torch.empty(len(images), 1, device=device).uniform_(0.1, 2.0, generator=generator)[chosen]
    if not len(sigma):
        return images
    radius = max(1, min(images.shape[-2:]) // 20)
    x = torch.arange(-radius, radius + 1, device=device)
    kernel = F.softmax(-(x**2) / (2 * sigma**2), dim=1).repeat_interleave(3, 0)  # 3m x k: one kernel per channel
    planes = F.pad(images[chosen].flatten(0, 1)[None], (radius,) * 4, mode="reflect")  # 1 x 3m x H x W
    planes = F.conv2d(planes, kernel[:, None, None, :], groups=len(kernel))
    planes = F.conv2d(planes, kernel[:, None, :, None], groups=len(kernel))
    images[chosen] = planes[0].unflatten(0, (-1, 3))
    return images
