"""Decodes a picture from a file or a camera, or rejects it for one of a few reasons.

Needs no torch, so that a small capture process can use it.
"""

import ctypes
import logging
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageCms, ImageFile, ImageOps, UnidentifiedImageError

from streamclr.base.errors import UserError

# "unreadable": there is no such file, or the disk fails. "smaller than crop": crop= or regions= reach beyond its edges.
REASONS = (
    "unreadable", "empty", "not an image", "too large", "truncated", "damaged", "pixels without a range",
    "smaller than crop",
)  # fmt: skip
MAX_PIXELS = 64_000_000
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# The most pixels per byte: of a black picture, in the densest variant of the format.
PIXELS_PER_BYTE = {"JPEG": 400, "MPO": 400, "PNG": 8_300, "WEBP": 600, "GIF": 2_800, "BMP": 130, "PPM": 8}
FULL_HD_PIXELS = 1920 * 1080  # up to here a sparse picture costs little memory
# The pixels may be fine though the EXIF block is damaged.
EXIF_ERRORS = (SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, OSError, EOFError, struct.error)

logging.getLogger("PIL").addHandler(logging.NullHandler())  # or its warnings on odd TIFFs go to stderr


def natural_key(path: Path) -> list[tuple[int, int | str]]:
    """Sort key with frame2 before frame10; the plain name decides ties."""
    parts = re.split("([0-9]+)", path.name.lower())
    key: list[tuple[int, int | str]] = [(0, int(p)) if p[0] in "0123456789" else (1, p) for p in parts if p]
    return [*key, (2, path.name)]


def track_name(path: Path) -> str:
    """The track of a frame by its file name: the part before the last `_`; without one, all but the suffix."""
    return path.stem.rpartition("_")[0] or path.stem


class BadFrame(UserError):
    """A picture that cannot be used; `reason` is one of REASONS."""

    def __init__(self, what: str, reason: str, detail: object):
        super().__init__(what, reason, str(detail))  # from its args a process can make the error of another
        self.reason = reason

    def __str__(self) -> str:
        return " ".join("{} cannot be used, {}: {}".format(*self.args).split())


class Frame(NamedTuple):
    """A decoded picture, upright: in RGB, or in RGBA if anything in it may be transparent."""

    image: Image.Image  # it may be a fraction of the frame's size
    size: tuple[int, int]  # width and height of the frame


Spare = Callable[[int, int], float]  # from width and height to how many times smaller a picture may be decoded


