from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image

from streamclr import UserError
from streamclr.streams.cameras.feed import Feed
from streamclr.streams.spec import SOURCES, absolute_source, open_source, split_source, takes


def test_images_by_number_and_labels_are_arrays():
    source = open_source("synthetic:?size=16&stc=5", seed=3)
    images, labels = source.images(np.arange(7)), source.labels(np.arange(7))
    assert (images.dtype, images.shape) == (np.uint8, (7, 3, 16, 16))
    assert (labels.dtype, labels.shape) == (np.int64, (7,))
    assert labels[0] == labels[4] != labels[5]
    assert (source.train.labels.dtype, source.train.images(np.array([2])).shape) == (np.int64, (1, 3, 16, 16))


def test_cameras_and_recordings_are_feeds(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "all.txt").write_text(f"# mine\nwatch:{tmp_path / 'in'}?every=2\nhttp://127.0.0.1:1/x#fps=5\n")
    feeds = open_source(tmp_path / "all.txt", size=48)
    assert all(isinstance(feed, Feed) for feed in feeds)
    assert [(feed.kind, feed.every, feed.fps, feed.size) for feed in feeds] == [
        ("watch", 2, None, 48),
        ("http", 1, 5, 48),
    ]
    (tmp_path / "all.txt").write_text("synthetic:\n")
    with pytest.raises(UserError, match="a list may only have cameras and recordings"):
        open_source(tmp_path / "all.txt")


def test_what_a_source_takes():
    assert all(takes(f"{name}:", "size") for name in SOURCES)
    assert takes("synthetic:", "seed")
    assert not takes("http://camera/1", "seed")


def test_a_source_is_found_by_what_it_is(tmp_path):
    assert split_source(tmp_path) == ("folder", str(tmp_path), {})
    assert split_source("-") == ("stdin", "", {})
    assert split_source("0") == ("camera", "/dev/video0", {})
    assert split_source("rtsp://camera/1?a=b#size=9") == ("rtsp", "rtsp://camera/1?a=b", {"size": "9"})


def test_one_image_is_a_source(tmp_path):
    for name in ("one.jpg", "TWO.PNG"):
        Image.fromarray(np.full((20, 30, 3), 7, np.uint8)).save(tmp_path / name)
        source = open_source(f"{tmp_path / name}?size=8")
        assert (source.n_images, source.images(np.arange(1)).shape) == (1, (1, 3, 8, 8))
        assert source.file(0) == str(tmp_path / name)
    assert absolute_source(str(tmp_path / "one.jpg")) == f"folder:{tmp_path}/one.jpg?fit=stretch"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("dgo.mp4", "no file dgo.mp4: did you mean dog.mp4?"),
        ("DOG.MP4", "no file DOG.MP4: did you mean dog.mp4?"),
        ("dog.mkv", "no file dog.mkv: did you mean dog.mp4?"),
        ("video:dgo.mp4", "no file dgo.mp4: did you mean dog.mp4?"),
        ("sings/dog.mp4", "no file sings/dog.mp4: there is no directory sings"),
        ("signs/stp.png", "no file signs/stp.png: did you mean signs/stop.png?"),
        ("one.jpg", "no file one.jpg: give one that exists"),
        ("cameras.txt", "no file cameras.txt: give one that exists"),
        ("folder:sings", "no directory 'sings': did you mean signs?"),
        ("watch:sings", "no directory 'sings': did you mean signs?"),
        ("sings", "it is not a file, a directory, a camera (0, rtsp://…) or a dataset; did you mean signs?"),
        ("cifar01", "did you mean 'cifar10'? use synthetic, "),
        ("signs/*.jpg", "no file matches 'signs/*.jpg': look into signs, it has 2 .png, 1 .csv"),
        ("sings/*.jpg", "no file matches 'sings/*.jpg': look into sings"),
        (
            "signs/labels.csv",
            "signs/labels.csv is no file that can be read as images: give a directory, a video (.avi, ",
        ),
    ],
)
def test_what_is_not_there_is_said_with_what_was_meant(source, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "signs").mkdir()
    for name in ("dog.mp4", "signs/stop.png", "signs/go.png", "signs/labels.csv"):
        (tmp_path / name).touch()
    with pytest.raises(UserError) as error:
        open_source(source)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_absolute_source(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_source("folder:a b?stc=5&size=16") == f"folder:{tmp_path}/a b?stc=5&size=16&fit=stretch"
    (tmp_path / "list.txt").touch()
    assert (
        absolute_source("imagenet:a b?classes=list.txt")
        == f"imagenet:{tmp_path}/a b?{urlencode({'classes': tmp_path / 'list.txt'})}"
    )
    assert absolute_source("imagenet:a b?classes=20") == f"imagenet:{tmp_path}/a b?classes=20"
    assert absolute_source("a b?fit=crop") == f"folder:{tmp_path}/a b?fit=crop"
    assert absolute_source("cifar10?stc=5") == "cifar10?stc=5"
    assert absolute_source("synthetic:") == "synthetic:"
