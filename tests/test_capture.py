"""The thread that reads a camera: regions, motion, hours and thumbnails, in this process."""

import io
import json
import os
import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from streamclr import UserError
from streamclr.streams.account import Account
from streamclr.streams.cameras.capture import CaptureThread
from streamclr.streams.cameras.feed import Feed, make_feed
from streamclr.streams.frame import Frame
from streamclr.streams.sight import Sight
from streamclr.streams.spec import open_source

pytest.importorskip("av")
WIDTH, HEIGHT = 128, 64


def picture(number):
    """The left half says the number in red, the right half in blue."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[:, : WIDTH // 2] = (60 + number, 0, 0)
    pixels[:, WIDTH // 2 :] = (0, 0, 60 + number)
    return pixels


def write_clip(path, pictures, fps=30):
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=fps)  # without loss
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "bgr0"
        for pixels in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())
    return str(path)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip") / "clip.mkv", [picture(i) for i in range(40)])


def resumed(feed, place):
    """As a checkpoint keeps it."""
    return Feed.of(json.loads(json.dumps({**vars(feed), "sights": [vars(s) for s in feed.sights], "place": place})))


def read(feed, most=1000, place=None):
    """What a process that is asked for so many frames answers."""
    capture = CaptureThread(feed if place is None else resumed(feed, place))
    answer, taken = capture.fetch(most, 60)
    json.dumps(answer)
    return answer, taken


TWO = "left:0,0,50%,100%;right:50%,0,50%,100%"


def told(taken):
    """Region and number of each frame."""
    return [(one.region, int(one.pixels.max()) - 60) for one in taken]


def test_each_region_is_a_camera_of_its_own(clip):
    feed = make_feed("video", clip, size=16, regions=TWO)
    assert list(feed.places) == [f"{clip}#left", f"{clip}#right"]
    answer, taken = read(feed)
    assert told(taken) == [(region, number) for number in range(40) for region in range(2)]
    assert all(not one.pixels[..., 2].any() and one.pixels[..., 0].any() for one in taken if one.region == 0)
    assert all(one.pixels[..., 2].any() and not one.pixels[..., 0].any() for one in taken if one.region == 1)
    assert answer["regions"] == [0, 1] * 40
    assert Account.of(answer["account"]).received == answer["captured"] == 80
    assert answer["frame"] == (WIDTH, HEIGHT)
    assert answer["ended"]


@pytest.mark.parametrize("options", [{}, {"every": 3}, {"fps": 11.0}, {"motion": "20%"}, {"motion": "20%", "every": 2}])
@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_regions_go_on_where_they_were_also_between_two_of_one_frame(clip, options, most):
    feed = make_feed("video", clip, size=16, regions=TWO, **options)
    whole, everything = read(feed)
    found, place, account = [], [], Account()
    for _ in range(100):
        answer, taken = read(feed, most, place)
        found += told(taken)
        account.add(Account.of(answer["account"]))
        place = answer["place"]
        if answer["ended"]:
            break
    assert found == told(everything)
    assert account == Account.of(whole["account"])
    assert account.received == 80


def moving(n=90):
    """Nothing, then something that crosses the left half in 20 frames, then nothing."""
    pictures = []
    for number in range(n):
        pixels = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
        if 40 <= number < 60:
            x = 2 * (number - 40)
            pixels[20:40, x : x + 16] = (250, 250, 0)
        pictures.append(pixels + np.random.default_rng(number).integers(0, 6, pixels.shape, np.uint8))
    return pictures


def test_frames_without_motion_are_passed_over_region_by_region(tmp_path):
    source = write_clip(tmp_path / "clip.mkv", moving())
    answer, taken = read(make_feed("video", source, size=32, regions=TWO, motion="on"))
    account = Account.of(answer["account"])
    left = [one for one in taken if one.region == 0]
    assert [one.place.n_frames for one in taken if one.region == 1] == [1]  # the first, as a beginning
    numbers = [one.place.n_frames + (one.place.n_regions > 0) for one in left]
    assert numbers == [1, *range(41, 62)]  # and when it is gone
    assert dict(account.passed) == {"no motion": 180 - len(taken)}
    assert account.received == 180
    assert {one.track for one in left[:1]} != {one.track for one in left[1:]}  # a second lies between
    assert len({one.track for one in left[1:]}) == 1
    without = read(make_feed("video", source, size=32))[1]
    assert len(without) == 90
    assert {one.track for one in without} == {""}


def test_frames_outside_the_hours_are_passed_over(tmp_path):
    for hour in range(24):
        file = tmp_path / f"{hour}.png"
        Image.fromarray(picture(hour)).save(file)
        when = time.mktime((2026, 11, 3, hour, 30, 0, 0, 0, -1))
        os.utime(file, (when, when))
    capture = CaptureThread(make_feed("watch", str(tmp_path), size=16, between="20:00-06:00", regions=TWO))
    taken, account = [], Account()
    while account.received < 48:
        answer, some = capture.fetch(100, 60)
        taken += some
        account.add(Account.of(answer["account"]))
        if len(taken) == 20:  # the account of the frames after it comes with the next one that is in time
            break
    numbers = [number for region, number in told(taken) if region == 0]
    assert numbers == [0, 1, 2, 3, 4, 5, 20, 21, 22, 23]
    assert dict(account.passed) == {"between": 28}


def test_only_every_nth_frame_has_a_thumbnail(clip):
    feed = make_feed("video", clip, size=16, regions="all:0,0,100%,100%;left:0,0,50%,100%")
    answer, taken = read(replace(feed, thumbnail_every=4))
    assert answer["thumbnails"] == [len(one.thumbnail) for one in taken]
    for region, width in ((0, WIDTH), (1, WIDTH // 2)):
        own = [one for one in taken if one.region == region]
        assert [bool(one.thumbnail) for one in own] == [i % 4 == 0 for i in range(40)]
        assert Image.open(io.BytesIO(own[8].thumbnail)).size == (width, HEIGHT)
        middle = np.asarray(Image.open(io.BytesIO(own[8].thumbnail)))[HEIGHT // 2, WIDTH // 4].astype(int)
        assert np.abs(middle - (68, 0, 0)).max() <= 3  # of the same frame
    assert not any(one.thumbnail for one in read(feed)[1])


def test_a_picture_that_was_decoded_at_a_fraction_is_decoded_again_for_its_thumbnail(tmp_path):
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8))
    small.resize((1600, 1200), Image.Resampling.BICUBIC).save(tmp_path / "a.jpg")
    feed = replace(make_feed("watch", str(tmp_path), size=8), thumbnail_every=1)
    _, (one,) = CaptureThread(feed).fetch(1, 60)
    assert Image.open(io.BytesIO(one.thumbnail)).size == (256, 192)


def test_the_crop_does_not_fit_the_first_frame(tmp_path):
    Image.fromarray(picture(1)).save(tmp_path / "a.png")
    answer, taken = CaptureThread(make_feed("watch", str(tmp_path), size=16, crop="0,0,129,10")).fetch(1, 60)
    assert answer["error"] == (
        "crop is '0,0,129,10', which reaches to 129,10, and the frames are 128x64: use a part of them"
    )
    assert answer["ended"]
    assert not taken


def test_a_later_frame_that_the_crop_does_not_fit_is_rejected(tmp_path):
    for number, side in enumerate((40, 20, 40)):
        Image.fromarray(np.full((side, side, 3), 60 + number, np.uint8)).save(tmp_path / f"{number}.png")
        os.utime(tmp_path / f"{number}.png", (number, number))
    capture, taken, account = CaptureThread(make_feed("watch", str(tmp_path), size=8, crop="0,0,30,30")), [], Account()
    while len(taken) < 2:
        answer, some = capture.fetch(5, 60)
        taken += some
        account.add(Account.of(answer["account"]))
    assert told(taken) == [(0, 0), (0, 2)]
    assert dict(account.rejected) == {"smaller than crop": 1}


def test_pixels_do_not_depend_on_regions_or_thumbnails(clip):
    alone = read(make_feed("video", clip, size=16, crop="0,0,50%,100%"))[1]
    together = read(replace(make_feed("video", clip, size=16, regions=TWO), thumbnail_every=1))[1]
    for one, other in zip(alone, [one for one in together if one.region == 0], strict=True):
        assert np.array_equal(one.pixels, other.pixels)
    frame = Frame(Image.fromarray(picture(3)), (WIDTH, HEIGHT))
    assert np.array_equal(alone[3].pixels, Sight(crop="0,0,50%,100%").square(frame, 16))


def test_what_a_recording_does_not_have(clip):
    with pytest.raises(UserError, match=r"between=06:00-20:00 is for cameras, and .*clip\.mkv is a recording"):
        make_feed("video", clip, between="06:00-20:00")
    with pytest.raises(UserError, match="crop is '0,0,129,9', which reaches to 129,9, and the frames are 128x64"):
        make_feed("video", clip, regions="a:0,0,9,9;b:0,0,129,9")  # before a run is begun


def test_datasets_and_folders_have_no_motion(tmp_path):
    Image.fromarray(picture(1)).save(tmp_path / "a.png")
    for source in ("synthetic:", f"folder:{tmp_path}"):
        for option in ("motion=on", "between=06:00-20:00", "regions=a:0,0,9,9"):
            with pytest.raises(UserError, match="has no option"):
                open_source(f"{source}?{option}")
