"""What is seen of a frame: a part of it, without what a mask hides, and as a square of pixels.

Needs no torch, so that a small capture process can use it.
"""

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from streamclr.base.errors import UserError
from streamclr.base.options import one_of
from streamclr.streams.frame import MAX_PIXELS, BadFrame, Frame, on_white, open_frame

FITS = ("crop", "letterbox", "stretch")
# Of objects anywhere in frames of 16:9, a linear classifier on the public encoder is right, at 96 px: 40 % stretch,
# 39 % crop, 36 % letterbox; at 64 px 31, 35 and 26 % (docs/log.md). But crop never sees what is at the sides.
FIT = "stretch"
THUMBNAIL_SIDE = 256  # pixels of the longer side
BILINEAR = Image.Resampling.BILINEAR


class Box(NamedTuple):
    """A rectangle in a frame; each of the four numbers is in per cent, or in pixels."""

    numbers: tuple[float, float, float, float]  # x and y of the upper left corner, width, height
    are_percent: tuple[bool, bool, bool, bool]

    @classmethod
    def parse(cls, text: str) -> "Box":
        parts = [re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", part.strip()) for part in text.split(",")]
        found = [(float(part[1]), bool(part[2])) for part in parts if part]
        if len(parts) != 4 or len(found) != 4:
            raise UserError(f"crop is {text!r}: write x,y,w,h in pixels or per cent, as 320,0,640,720 or 25%,0,50%,90%")
        (x, y, w, h), percent = zip(*found, strict=True)
        if not w or not h:
            raise UserError(f"crop is {text!r}, which is empty: width and height must be above 0")
        for start, length, along in ((x, w, percent[0::2]), (y, h, percent[1::2])):
            if (all(along) and start + length > 100) or any(
                n > 100 for n, is_percent in zip((start, length), along, strict=True) if is_percent
            ):
                raise UserError(f"crop is {text!r}, which is more than 100 % of the frame: use a part of it")
        return cls((x, y, w, h), percent)

    def of(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom in a frame of this size."""
        sides = (width, height, width, height)
        x, y, w, h = (
            n * side / 100 if is_percent else n
            for n, is_percent, side in zip(self.numbers, self.are_percent, sides, strict=True)
        )
        left = min(round(x), width - 1) if self.are_percent[0] else round(x)
        top = min(round(y), height - 1) if self.are_percent[1] else round(y)
        return left, top, max(round(x + w), left + 1), max(round(y + h), top + 1)


@dataclass(frozen=True)
class Sight:
    """What is seen of each frame, and how it becomes a square.

    name: of a region of a camera; empty for all that the camera sees.
    crop: `x,y,w,h` in pixels or per cent of the frame; empty: all of it.
    fit: `crop` takes the middle square, `letterbox` all of it between black bars, `stretch` all of it, distorted.
    mask: the file of a black-and-white picture, which is laid over the whole frame: black is not seen.
    """

    name: str = ""
    crop: str = ""
    fit: str = FIT
    mask: str = ""

    def square(self, frame: Frame, size: int) -> np.ndarray:
        """size x size x 3, uint8."""
        part = self._part(frame)
        if self.fit == "crop":
            return np.array(on_white(ImageOps.fit(part, (size, size), BILINEAR)))
        if self.fit == "stretch":
            return np.array(on_white(part.resize((size, size), BILINEAR, reducing_gap=3.0)))
        left, top, right, bottom = inside_bars(*part.size, size)
        scaled = on_white(part.resize((right - left, bottom - top), BILINEAR, reducing_gap=3.0))
        whole = np.zeros((size, size, 3), np.uint8)
        whole[top:bottom, left:right] = np.asarray(scaled)
        return whole

    def thumbnail(self, frame: Frame) -> bytes:
        """A JPEG of what is seen for a person: in its own proportions, of THUMBNAIL_SIDE at most."""
        image = self._part(frame)
        if self.fit == "crop":
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side))
        image = on_white(image.reduce(max(1, max(image.size) // THUMBNAIL_SIDE)))
        if (longer := max(image.size)) > THUMBNAIL_SIDE:
            sides = [max(1, round(n * THUMBNAIL_SIDE / longer)) for n in image.size]
            image = image.resize((sides[0], sides[1]), BILINEAR)
        content = io.BytesIO()
        image.save(content, "JPEG", quality=80)
        return content.getvalue()

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the part in a frame of this size, whose edges it may overstep."""
        return _box(self.crop).of(width, height) if self.crop else (0, 0, width, height)

    def check(self, width: int, height: int) -> None:
        """An error if the part is not within frames of this size."""
        _, _, right, bottom = self.box(width, height)
        if right > width or bottom > height:
            reaches = f"crop is {self.crop!r}, which reaches to {right},{bottom}"
            raise UserError(f"{reaches}, and the frames are {width}x{height}: use a part of them")

    def told(self, width: int, height: int) -> str:
        """What is seen of frames of this size, for a person; nothing if it is all of a square."""
        left, top, right, bottom = self.box(width, height)
        seen, how, advice = (right - left) * (bottom - top), [], ""
        if self.crop:
            how.append(f"{right - left}x{bottom - top} at {left},{top}")
        if right - left != bottom - top and self.fit == "crop":
            seen = min(right - left, bottom - top) ** 2
            how.append("the middle square")
            advice = ": fit=stretch or fit=letterbox sees the sides too"
        elif right - left != bottom - top:
            how.append("stretched to a square" if self.fit == "stretch" else "with black bars")
        share = seen / (width * height)
        if self.mask:
            open_share = np.asarray(_mask(self.mask, (width, height)).crop((left, top, right, bottom))).mean() / 255
            share *= open_share
            how.append(f"{100 * (1 - open_share):.0f} % hidden by the mask")
        if not how:
            return ""
        amount = "all" if share == 1 else f"{100 * share:.0f} %"
        return f"sees {amount} of each {width}x{height} frame, {', '.join(how)}{advice}"

    def _part(self, frame: Frame) -> Image.Image:
        """The part in the frame's own pixels, with what the mask hides in black."""
        width, height = frame.size
        left, top, right, bottom = self.box(width, height)
        if right > width or bottom > height:
            told = f"crop={self.crop} reaches to {right},{bottom}, and it is {width}x{height}"
            raise BadFrame("a frame", "smaller than crop", told)
        image = frame.image
        if self.mask:
            image = on_white(image).copy()
            image.paste("black", (0, 0, *image.size), ImageOps.invert(_mask(self.mask, image.size)))
        if not self.crop:
            return image
        x, y = image.width / width, image.height / height  # below 1 if it was decoded at a fraction
        left, top = round(left * x), round(top * y)
        return image.crop((left, top, max(left + 1, round(right * x)), max(top + 1, round(bottom * y))))


MIDDLE = Sight(fit="crop")  # of a model, or a run, that does not say what it sees: of an earlier version


def inside_bars(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of what lies between the bars of a letterbox of `size` pixels."""
    longer = max(width, height)
    w, h = max(1, round(size * width / longer)), max(1, round(size * height / longer))
    left, top = (size - w) // 2, (size - h) // 2
    return left, top, left + w, top + h


def spare(sights: Iterable[Sight], size: int, width: int, height: int) -> float:
    """How many times smaller a frame may be decoded, so that what is seen is twice as large as its square of `size`."""
    boxes = [sight.box(width, height) for sight in sights]
    return min(min(right - left, bottom - top) for left, top, right, bottom in boxes) / (2 * size)


def spare_of_thumbnails(sights: Iterable[Sight], width: int, height: int) -> float:
    """How many times smaller a frame may be decoded, so that it is large enough for its thumbnails."""
    boxes = [sight.box(width, height) for sight in sights]
    return min(min(right - left, bottom - top) for left, top, right, bottom in boxes) / THUMBNAIL_SIDE


def decode(
    file: Path | bytes, size: int | None = None, sight: Sight = MIDDLE, max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """H x W x 3, uint8: the picture, on white where it is transparent; with a size what is seen, size x size x 3."""
    if size is None:
        return np.array(on_white(open_frame(file, max_pixels=max_pixels).image))
    try:
        return sight.square(open_frame(file, partial(spare, [sight], size), max_pixels), size)
    except BadFrame as error:
        raise BadFrame(f"the image {file}" if isinstance(file, Path) else error.args[0], *error.args[1:]) from None


def make_sights(crop: str | None, fit: str, mask: str | None, regions: str | None) -> tuple[Sight, ...]:
    """What a source with these options sees, with every value checked: one sight, or one for each region.

    regions: `NAME:x,y,w,h;NAME:x,y,w,h`.
    """
    if fit not in FITS:
        raise UserError(f"fit is {fit!r}: {one_of(fit, FITS)}")
    mask = str(Path(mask).expanduser()) if mask else ""
    if mask:
        _checked_mask(mask)
    if regions is None:
        if crop is not None:
            Box.parse(crop)
        return (Sight("", crop or "", fit, mask),)
    if crop is not None:
        raise UserError("both crop and regions are given: regions are parts of the whole frame, use one of them")
    sights: list[Sight] = []
    for part in regions.split(";"):
        name, colon, box = (text.strip() for text in part.partition(":"))
        if not colon or not re.fullmatch(r"[\w.-]+", name):
            how = "write NAME:x,y,w,h with ; between two, as door:0,0,50%,100%;table:50%,0,50%,100%"
            raise UserError(f"regions has {part.strip()!r}: {how}")
        if name in [sight.name for sight in sights]:
            raise UserError(f"regions has {name!r} twice: give each region a name of its own")
        Box.parse(box)
        sights.append(Sight(name, box, fit, mask))
    return tuple(sights)


_box = lru_cache(maxsize=64)(Box.parse)


@lru_cache(maxsize=8)
def _mask(path: str, size: tuple[int, int]) -> Image.Image:
    """Of a frame's size: 255 is seen, 0 is not."""
    return _checked_mask(path).resize(size, Image.Resampling.NEAREST)


@lru_cache(maxsize=8)
def _checked_mask(path: str) -> Image.Image:
    draw = "paint what must not be seen black on white"
    try:
        pixels = decode(Path(path)).astype(np.int16)
    except BadFrame as error:
        raise UserError(f"mask: {error}") from None
    grey = pixels.mean(-1)
    if (np.ptp(pixels, -1) > 64).mean() > 0.01 or ((grey > 64) & (grey < 192)).mean() > 0.05:
        raise UserError(f"mask {path} is not black and white: {draw}")
    if not (grey >= 128).any():
        raise UserError(f"mask {path} is all black, so that nothing would be seen: {draw}")
    return Image.fromarray(np.where(grey >= 128, 255, 0).astype(np.uint8))
