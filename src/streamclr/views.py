"""The strong random views that are trained on, and the weak ones that are scored, batched on tensors."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.base import plugins
from streamclr.base.errors import UserError
from streamclr.base.options import shown
from streamclr.encoders.inference import as_float, holds_generator

GREY = (0.299, 0.587, 0.114)  # ITU-R 601 luma
# The hue rotates in the plane of I and Q (YIQ), where a rotation is linear and keeps the luma.
RGB_TO_YIQ = (GREY, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


class Views(Protocol):
    """What makes the views that are trained on: any function of images and a generator.

    Views with `draw` and `apply`, as StrongViews has them, can be made in chunks; others are made all at once.
    """

    def __call__(self, images: Tensor, generator: torch.Generator, /) -> Tensor:
        """One view of each stored uint8 image: n x 3 x height x width in [0, 1]."""


# The weak view x+ of Sec. III-B, without randomness; of a frame that shows the same as the image.
WeakView = Callable[[Tensor], Tensor]


def flip(images: Tensor) -> Tensor:
    """The paper's: mirrored left to right."""
    return images.flip(-1)


def vertical_flip(images: Tensor) -> Tensor:
    """Upside down: for what has no up and down, as seen from above."""
    return images.flip(-2)


def shift(images: Tensor, share: float = 0.125) -> Tensor:
    """To the right by a share of the width; the left column fills the gap. For signs and text."""
    if not 0 < share < 1:
        raise UserError(f"share is {share}: use a share of the image's width, as 0.125")
    columns = torch.arange(images.shape[-1], device=images.device) - max(1, round(share * images.shape[-1]))
    return images[..., columns.clamp(min=0)]


def without_colour(images: Tensor) -> Tensor:
    """In grey: for signs and text, where colour is not what tells classes apart."""
    luma = torch.tensor(GREY, device=images.device).view(3, 1, 1)
    return (images * luma).sum(1, keepdim=True).to(images.dtype).expand_as(images)


WEAK_VIEWS: dict[str, Callable[..., Tensor]] = {
    "flip": flip,
    "vertical-flip": vertical_flip,
    "shift": shift,
    "grey": without_colour,
}


def build_weak_view(weak_view: str | WeakView) -> WeakView:
    """The weak view `name?option=value`, built in or of a researcher, or any function of images."""
    made = plugins.make("weak_view", weak_view, WEAK_VIEWS) if isinstance(weak_view, str) else weak_view
    if inspect.isclass(made) or not callable(made):
        raise UserError(f"weak_view is {made!r}: give {plugins.KINDS['weak_view'].is_a}")
    return made