def open_frame(file: Path | bytes, spare: Spare = lambda width, height: 1.0, max_pixels: int = MAX_PIXELS) -> Frame:
    """The picture in a file or in its bytes; the first one of an animation. A large JPEG is decoded at a fraction."""
    with _opened(file, max_pixels) as opened:
        (width, height), upright = opened.size, _upright_size(opened)
        reduction = max(n for n in (1, 2, 4, 8) if n <= max(1.0, spare(*upright)))
        opened.draft(None, (width // reduction, height // reduction))
        if opened.format == "TIFF":
            _silence_libtiff()
        opened.load()
        before = opened.size
        with suppress(*EXIF_ERRORS):
            ImageOps.exif_transpose(opened, in_place=True)
        if before[0] != before[1]:  # it may be damaged, and the picture not turned
            upright = (width, height) if opened.size == before else (height, width)
        return Frame(eight_bits(opened, _name(file)), upright)


def on_white(image: Image.Image) -> Image.Image:
    """In RGB, with white where it is transparent."""
    if image.mode != "RGBA":
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def dimensions(file: Path | bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height by the header alone."""
    with _opened(file, max_pixels) as image:
        return _upright_size(image)


def _upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """Of a PNG or WebP, whose pixels would be read for its EXIF block, as it is stored."""
    with suppress(*EXIF_ERRORS):
        if image.format in ("JPEG", "MPO", "TIFF") and image.getexif().get(0x0112) in (5, 6, 7, 8):
            return image.size[1], image.size[0]
    return image.size


@contextmanager
def _opened(file: Path | bytes, max_pixels: int) -> Iterator[ImageFile.ImageFile]:
    """A picture whose header was checked; every error with it, inside the block too, becomes a BadFrame."""
    what = _name(file)
    try:
        if isinstance(file, Path) and not file.is_file():  # opening a pipe would wait for a writer
            raise BadFrame(what, "unreadable", "there is no such file")
        with warnings.catch_warnings(), file.open("rb") if isinstance(file, Path) else BytesIO(file) as data:
            warnings.simplefilter("ignore")
            n_bytes = data.seek(0, os.SEEK_END)
            data.seek(0)
            if n_bytes == 0:
                raise BadFrame(what, "empty", "it has no bytes")
            if claimed := _webp_size(data.read(30)):  # Pillow allocates all pixels of a WebP when it opens it
                _check_size(what, "WEBP", claimed, n_bytes, max_pixels)
            data.seek(0)
            with Image.open(data, formats=FORMATS) as image:
                _check_size(what, image.format, image.size, n_bytes, max_pixels)
                _check_cover(what, image)
                yield image
    except BadFrame:
        raise
    except UnidentifiedImageError as error:
        raise BadFrame(what, "not an image", "no known format, or a damaged header") from error
    except (Image.DecompressionBombError, MemoryError) as error:
        raise BadFrame(what, "too large", error) from error
    except Exception as error:  # Pillow's parsers raise errors of any type on damaged bytes
        if isinstance(error, OSError) and error.errno is not None:
            raise BadFrame(what, "unreadable", error.strerror) from error
        cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
        raise BadFrame(what, "truncated" if cut else "damaged", error) from error


@cache
def _silence_libtiff() -> None:
    """libtiff prints to stderr, besides failing. Pillow has no switch for that, libtiff has: no handlers, no messages.

    Where Pillow's library does not show its symbols (Windows) the messages stay; they do no harm.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(Image.core.__file__)  # type: ignore[attr-defined]  # with the libraries that it is linked to
        for function in (library.TIFFSetErrorHandler, library.TIFFSetWarningHandler):
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
            function(None)


def _name(file: Path | bytes) -> str:
    return f"the image {file}" if isinstance(file, Path) else f"a frame of {len(file)} bytes"


def _check_size(what: str, format: str | None, size: tuple[int, int], n_bytes: int, max_pixels: int) -> None:
    n_pixels, claim = size[0] * size[1], f"its header claims {size[0]} x {size[1]} pixels"
    if n_pixels < 1:
        raise BadFrame(what, "empty", claim)
    if n_pixels > max_pixels:
        raise BadFrame(what, "too large", f"{claim}, and {max_pixels:,} are allowed")
    most = n_bytes * PIXELS_PER_BYTE.get(format or "", 10_000)
    if format == "WEBP":  # one colour takes a few dozen bytes at any size
        most = max(most, FULL_HD_PIXELS)
    if n_pixels > most:
        raise BadFrame(what, "truncated", f"{claim}, which its {n_bytes} bytes cannot hold")


def _check_cover(what: str, image: ImageFile.ImageFile) -> None:
    """Reject a TIFF that lacks strips, and an animation whose first frame is small: Pillow would invent the rest."""
    boxes = [image.info["bbox"]] if "bbox" in image.info else [tile[1] for tile in image.tile if tile[1]]
    if not boxes or (image.format == "GIF" and image.width * image.height <= FULL_HD_PIXELS):
        return
    # A box is left, top, right, bottom.
    right, bottom = max(box[2] for box in boxes), max(box[3] for box in boxes)
    if right * bottom < image.width * image.height:  # by area: a TIFF may be turned already
        raise BadFrame(what, "damaged", f"{right} x {bottom} pixels are there, of {image.width} x {image.height}")


def _webp_size(head: bytes) -> tuple[int, int] | None:
    if len(head) < 30 or head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack("<HH", head[26:30])
    return width & 0x3FFF, height & 0x3FFF


def eight_bits(image: Image.Image, what: str) -> Image.Image:
    """The picture in RGB, or in RGBA if anything in it may be transparent."""
    # What Pillow reads as 32-bit numbers has 16 bits in a PNG or PPM, and any range elsewhere.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise BadFrame(what, "pixels without a range", f"its mode is {image.mode}, which has no white")
    if image.mode.startswith("I"):  # Pillow would cut these at 255 instead of scaling them
        tags = getattr(image, "tag_v2", {})  # of a TIFF, which may have 12 bits, or black as its largest number
        bits = tags.get(258, (16,))[0]
        grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
        return Image.fromarray(255 - grey if tags.get(262) == 0 else grey).convert("RGB")
    if image.mode == "LAB":
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, *profiles, outputMode="RGB")
        assert converted is not None  # it is when the picture is changed in place
        return converted
    if image.mode == "La":  # the only mode with alpha that does not become RGBA at once
        image = image.convert("LA")
    if image.mode.endswith(("A", "a")) or "transparency" in image.info:
        return image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")
