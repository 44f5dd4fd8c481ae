import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from streamclr import UserError
from streamclr.cli.entry import main
from streamclr.records.directory import RunDirectory
from streamclr.streams.account import Account
from streamclr.streams.frame import REASONS, BadFrame, dimensions
from streamclr.streams.sight import decode
from support.images import middle_square as square
from support.malformed import malformed, png_with_size


def encoded(image, format="PNG", **options):
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()


def noise(height=6, width=8, channels=3, dtype=np.uint8, seed=0):
    shape = (height, width, channels) if channels else (height, width)
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def smooth(height, width):
    small = Image.fromarray(noise(5, 6))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def grey(values):
    return np.repeat(np.asarray(values, np.uint8)[..., None], 3, axis=-1)


def on_white(rgb, alpha):
    share = alpha[..., None] / 255
    return rgb * share + 255 * (1 - share)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM"])
def test_rgb_is_left_as_it_is(format):
    assert np.array_equal(decode(encoded(noise(), format)), noise())


def test_a_file_and_its_bytes_are_the_same(tmp_path):
    data = encoded(noise())
    (tmp_path / "a.png").write_bytes(data)
    assert np.array_equal(decode(tmp_path / "a.png"), decode(data))
    assert dimensions(tmp_path / "a.png") == dimensions(data) == (8, 6)


def test_grey_and_black_and_white():
    values = noise(channels=0)
    assert np.array_equal(decode(encoded(values)), grey(values))
    bits = values > 127
    assert np.array_equal(decode(encoded(Image.fromarray(bits))), grey(255 * bits))


SIXTEEN = noise(channels=0, dtype=np.uint16)


@pytest.mark.parametrize(
    "data",
    [
        encoded(SIXTEEN),
        encoded(SIXTEEN, "TIFF"),
        encoded(SIXTEEN, "TIFF", compression="tiff_lzw"),
        encoded(Image.frombytes("I;16B", (8, 6), SIXTEEN.astype(">u2").tobytes()), "TIFF"),
        b"P5 8 6 65535\n" + SIXTEEN.astype(">u2").tobytes(),
    ],
    ids=["png", "tiff", "tiff lzw", "tiff big-endian", "pgm"],
)
def test_sixteen_bits_of_grey_are_scaled(data):
    assert np.array_equal(decode(data), grey(SIXTEEN >> 8))


def test_twelve_bits_and_white_as_zero_in_a_tiff():
    twelve = bytes([0xFF, 0xF8, 0x00, 0x00, 0x0A, 0xBC])  # 4095, 2048, 0, 2748
    tags = {256: (4, 4), 257: (4, 1), 258: (3, 12), 259: (3, 1), 262: (3, 1), 273: (4, 8), 277: (3, 1), 279: (4, 6)}
    assert decode(tiff(tags, twelve))[0, :, 0].tolist() == [255, 128, 0, 171]
    inverted = tags | {256: (4, 3), 258: (3, 16), 262: (3, 0)}
    pixels = np.array([0, 0xFFFF, 0x1234], "<u2").tobytes()
    assert decode(tiff(inverted, pixels))[0, :, 0].tolist() == [255, 0, 255 - 0x12]


def tiff(tags, pixels):
    """Little-endian, the pixels behind the header."""
    entries = b"".join(
        tag.to_bytes(2, "little") + kind.to_bytes(2, "little") + (1).to_bytes(4, "little") + value.to_bytes(4, "little")
        for tag, (kind, value) in sorted(tags.items())
    )
    directory = len(tags).to_bytes(2, "little") + entries + bytes(4)
    return b"II*\0" + (8 + len(pixels)).to_bytes(4, "little") + pixels + directory