class StrongViews:
    """SimCLR's random views: resized crop, flip, colour jitter, grey, and blur for images of 64 px and more.

    scale: smallest and largest share of the image in a crop.
    strength: scales the jitter of brightness, contrast, saturation (0.8 each) and hue (0.2); None is 0.5 below 64 px
        and 1 from there on, as SimCLR does for CIFAR-10 and ImageNet.
    jitter, grey: probabilities of the colour jitter and of grey.
    blur: probability of a Gaussian blur; None is 0 below 64 px and 0.5 from there on.
    flip: mirror half of the views; leave it out where a mirror image means something else, as with signs and text.
    side: of a view, as a share of the image's side. Smaller views take less time, and show things as large as they are
        in whole images, because a crop is enlarged.

    >>> import torch
    >>> from streamclr import StrongViews
    >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    >>> views = StrongViews(flip=False, side=0.75)(images, torch.Generator().manual_seed(0))
    >>> views.shape, 0 <= views.min() and views.max() <= 1
    (torch.Size([4, 3, 24, 24]), tensor(True))
    """

    def __init__(
        self,
        scale: tuple[float, float] = (0.2, 1.0),
        strength: float | None = None,
        jitter: float = 0.8,
        grey: float = 0.2,
        blur: float | None = None,
        flip: bool = True,
        side: float = 1.0,
    ):
        if not (isinstance(scale, tuple | list) and len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1):
            raise UserError(f"scale is {scale}: use the smallest and largest share of the image, as (0.2, 1.0)")
        if strength is not None and not 0 <= strength < math.inf:
            raise UserError(f"strength is {strength}: use 0 (no colour jitter) or more")
        if not 0 < side <= 1:
            raise UserError(f"side is {side}: use a share of the image's side, as 0.75")
        for name, probability in (("jitter", jitter), ("grey", grey), ("blur", blur)):
            if probability is not None and not 0 <= probability <= 1:
                raise UserError(f"{name} is {probability}: use a probability, 0 to 1")
        self.scale, self.strength, self.jitter, self.grey, self.blur = scale, strength, jitter, grey, blur
        self.flip, self.side = flip, side

    __repr__ = shown

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One view of each stored uint8 image: n x 3 x (side H) x (side W) in [0, 1], on the images' device."""
        return self.apply(images, self.draw(images.shape, generator))

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> "Draw":
        """The random numbers for views of images of this shape, so that the views can be made in chunks."""
        n, device = shape[0], generator.device
        large = min(shape[-2:]) >= 64
        blur = self.blur if self.blur is not None else 0.5 * large
        strength = self.strength if self.strength is not None else (1.0 if large else 0.5)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.empty(n, *shape, device=device).uniform_(low, high, generator=generator)

        # The first of ten tries that fits into the image, else the whole image, as torchvision does.
        area, ratio = uniform(*self.scale, 10), uniform(math.log(3 / 4), math.log(4 / 3), 10).exp()
        width, height = (area * ratio).sqrt(), (area / ratio).sqrt()  # as shares of the image
        fits = (width <= 1) & (height <= 1)
        first = fits.int().argmax(1, keepdim=True)
        width, height = (torch.where(fits, side, 1.0).gather(1, first)[:, 0] for side in (width, height))
        left, top = (1 - width) * uniform(-1, 1), (1 - height) * uniform(-1, 1)  # centre, in [-1, 1]
        mirror = (uniform(0, 1) < 0.5).float() * 2 - 1 if self.flip else 1.0
        crop = torch.zeros(n, 2, 3, device=device)
        crop[:, 0, 0], crop[:, 0, 2], crop[:, 1, 1], crop[:, 1, 2] = width * mirror, left, height, top
        s = min(1.0, 0.8 * strength)
        factors = uniform(1 - s, 1 + s, 3, 1, 1)
        hue = uniform(-1, 1) * 2 * math.pi * min(0.5, 0.2 * strength)
        order = uniform(0, 1, 4).argsort(1)
        jittered, grey = (uniform(0, 1, 1, 1) < p for p in (self.jitter, self.grey))
        blurred = uniform(0, 1) < blur if blur else torch.zeros(n, dtype=torch.bool, device=device)
        sigma = uniform(0.1, 2.0) if blur else torch.zeros(n, device=device)
        return Draw(crop, factors, hue, order, jittered, grey, torch.where(blurred, sigma, 0.0))

    def apply(self, images: Tensor, draw: "Draw") -> Tensor:
        n, channels, *sides = images.shape
        sides = [max(1, round(self.side * length)) for length in sides]
        grid = F.affine_grid(draw.crop, [n, channels, *sides], align_corners=False)
        views = F.grid_sample(as_float(images), grid, padding_mode="border", align_corners=False)
        del grid
        return _blur(_recolour(views, draw), draw.sigma)


VIEWS: dict[str, Callable[..., Any]] = {"strong": StrongViews}


def build_views(views: str | Views, crop: float, flip: str, side: float) -> Views:
    """The views `name?option=value`, built in or of a researcher, or any function of images and a generator.

    crop, flip, side: options of a run, for views by name that take them as StrongViews does.
    """
    usual = {"scale": (crop, 1.0), "flip": flip == "on", "side": side}
    made = plugins.make("views", views, VIEWS, **usual) if isinstance(views, str) else views
    if inspect.isclass(made) or not callable(made):
        raise UserError(f"views is {made!r}: give {plugins.KINDS['views'].is_a}, as StrongViews()")
    if holds_generator(made):
        how = "draw from the one that they are called with, so that a run can resume"
        raise UserError(f"the views {type(made).__name__} hold a random generator of their own: {how}")
    return made


class ViewPairs:
    """Two random views of each of n images, the same at every call: rows i and n + i are views of image i.

    neighbours: images of which the second views are, one for each; default: the images themselves.
    """

    def __init__(self, views: Views, images: Tensor, generator: torch.Generator, neighbours: Tensor | None = None):
        self.views, self.images, self.neighbours = views, images, images if neighbours is None else neighbours
        self.draw = self.made = None
        if can_chunk(views):  # made when they are asked for
            self.draw = views.draw((2 * len(images), *images.shape[1:]), generator)  # type: ignore[attr-defined]
        else:
            self.made = _checked_views(views(torch.cat([images, self.neighbours]), generator), 2 * len(images))

    def __len__(self) -> int:
        return 2 * len(self.images)

    def __call__(self, rows: slice) -> Tensor:
        if self.made is not None:
            return self.made[rows]
        start, stop, _ = rows.indices(len(self))
        n = len(self.images)
        first, second = self.images[start:stop], self.neighbours[max(0, start - n) : max(0, stop - n)]
        return self.views.apply(torch.cat([first, second]), self.draw.rows(rows))  # type: ignore[attr-defined, union-attr]


