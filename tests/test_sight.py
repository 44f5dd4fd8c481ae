import io
import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from streamclr import UserError, open_stream
from streamclr.streams.cameras.feed import Feed, make_feed
from streamclr.streams.frame import BadFrame, Frame, open_frame
from streamclr.streams.sight import FITS, THUMBNAIL_SIDE, Box, Sight, decode, inside_bars, make_sights
from streamclr.streams.spec import absolute_source, fit_of, split_source, with_fit


def coordinates(width, height):
    """A picture whose pixels say where they are: red the column, green the row, up to 255."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1], pixels[..., 2] = np.arange(width), np.arange(height)[:, None], 77
    return pixels


def frame_of(pixels):
    return Frame(Image.fromarray(pixels), pixels.shape[1::-1])


def seen(image):
    return np.asarray(Image.open(io.BytesIO(image)))


sides = st.integers(1, 200)


@given(sides, sides, st.data())
def test_each_pixel_of_a_crop_is_where_it_was(width, height, data):
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    w, h = data.draw(st.integers(1, width - left)), data.draw(st.integers(1, height - top))
    size = max(w, h)
    taken = Sight(crop=f"{left},{top},{w},{h}", fit="letterbox").square(frame_of(coordinates(width, height)), size)
    x0, y0, x1, y1 = inside_bars(w, h, size)
    assert (x1 - x0, y1 - y0) == (w, h)
    assert np.array_equal(taken[y0:y1, x0:x1], coordinates(width, height)[top : top + h, left : left + w])


@given(sides, sides, st.floats(0, 90), st.floats(0, 90), st.data())
def test_per_cent_are_pixels_of_any_frame(width, height, x, y, data):
    w, h = data.draw(st.floats(1, 100 - x)), data.draw(st.floats(1, 100 - y))
    text = ",".join(f"{round(n, 4):f}%" for n in (x, y, w, h))
    try:
        left, top, right, bottom = Box.parse(text).of(width, height)
    except UserError:
        assert x + w > 99.999 or y + h > 99.999  # by rounding
        return
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert abs(left - min(x * width / 100, width - 1)) <= 0.51
    assert abs(bottom - max((y + h) * height / 100, top + 1)) <= 0.51


@given(sides, sides, st.integers(8, 64), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_between_the_bars_of_a_letterbox_is_all_of_the_frame(width, height, size, seed):
    pixels = np.random.default_rng(seed).integers(1, 256, (height, width, 3), np.uint8)
    whole = Sight(fit="letterbox").square(frame_of(pixels), size)
    left, top, right, bottom = inside_bars(width, height, size)
    assert max(right - left, bottom - top) == size
    bars = np.ones((size, size), bool)
    bars[top:bottom, left:right] = False
    assert not whole[bars].any()
    assert abs(left - (size - right)) <= 1  # in the middle
    assert abs(top - (size - bottom)) <= 1
    # The inverse: enlarged again it is the frame as it is at that size.
    inside = whole[top:bottom, left:right]
    again = Image.fromarray(pixels).resize((right - left, bottom - top), Image.Resampling.BILINEAR, reducing_gap=3.0)
    assert np.array_equal(inside, np.asarray(again))


@given(st.integers(80, 300), st.integers(80, 300), st.sampled_from(FITS))
def test_what_is_at_the_edges_is_seen_but_for_crop(width, height, fit):
    """A white frame with one coloured edge on each side."""
    pixels = np.full((height, width, 3), 255, np.uint8)
    pixels[:, : width // 5] = (255, 0, 0)
    pixels[:, -(width // 5) :] = (0, 0, 255)
    square = Sight(fit=fit).square(frame_of(pixels), 32).astype(int)
    is_red, is_blue = (square[..., 0] - square[..., 2] > 100), (square[..., 2] - square[..., 0] > 100)
    if fit == "crop" and width > 1.8 * height:
        assert not is_red.any()
        assert not is_blue.any()
    elif fit != "crop":
        assert is_red.any()
        assert is_red.sum() == pytest.approx(is_blue.sum(), abs=34)


def test_stretch_is_pillows():
    pixels = np.random.default_rng(0).integers(0, 256, (90, 160, 3), np.uint8)
    plain = np.asarray(Image.fromarray(pixels).resize((24, 24), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(Sight(fit="stretch").square(frame_of(pixels), 24) - plain).max() <= 8


def mask_file(path, hidden, size=(160, 90), mode="L"):
    """White, with a black rectangle."""
    image = Image.new("L", size, "white")
    image.paste("black", hidden)
    image.convert(mode).save(path)
    return str(path)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("mode", ["1", "L", "RGB", "P"])
def test_what_is_behind_a_mask_has_no_influence(tmp_path, fit, mode):
    mask = mask_file(tmp_path / "mask.png", (0, 0, 80, 90), mode=mode)
    one, other = coordinates(160, 90), coordinates(160, 90)
    other[:, :80] = np.random.default_rng(0).integers(0, 256, (90, 80, 3), np.uint8)
    (sight,) = make_sights(None, fit, mask, None)
    squares = [sight.square(frame_of(pixels), 16) for pixels in (one, other)]
    assert np.array_equal(*squares)
    assert squares[0][:, 9:].any()
    assert sight.thumbnail(frame_of(one)) == sight.thumbnail(frame_of(other))
    without = Sight(fit=fit).square(frame_of(one), 16)
    assert np.array_equal(squares[0][:, 10:], without[:, 10:])


def test_a_mask_is_of_the_whole_frame_and_of_any_size(tmp_path):
    mask = mask_file(tmp_path / "mask.png", (0, 0, 80, 90))  # the left half
    pixels = np.full((180, 320, 3), 200, np.uint8)
    left, right = make_sights(None, "stretch", mask, "left:0,0,50%,100%;right:50%,0,50%,100%")
    assert not left.square(frame_of(pixels), 8).any()
    assert (right.square(frame_of(pixels), 8) == 200).all()


def test_a_crop_of_a_large_jpeg_that_is_decoded_at_a_fraction():
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8))
    picture, content = small.resize((1600, 1200), Image.Resampling.BICUBIC), io.BytesIO()
    picture.save(content, "JPEG", quality=95)
    sight = Sight(crop="25%,10%,50%,60%", fit="stretch")
    part = picture.crop((400, 120, 1200, 840)).resize((64, 64), Image.Resampling.BILINEAR)
    assert np.abs(decode(content.getvalue(), 64, sight).astype(int) - np.asarray(part)).max() <= 6
    reduced = open_frame(content.getvalue(), lambda width, height: 5.0)
    assert (reduced.size, reduced.image.size) == ((1600, 1200), (400, 300))


def test_a_crop_is_of_the_upright_picture():
    pixels, content, exif = coordinates(160, 90), io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # lies on its side: upright it is 90 x 160
    Image.fromarray(pixels).save(content, "JPEG", exif=exif, quality=100, subsampling=0)
    upright = np.rot90(pixels, -1).astype(int)
    found = decode(content.getvalue(), 40, Sight(crop="10,100,40,40"))
    assert np.abs(found - upright[100:140, 10:50]).mean() < 3
    Sight(crop="0,100,90,60").check(*open_frame(content.getvalue()).size)


@pytest.mark.parametrize(
    ("sight", "size", "shape"),
    [
        (Sight(), (1280, 720), (144, 256)),
        (Sight(fit="letterbox"), (1280, 720), (144, 256)),
        (Sight(fit="crop"), (1280, 720), (256, 256)),
        (Sight(crop="0,0,100,50"), (1280, 720), (50, 100)),  # never enlarged
        (Sight(), (1920, 1080), (144, 256)),
        (Sight(), (30, 3000), (256, 3)),
    ],
)
def test_a_thumbnail_shows_what_is_seen_in_its_own_proportions(sight, size, shape):
    assert max(shape) <= THUMBNAIL_SIDE
    pixels = np.zeros((*size[::-1], 3), np.uint8)
    pixels[:, : size[0] // 2] = (200, 0, 0)
    found = seen(sight.thumbnail(frame_of(pixels)))
    assert found.shape == (*shape, 3)
    assert found[..., 1].max() < 60


def test_a_small_picture_with_alpha_is_seen_on_white():
    image = Image.new("RGBA", (20, 10), (0, 0, 0, 0))
    content = io.BytesIO()
    image.save(content, "PNG")
    assert (decode(content.getvalue(), 8, Sight(fit="stretch")) == 255).all()
    square = decode(content.getvalue(), 8, Sight(fit="letterbox"))
    assert (square[2:6] == 255).all()
    assert not square[:2].any()


@pytest.mark.parametrize(
    ("sight", "told"),
    [
        (Sight(fit="crop"), "sees 56 % of each 1280x720 frame, the middle square: fit=stretch or fit=letterbox sees"),
        (Sight(), "sees all of each 1280x720 frame, stretched to a square"),
        (Sight(fit="letterbox"), "sees all of each 1280x720 frame, with black bars"),
        (Sight(crop="25%,0,50%,100%"), "sees 50 % of each 1280x720 frame, 640x720 at 320,0, stretched to a square"),
        (Sight(crop="0,0,360,360"), "sees 14 % of each 1280x720 frame, 360x360 at 0,0"),
    ],
)
def test_what_is_seen_is_said(sight, told):
    assert sight.told(1280, 720).startswith(told)
    assert sight.told(1280, 720).count("\n") == 0


def test_what_a_mask_hides_is_said(tmp_path):
    mask = mask_file(tmp_path / "mask.png", (0, 0, 40, 90))
    told = Sight(mask=mask).told(1280, 720)
    assert told == "sees 75 % of each 1280x720 frame, stretched to a square, 25 % hidden by the mask"
    assert Sight().told(64, 64) == ""


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("fit=middle", "fit is 'middle': use crop, letterbox, stretch"),
        ("fit=streched", "did you mean 'stretch'?"),
        ("crop=1,2,3", "crop is '1,2,3': write x,y,w,h in pixels or per cent"),
        ("crop=a,b,c,d", "crop is 'a,b,c,d': write x,y,w,h"),
        ("crop=-1,0,5,5", "write x,y,w,h"),
        ("crop=0,0,0,5", "which is empty: width and height must be above 0"),
        ("crop=60%,0,50%,100%", "which is more than 100 % of the frame"),
        ("crop=0,0,120%,5", "which is more than 100 % of the frame"),
        ("crop=100,0,61,90", "which reaches to 161,90, and the frames are 160x90: use a part of them"),
        ("mask=none.png", "mask: the image .*none.png cannot be used, unreadable: there is no such file"),
        ("mask=text.txt", "mask: the image .* cannot be used, not an image"),
        ("mask=grey.png", "grey.png is not black and white: paint what must not be seen black on white"),
        ("mask=red.png", "red.png is not black and white"),
        ("mask=black.png", "black.png is all black, so that nothing would be seen"),
    ],
)
def test_bad_values_are_one_line(tmp_path, monkeypatch, options, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("no picture")
    for name, colour in (("grey", (128, 128, 128)), ("red", (255, 0, 0)), ("black", (0, 0, 0))):
        Image.new("RGB", (16, 9), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "images").mkdir()
    Image.fromarray(coordinates(160, 90)).save(tmp_path / "images" / "a.png")
    with pytest.raises(UserError, match=told) as raised:
        open_stream(f"folder:images?{options}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"regions": "door"}, "regions has 'door': write NAME:x,y,w,h with ; between two"),
        ({"regions": "a:0,0,5,5;"}, "regions has '': write NAME:x,y,w,h"),
        ({"regions": "a b:0,0,5,5"}, "regions has 'a b:0,0,5,5': write NAME"),
        ({"regions": "a:0,0,5,5;a:5,0,5,5"}, "regions has 'a' twice: give each region a name of its own"),
        ({"regions": "a:0,0,5"}, "crop is '0,0,5': write x,y,w,h"),
        ({"regions": "a:0,0,5,5", "crop": "0,0,5,5"}, "both crop and regions are given"),
        ({"motion": "yes"}, "motion is 'yes': use on, off, or the per cent of the picture that must change"),
        ({"motion": "0"}, "motion is '0'"),
        ({"motion": "101%"}, "motion is '101%'"),
        ({"between": "25:00-06:00"}, "between is '25:00-06:00': use two times of the day, as 06:00-20:00"),
        ({"between": "06:00-06:00"}, "between is '06:00-06:00'"),
        ({"between": "06:60-07:00"}, "between is '06:60-07:00'"),
        ({"between": "6-20"}, "between is '6-20'"),
        ({"between": "06:00-24:01"}, "between is '06:00-24:01'"),
    ],
)
def test_bad_values_of_a_camera(tmp_path, options, told):
    with pytest.raises(UserError, match=told) as raised:
        make_feed("watch", str(tmp_path), **options)
    assert "\n" not in str(raised.value)


def test_an_image_that_is_smaller_than_the_crop_is_rejected_and_counted(tmp_path):
    for name, side in (("a", 60), ("b", 20), ("c", 50)):
        Image.fromarray(coordinates(side, side)).save(tmp_path / f"{name}.png")
    stream = open_stream(f"folder:{tmp_path}?crop=0,0,40,40")
    assert len(stream.read(5)) == 2
    assert dict(stream.account.rejected) == {"smaller than crop": 1}
    with pytest.raises(BadFrame, match=r"the image .*b\.png cannot be used, smaller than crop: .* it is 20x20"):
        decode(tmp_path / "b.png", 8, Sight(crop="0,0,40,40"))


# ----------------------------------------------------------------------------------------------------------------------
# Sources.


def test_a_folder_says_what_it_sees_and_has_thumbnails(tmp_path):
    Image.fromarray(coordinates(200, 100)).save(tmp_path / "a.png")
    stream = open_stream(f"folder:{tmp_path}?size=16")
    assert stream.take_told() == ["sees all of each 200x100 frame, stretched to a square"]
    assert stream.take_told() == []
    assert seen(stream.thumbnail(0)).shape == (100, 200, 3)
    assert np.array_equal(stream.read(1)[0].permute(1, 2, 0).numpy(), decode(tmp_path / "a.png", 16, Sight()))
    assert not open_stream("synthetic:").has_thumbnails
    assert open_stream("synthetic:").thumbnail(0) is None
    assert open_stream("synthetic:").take_told() == []


def test_a_source_says_what_it_sees_where_it_is_written_down(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    mask_file(tmp_path / "mask.png", (0, 0, 5, 5))
    assert absolute_source("images") == f"folder:{tmp_path}/images?fit=stretch"
    assert absolute_source("synthetic:") == "synthetic:"
    assert absolute_source("-") == "-?fit=stretch"
    assert absolute_source("rtsp://u:p@camera/1?a=b") == "rtsp://u:p@camera/1?a=b#fit=stretch"
    written = absolute_source("http://camera/1?a=b#mask=mask.png&regions=door:10%,0,50%,100%;b:0,0,8,8&fit=crop")
    name, path, options = split_source(written)
    assert (name, path) == ("http", "http://camera/1?a=b")
    assert options == {"mask": f"{tmp_path}/mask.png", "regions": "door:10%,0,50%,100%;b:0,0,8,8", "fit": "crop"}
    for source in ("images", "rtsp://camera/1#fps=5", "-", "images?fit=letterbox&crop=0,0,50%,50%"):
        once = absolute_source(source)
        assert absolute_source(once) == once


def test_a_run_of_an_earlier_version_sees_the_middle_square(tmp_path):
    assert with_fit(f"folder:{tmp_path}?stc=5") == f"folder:{tmp_path}?stc=5&fit=crop"
    assert with_fit("rtsp://camera/1#fps=5") == "rtsp://camera/1#fps=5&fit=crop"
    assert with_fit("watch:here?fps=5") == "watch:here?fps=5&fit=crop"  # the name by which its frames are known stays
    assert with_fit("cifar10?stc=5") == "cifar10?stc=5"
    assert with_fit("rtsp://camera/1#fit=stretch") == "rtsp://camera/1#fit=stretch"
    assert fit_of("cifar10") == "crop"


def test_a_feed_reaches_its_process_whole(tmp_path):
    feed = make_feed("watch", str(tmp_path), regions="a:0,0,9,9;b:0,0,50%,50%", motion="on", between="06:00-20:00")
    assert Feed.of(json.loads(json.dumps(asdict(feed)))) == feed
    assert feed.places == {f"{tmp_path}#a": (str(tmp_path), "a"), f"{tmp_path}#b": (str(tmp_path), "b")}
