"""Images that a broken disk, camera or network might deliver, made from whole ones by a seed."""

import io
import random
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

SIZES = (0, 1, 2, 1_000, 5_000, 16_384, 40_000, 65_535)


def malformed(n: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """`n` times what was done, and the bytes that it left."""
    rng = random.Random(seed)
    originals = whole_images()
    for _ in range(n):
        name, data = rng.choice(list(originals.items()))
        harm = rng.choice((truncated, flipped, resized, resized, spliced, filled))
        yield f"{name}, {harm.__name__}", harm(data, rng)


def whole_images() -> dict[str, bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 4), np.uint8)
    pixels = np.asarray(Image.fromarray(pixels[:12, :16]).resize((64, 48), Image.Resampling.BICUBIC))
    rgba = Image.fromarray(pixels)
    rgb, grey = rgba.convert("RGB"), rgba.convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "a camera"
    frames = [rgb, rgb.rotate(90), rgb.rotate(180)]
    sixteen = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    variants = {
        "jpeg": (rgb, "JPEG", {"exif": exif}),
        "jpeg progressive": (rgb, "JPEG", {"progressive": True}),
        "jpeg grey": (grey, "JPEG", {}),
        "jpeg cmyk": (rgb.convert("CMYK"), "JPEG", {}),
        "png": (rgb, "PNG", {"exif": exif}),
        "png alpha": (rgba, "PNG", {}),
        "png palette": (rgb.quantize(16), "PNG", {"transparency": 3}),
        "png 16 bits": (sixteen, "PNG", {}),
        "png black and white": (grey.convert("1"), "PNG", {}),
        "png animated": (frames[0], "PNG", {"save_all": True, "append_images": frames[1:]}),
        "gif": (rgb.quantize(64), "GIF", {}),
        "gif animated": (frames[0], "GIF", {"save_all": True, "append_images": frames[1:]}),
        "bmp": (rgb, "BMP", {}),
        "bmp palette": (rgb.quantize(64), "BMP", {}),
        "webp": (rgb, "WEBP", {"exif": exif}),
        "webp lossless": (rgba, "WEBP", {"lossless": True}),
        "webp animated": (frames[0], "WEBP", {"save_all": True, "append_images": frames[1:]}),
        "tiff": (rgb, "TIFF", {}),
        "tiff lzw": (rgba, "TIFF", {"compression": "tiff_lzw"}),
        "tiff deflate": (sixteen, "TIFF", {"compression": "tiff_deflate"}),
        "tiff jpeg": (rgb, "TIFF", {"compression": "jpeg"}),
        "tiff cmyk": (rgb.convert("CMYK"), "TIFF", {}),
        "tiff lab": (Image.merge("LAB", rgb.split()), "TIFF", {}),
        "tiff float": (grey.convert("F"), "TIFF", {}),
        "ppm": (rgb, "PPM", {}),
        "pgm 16 bits": (sixteen, "PPM", {}),
    }
    images = {}
    for name, (image, format, options) in variants.items():
        data = io.BytesIO()
        image.save(data, format, **options)
        images[name] = data.getvalue()
    return images


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Bits, half of the time in the header, where they do most."""
    flips = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        flips[rng.randrange(rng.choice((min(len(data), 64), len(data))))] ^= 1 << rng.randrange(8)
    return with_right_checksums(bytes(flips)) if rng.random() < 0.5 else bytes(flips)


def spliced(data: bytes, rng: random.Random) -> bytes:
    """A piece lost or doubled."""
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:start] + rng.choice((b"", 2 * data[start:end])) + data[end:]


def filled(data: bytes, rng: random.Random) -> bytes:
    """A piece of zeros, ones or noise, as a block of a broken disk."""
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:start] + rng.choice((bytes, lambda n: n * b"\xff", rng.randbytes))(end - start) + data[end:]


def resized(data: bytes, rng: random.Random) -> bytes:
    """Another width and height in the header."""
    width, height = rng.choice(SIZES), rng.choice(SIZES)
    changed = bytearray(data)
    if data[:2] == b"\xff\xd8":
        at = next(i for i in range(len(data)) if data[i] == 0xFF and data[i + 1] in (0xC0, 0xC1, 0xC2))
        changed[at + 5 : at + 9] = struct.pack(">HH", height, width)
    elif data[:4] == b"\x89PNG":
        changed[16:24] = struct.pack(">II", width, height)
        return with_right_checksums(bytes(changed))
    elif data[:3] == b"GIF":
        changed[6:10] = struct.pack("<HH", width, height)
    elif data[:2] == b"BM":
        changed[18:26] = struct.pack("<ii", width, rng.choice((height, -height)))
    elif data[:4] == b"RIFF":
        if data[12:16] == b"VP8X":
            changed[24:30] = width.to_bytes(3, "little") + height.to_bytes(3, "little")
        elif data[12:16] == b"VP8L":
            changed[21:25] = (width & 0x3FFF | (height & 0x3FFF) << 14).to_bytes(4, "little")
        else:
            changed[26:30] = struct.pack("<HH", width & 0x3FFF, height & 0x3FFF)
    elif data[:2] == b"II":
        start = struct.unpack_from("<I", data, 4)[0]
        for at in range(start + 2, start + 2 + 12 * struct.unpack_from("<H", data, start)[0], 12):
            tag = struct.unpack_from("<H", data, at)[0]
            if tag in (256, 257):
                changed[at + 2 : at + 12] = struct.pack("<HII", 4, 1, width if tag == 256 else height)
    else:
        magic, _, rest = data.split(None, 2)
        return magic + f" {width} {height} ".encode() + rest.split(None, 1)[1]
    return bytes(changed)


def with_right_checksums(data: bytes) -> bytes:
    """A PNG as its reader wants it; anything else as it is."""
    fixed, at = bytearray(data), 8
    while data[:4] == b"\x89PNG" and at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        fixed[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")[: max(0, len(data) - end)]
        at = end + 4
    return bytes(fixed[: len(data)])


def png_with_size(width: int, height: int, bits: int = 8, colour: int = 2, rows: bytes = b"") -> bytes:
    """A PNG whose header says so, whatever the rows hold."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