def test_sixteen_bits_of_colour_are_scaled():
    colour = noise(dtype=np.uint16)
    data = b"P6 8 6 65535\n" + colour.astype(">u2").tobytes()
    assert np.abs(decode(data).astype(int) - colour / 257).max() < 1
    png = png_with_size(8, 6, bits=16, colour=2, rows=b"".join(b"\0" + row.astype(">u2").tobytes() for row in colour))
    assert np.array_equal(decode(png), colour >> 8)


@pytest.mark.parametrize("format", ["TIFF", "JPEG"])
def test_cmyk(format):
    """Pillow writes JPEGs with Adobe's marker, which means inverted inks."""
    inks = np.zeros((16, 32, 4), np.uint8)
    inks[:, :16] = (255, 0, 0, 0)
    inks[:, 16:] = (0, 0, 255, 102)
    image = decode(encoded(Image.fromarray(inks, "CMYK"), format))
    tolerance = 0 if format == "TIFF" else 3
    assert np.abs(image[8, 4].astype(int) - (0, 255, 255)).max() <= tolerance
    assert np.abs(image[8, 28].astype(int) - (153, 153, 0)).max() <= tolerance


def test_ycbcr_and_lab():
    ycbcr = Image.fromarray(noise()).convert("YCbCr")
    assert np.array_equal(decode(encoded(ycbcr, "TIFF")), np.asarray(ycbcr.convert("RGB")))
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    colour = Image.fromarray(smooth(6, 8) // 2 + 64)
    lab = ImageCms.profileToProfile(colour, *profiles, outputMode="LAB")
    assert np.abs(decode(encoded(lab, "TIFF")).astype(int) - np.asarray(colour)).max() <= 6


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_alpha_is_put_on_white(format):
    pixels = noise(channels=4)
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    image = decode(encoded(pixels, format, **options))
    assert np.abs(image - on_white(pixels[..., :3], pixels[..., 3])).max() <= 1


def test_alpha_of_grey_and_after_scaling():
    pixels = noise(channels=2)
    image = decode(encoded(Image.fromarray(pixels, "LA")))
    assert np.abs(image - on_white(grey(pixels[..., 0]), pixels[..., 1])).max() <= 1
    pixels = noise(40, 60, 4)
    flat = on_white(pixels[..., :3], pixels[..., 3]).round().astype(np.uint8)
    assert np.abs(decode(encoded(pixels), 10).astype(int) - square(flat, 10)).max() <= 2


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_palettes(format):
    colours = [(10, 20, 30), (200, 100, 0), (0, 255, 0)]
    image = Image.fromarray((np.arange(48) % 3).astype(np.uint8).reshape(6, 8))
    image.putpalette(np.ravel(colours).tolist())
    expected = np.array(colours, np.uint8)[np.arange(48).reshape(6, 8) % 3]
    assert np.array_equal(decode(encoded(image, format)), expected)
    expected[expected[..., 1] == 100] = 255
    assert np.array_equal(decode(encoded(image, format, transparency=1)), expected)


def test_palette_with_shares_of_transparency_and_a_transparent_colour():
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8))
    image.putpalette([0, 0, 0, 0, 0, 0, 100, 0, 0])
    data = encoded(image, transparency=bytes([255, 51, 0]))
    assert decode(data)[0].tolist() == [[0, 0, 0], [204, 204, 204], [255, 255, 255]]
    colours = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)
    assert decode(encoded(colours, transparency=(1, 2, 3)))[0].tolist() == [[255, 255, 255], [4, 5, 6]]


TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_exif_turns(format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = noise()
    options = {"lossless": True} if format == "WEBP" else {}
    image = decode(encoded(pixels, format, exif=exif, **options))
    expected = decode(encoded(pixels, format, **options))
    assert np.array_equal(image, TURNS[orientation](expected))


def test_damaged_exif_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(noise(16, 16), "JPEG", exif=exif)
    start = data.index(b"Exif\0\0") + 6
    length = int.from_bytes(data[start - 8 : start - 6], "big") - 8
    rng = np.random.default_rng(0)
    for _ in range(200):
        junk = bytearray(data)
        for at in rng.integers(start, start + length, 6):
            junk[at] = rng.integers(256)
        assert decode(bytes(junk)).shape == (16, 16, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation(format):
    frames = [Image.new("RGB", (12, 10), colour) for colour in ("red", "blue", "green")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 3
    assert (decode(data) == (255, 0, 0)).all()


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size():
    pixels = smooth(1200, 1600)
    data = encoded(pixels, "JPEG", quality=95)
    assert np.abs(decode(data, 64).astype(int) - square(decode(data), 64)).max() <= 3
    assert decode(data).shape == (1200, 1600, 3)


@pytest.mark.parametrize(("height", "width"), [(20, 40), (40, 20), (7, 7), (1, 50), (10, 10)])
def test_the_middle_is_cut_out(height, width):
    pixels = noise(height, width)
    assert decode(encoded(pixels), 10).shape == (10, 10, 3)
    assert np.array_equal(decode(encoded(pixels), 10), square(pixels, 10))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"some text", "not an image"),
        (b"\x89PNG\r\n\x1a\n", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encoded(noise(64, 64))[:-2000], "truncated"),
        (encoded(noise(64, 64), "JPEG")[:-2000], "truncated"),
        (encoded(noise(64, 64), "BMP")[:-2000], "truncated"),
        (png_with_size(0, 5), "not an image"),
        (png_with_size(9_000, 9_000), "too large"),
        (png_with_size(2**31 - 1, 2**31 - 1), "too large"),
        (png_with_size(7_000, 7_000), "truncated"),
        (encoded(noise(channels=0).astype(np.float32), "TIFF"), "pixels without a range"),
        (encoded(noise(channels=0).astype(np.int32), "TIFF"), "pixels without a range"),
        (Path("nowhere.png"), "unreadable"),
        (Path("."), "unreadable"),
    ],
)
def test_what_is_rejected_and_why(data, reason):
    with pytest.raises(BadFrame) as error:
        decode(data, 16)
    assert isinstance(error.value, UserError)
    assert error.value.reason == reason
    assert reason in REASONS
    assert "\n" not in str(error.value)