def can_chunk(views: Views) -> bool:
    return hasattr(views, "draw") and hasattr(views, "apply")


def _checked_views(views: Any, n: int) -> Tensor:
    due = f"return float images in [0, 1], {n} x 3 x height x width, one for each image"
    if not isinstance(views, Tensor):
        raise UserError(f"the views are a {type(views).__name__}: {due}")
    if not views.is_floating_point() or views.ndim != 4 or views.shape[:2] != (n, 3):
        raise UserError(f"the views are {views.dtype} of shape {tuple(views.shape)}: {due}")
    if (most := float(views.max())) > 2:  # not images of 0 to 255; a little above 1 may be meant
        raise UserError(f"the views have values up to {most:.0f}: {due}")
    return views


class Draw(NamedTuple):
    """The random numbers behind n views; a slice of them makes a slice of the views."""

    crop: Tensor  # n x 2 x 3, where to sample
    factors: Tensor  # n x 3 x 1 x 1: brightness, contrast, saturation
    hue: Tensor  # angle
    order: Tensor  # n x 4, of brightness, contrast, saturation, hue
    jittered: Tensor  # n x 1 x 1: whether those four are done
    grey: Tensor  # n x 1 x 1
    sigma: Tensor  # of the blur; 0 is none

    def rows(self, rows: slice) -> "Draw":
        return Draw(*(column[rows] for column in self))


def _recolour(images: Tensor, draw: Draw) -> Tensor:
    """Brightness, contrast, saturation and hue in random order, then grey, as one affine map of RGB per image.

    Each of the five is affine in RGB (contrast needs the image's mean, which follows the map too), so they are
    multiplied as 4 x 4 matrices and the pixels are touched once, clamped once at the end.
    """
    n, device = len(images), images.device

    def affine(linear: Tensor) -> Tensor:  # n x 3 x 3 -> n x 4 x 4
        map_ = torch.eye(4, device=device).repeat(n, 1, 1)
        map_[:, :3, :3] = linear
        return map_

    eye, luma = torch.eye(3, device=device), torch.tensor(GREY, device=device).expand(3, 3)
    brightness, contrast, saturation = draw.factors.unbind(1)
    ops = torch.stack(
        [
            affine(brightness * eye),
            affine(contrast * eye),  # its offset follows below
            affine(saturation * eye + (1 - saturation) * luma),
            affine(_hue_rotation(draw.hue)),
        ],
        dim=1,
    )  # n x 4 x 4 x 4
    colour = affine(eye)
    mean = F.pad(images.mean((2, 3)), (0, 1), value=1.0)[:, :, None]  # n x 4 x 1
    for i in range(4):
        grey_mean = luma[:1] @ (colour @ mean)[:, :3]  # n x 1 x 1
        ops[:, 1, :3, 3:] = (1 - contrast) * grey_mean
        colour = ops[torch.arange(n, device=device), draw.order[:, i]] @ colour
    colour = torch.where(draw.jittered, colour, affine(eye))
    colour = torch.where(draw.grey, affine(luma) @ colour, colour)
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


def _blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur, in place, of the images whose sigma (in pixels) is not 0; the kernel is a tenth of the side."""
    chosen = sigma > 0
    if not len(sigma := sigma[chosen, None]):
        return images
    radius = max(1, min(images.shape[-2:]) // 20)
    x = torch.arange(-radius, radius + 1, device=images.device)
    kernel = F.softmax(-(x**2) / (2 * sigma**2), dim=1).repeat_interleave(3, 0)  # 3m x k: one kernel per channel
    planes = F.pad(images[chosen].flatten(0, 1)[None], (radius,) * 4, mode="reflect")  # 1 x 3m x H x W
    planes = F.conv2d(planes, kernel[:, None, None, :], groups=len(kernel))
    planes = F.conv2d(planes, kernel[:, None, :, None], groups=len(kernel))
    images[chosen] = planes[0].unflatten(0, (-1, 3))
    return images
