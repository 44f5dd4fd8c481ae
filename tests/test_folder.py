import numpy as np
import pytest
import torch
from PIL import Image

from streamclr import UserError, open_stream


def paint(path, value, size=(16, 16), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).convert(mode).save(path)


def values(images):
    return images[:, 0, 8, 8].tolist()


def test_flat_folder_in_natural_order_once(tmp_path):
    for i in (10, 9, 1, 100, 2):
        paint(tmp_path / f"frame{i}.png", i)
    (tmp_path / "notes.txt").write_text("not an image")
    stream = open_stream(f"folder:{tmp_path}")
    segments = list(stream.segments(2))
    assert [len(s) for s in segments] == [2, 2, 1]
    assert values(torch.cat(segments)) == [1, 2, 9, 10, 100]
    assert stream.source.classes == ()
    assert stream.source.test is None


def class_folder(root, n=10, classes=("ant", "bee", "cat")):
    for c, name in enumerate(classes):
        for i in range(n):
            paint(root / name / f"{i}.png", 50 * c + i)
    return root


def test_one_folder_per_class(tmp_path):
    stream = open_stream(f"folder:{class_folder(tmp_path)}")
    source = stream.source
    assert source.classes == ("ant", "bee", "cat")
    assert values(torch.cat(list(stream.segments(7)))) == [50 * c + i for c in range(3) for i in range(10)]
    assert source.labels(torch.arange(30)).tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert (len(source.train), len(source.test)) == (24, 6)
    train, test = (values(s.images(torch.arange(len(s)))) for s in (source.train, source.test))
    assert test == [50 * c + i for c in range(3) for i in (4, 9)]
    assert not set(train) & set(test)


def test_stc_makes_an_endless_stream(tmp_path):
    stream = open_stream(f"folder:{class_folder(tmp_path)}?stc=5&seed=1")
    seen = values(stream.read(60))
    assert sorted(seen[:30]) == sorted(seen[30:]) == sorted(50 * c + i for c in range(3) for i in range(10))
    assert [len({v // 50 for v in seen[i : i + 5]}) for i in range(0, 60, 5)] == [1] * 12
    assert len(list(open_stream(f"folder:{tmp_path}?stc=5&passes=2").segments(30))) == 2


def test_train_and_val(tmp_path):
    class_folder(tmp_path / "train", 6)
    class_folder(tmp_path / "val", 2)
    source = open_stream(f"folder:{tmp_path}").source
    assert (source.n_images, len(source.train), len(source.test)) == (18, 18, 6)


def test_images_are_scaled_and_cut_to_a_square(tmp_path):
    image = np.zeros((20, 40, 3), np.uint8)
    image[:, 10:30] = 200  # the middle square
    Image.fromarray(image).save(tmp_path / "a.png")
    assert (open_stream(f"folder:{tmp_path}").read(1) == 200).all()
    assert open_stream(f"folder:{tmp_path}?size=10").read(1).shape == (1, 3, 10, 10)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_modes_become_rgb(tmp_path, mode):
    suffix = "tif" if mode == "CMYK" else "png"
    paint(tmp_path / f"a.{suffix}", 255, mode=mode)
    assert (open_stream(f"folder:{tmp_path}").read(1) > 250).all()


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a junk", None])
def test_a_damaged_image_is_named(tmp_path, content):
    paint(tmp_path / "a.png", 1)
    paint(tmp_path / "b.png", 2, size=(64, 64))
    whole = (tmp_path / "b.png").read_bytes()
    damaged = whole[: len(whole) // 2] if content is None else content
    (tmp_path / "b.png").write_bytes(damaged)
    with pytest.raises(UserError, match=r"b\.png"):
        list(open_stream(f"folder:{tmp_path}").segments(2))
    (tmp_path / "a.png").write_bytes(damaged)  # the first image, whose size is asked for
    with pytest.raises(UserError, match=r"a\.png"):
        list(open_stream(f"folder:{tmp_path}").segments(2))


def test_an_image_too_large_to_decode_is_named(tmp_path, monkeypatch):
    paint(tmp_path / "a.png", 1, size=(64, 64))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UserError, match=r"a\.png"):
        open_stream(f"folder:{tmp_path}")


def test_empty_folders(tmp_path):
    with pytest.raises(UserError, match="no images"):
        open_stream(f"folder:{tmp_path}")
    class_folder(tmp_path / "train", 6)
    (tmp_path / "val" / "ant").mkdir(parents=True)
    with pytest.raises(UserError, match="no images"):
        open_stream(f"folder:{tmp_path}")
    paint(tmp_path / "flat" / "a.png", 1)
    with pytest.raises(UserError, match="needs classes"):
        open_stream(f"folder:{tmp_path / 'flat'}?stc=5")


def test_imagenet(tmp_path):
    for split, n in (("train", 4), ("val", 2)):
        class_folder(tmp_path / split, n, ("n03", "n01", "n02"))
    source = open_stream(f"imagenet:{tmp_path}?classes=2&size=16&stc=2").source
    assert source.classes == ("n01", "n02")
    assert (source.epoch, len(source.test)) == (8, 4)
    listed = tmp_path / "list.txt"
    listed.write_text("n03\tthree, a long name\n\nn01\tone\n")
    stream = open_stream(f"imagenet:{tmp_path}", classes=str(listed), size=16)
    assert stream.source.classes == ("n03", "n01")
    assert stream.source.stc == 100
    assert stream.read(3).shape == (3, 3, 16, 16)


@pytest.mark.parametrize(("classes", "told"), [("4", "has 3"), ("0", "has 3"), ("nowhere.txt", "neither a number nor")])
def test_imagenet_bad_classes(tmp_path, classes, told):
    for split in ("train", "val"):
        class_folder(tmp_path / split, 1)
    with pytest.raises(UserError, match=told):
        open_stream(f"imagenet:{tmp_path}?classes={classes}")
    (tmp_path / "list.txt").write_text("n99\n")
    with pytest.raises(UserError, match="n99"):
        open_stream(f"imagenet:{tmp_path}", classes=str(tmp_path / "list.txt"))


def test_imagenet_classes_as_a_number_and_listed_once(tmp_path):
    for split in ("train", "val"):
        class_folder(tmp_path / split, 2)
        (tmp_path / split / ".cache").mkdir()
    assert open_stream(f"imagenet:{tmp_path}", classes=2, size=16).source.classes == ("ant", "bee")
    listed = tmp_path / "list.txt"
    listed.write_text("ant\nbee\nant\n")
    with pytest.raises(UserError, match="'ant' twice"):
        open_stream(f"imagenet:{tmp_path}", classes=listed)
    listed.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"list\.txt lists"):
        open_stream(f"imagenet:{tmp_path}", classes=listed)


def test_sixteen_bits_are_scaled(tmp_path):
    Image.fromarray(np.full((16, 16), 40_000, np.uint16)).save(tmp_path / "a.png")
    assert (open_stream(f"folder:{tmp_path}").read(1) == 40_000 >> 8).all()


def test_natural_order_has_no_ties(tmp_path):
    for i, name in enumerate(["01", "1", "1a", "²1"]):
        paint(tmp_path / f"{name}.png", i)
    assert values(open_stream(f"folder:{tmp_path}").read(4)) == [0, 1, 2, 3]


def test_imagenet_needs_train_and_val(tmp_path):
    with pytest.raises(UserError, match="no folder train"):
        open_stream(f"imagenet:{tmp_path}")