def test_a_header_is_checked_before_anything_is_decoded(monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    for data, reason in ((encoded(noise(100, 100)), "too large"), (b"P6 90 90 255\n", "truncated")):
        with pytest.raises(BadFrame) as error:
            decode(data, 8, max_pixels=9_999)
        assert error.value.reason == reason


def test_pictures_that_their_bytes_do_not_cover():
    """Pillow would make up the rest."""
    rows = {256: (4, 8), 257: (4, 9), 258: (3, 8), 259: (3, 1), 262: (3, 1), 273: (4, 8), 277: (3, 1), 278: (4, 6)}
    short = tiff(rows | {279: (4, 48)}, noise(channels=0).tobytes())
    gif = bytearray(encoded(Image.new("P", (64, 48)), "GIF") + bytes(10_000))
    gif[6:10] = (3000).to_bytes(2, "little") * 2
    for data in (short, bytes(gif)):
        with pytest.raises(BadFrame, match="pixels are there, of"):
            decode(data)
    gif[6:10] = (100).to_bytes(2, "little") * 2
    assert decode(bytes(gif)).shape == (100, 100, 3)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_a_black_frame_is_a_frame(format):
    options = {"JPEG": {"optimize": True}, "WEBP": {"lossless": True}, "TIFF": {"compression": "tiff_deflate"}}
    for mode in ("RGB", "L"):
        data = encoded(Image.new(mode, (1920, 1080)), format, **options.get(format, {}))
        assert decode(data, 32).max() <= 1


FUZZ = """
import json, sys, warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.malformed import malformed, whole_images
from streamclr.streams.frame import BadFrame, dimensions
from streamclr.streams.sight import decode
warnings.simplefilter("error")

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

for data in whole_images().values():  # so that Pillow's plugins are loaded
    with suppress(BadFrame):
        decode(data)
counts, before = Counter(), peak()
for number, (kind, data) in enumerate(malformed(int(sys.argv[2]))):
    size = (None, 8, 32)[number % 3]
    try:
        image = decode(data, size)
        assert image.dtype == "uint8" and image.ndim == 3 and image.shape[2] == 3
        assert size is None or image.shape == (size, size, 3)
        assert size is not None or sorted(image.shape[:2]) == sorted(dimensions(data)), (kind, image.shape)
        counts["decoded"] += 1
    except BadFrame as error:
        counts[error.reason] += 1
print(json.dumps([counts, (peak() - before) / 1024]))
"""


@pytest.mark.parametrize("n", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_malformed_images_are_decoded_or_rejected_in_little_memory(n):
    command = [sys.executable, "-c", FUZZ, str(Path(__file__).parent), str(n)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    counts, mebibytes = json.loads(ended.stdout)
    print(f"{n} malformed images, {mebibytes:.1f} MiB: {counts}")
    assert sum(counts.values()) == n
    assert counts.keys() <= {"decoded", *REASONS}
    assert mebibytes <= 64
    assert min(counts[reason] for reason in ("decoded", "not an image", "too large", "truncated", "damaged")) > 0


def test_stderr_is_open_to_other_threads_while_a_damaged_tiff_is_decoded(monkeypatch, capfd):
    from PIL import TiffImagePlugin

    load, damaged = (
        TiffImagePlugin.TiffImageFile.load,
        bytearray(encoded(noise(64, 64), "TIFF", compression="tiff_lzw")),
    )
    damaged[100:2000] = bytes(1900)

    def load_while_another_thread_writes(self):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(os.write, 2, b"from another thread\n").result()
        return load(self)

    monkeypatch.setattr(TiffImagePlugin.TiffImageFile, "load", load_while_another_thread_writes)
    with pytest.raises(BadFrame):
        decode(bytes(damaged))
    assert set(capfd.readouterr().err.splitlines()) == {"from another thread"}  # and nothing of libtiff


def test_two_threads_that_decode_leave_standard_error_as_it_was():
    where, picture = os.fstat(2), encoded(noise(), "TIFF", compression="tiff_lzw")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(decode, [picture] * 400))
    assert os.path.samestat(os.fstat(2), where)


def test_the_command_line_on_a_folder_with_bad_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    colours = {"ant": (200, 0, 0), "bee": (0, 200, 0)}
    for name, colour in colours.items():
        Path("images", name).mkdir(parents=True)
        for i in range(20):
            pixels = noise(16, 16, seed=i) // 5 + np.array(colour, np.uint8)
            Path("images", name, f"{i}.png").write_bytes(encoded(pixels))
    for i, (_, data) in enumerate(malformed(20)):
        Path("images", ("ant", "bee")[i % 2], f"{i}.png").write_bytes(data[: len(data) // 3])
    words = ["--source", "folder:images?size=16", "--buffer", "8", "--width", "1", "--fractions", "1", "--out", "r"]
    words += ["--classifier", "linear"]
    assert main(["run", *words]) == 0
    account = Account.of(RunDirectory(Path("r")).results["account"])
    assert account.is_balanced
    assert account.received == 40
    assert account.rejected.total() > 10
    buffer = RunDirectory(Path("r")).load_buffer()
    whole = buffer["images"].float().mean((2, 3))
    told = whole.max(1).values > 180  # not one of the malformed ones that could be decoded
    assert told.any()
    assert torch.equal(buffer["labels"][told], whole.argmax(1)[told])
    capsys.readouterr()
    assert main(["predict", "r", "--source", "folder:images"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["image"] for line in lines] == list(range(40))
    assert sum("rejected" in line for line in lines) == account.rejected.total()
    assert sum("class" in line for line in lines) == account.learned
