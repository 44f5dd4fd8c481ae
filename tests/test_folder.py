import numpy as np
import pytest
import torch
from PIL import Image

from streamclr import UserError, open_stream, resnet18
from streamclr.runs.evaluation import evaluate, extract, train_supervised


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
    assert source.labels(np.arange(30)).tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert (len(source.train), len(source.test)) == (24, 6)
    train, test = (values(s.images(np.arange(len(s)))) for s in (source.train, source.test))
    assert test == [50 * c + i for c in range(3) for i in (4, 9)]
    assert not set(train) & set(test)


def track_folder(root, classes=("ant", "bee"), n_tracks=6, n_frames=3):
    """class/track/frame.png; the colour tells all three."""
    for c, name in enumerate(classes):
        for track in range(n_tracks):
            for frame in range(n_frames):
                paint(root / name / f"track{track}" / f"{frame}.png", 100 * c + 10 * track + frame)
    return root


def check_split(source, held_back=(4,)):
    """Every fifth track of each class is tested, as a whole."""
    sides = [values(part.images(np.arange(len(part)))) for part in (source.train, source.test)]
    assert {value // 10 % 10 for value in sides[1]} == set(held_back)
    assert not {value // 10 for value in sides[0]} & {value // 10 for value in sides[1]}
    assert not set(source.train.tracks) & set(source.test.tracks)
    assert len(sides[0]) + len(sides[1]) == source.epoch


def test_folders_below_a_class_are_tracks(tmp_path):
    stream = open_stream(f"folder:{track_folder(tmp_path)}")
    assert (stream.classes, stream.n_images) == (("ant", "bee"), 36)
    assert values(stream.read(36)) == [100 * c + 10 * t + f for c in range(2) for t in range(6) for f in range(3)]
    assert stream.tracks(torch.arange(36)).tolist() == [number for number in range(12) for _ in range(3)]
    check_split(stream.source)
    with pytest.raises(UserError, match="no images in"):
        open_stream(f"folder:{tmp_path}?tracks=none")


def test_order_tracks(tmp_path):
    stream = open_stream(f"folder:{track_folder(tmp_path)}?order=tracks&seed=1")
    seen = values(stream.read(72))
    assert stream.n_images is None
    assert [value % 10 for value in seen] == [0, 1, 2] * 24
    assert [value // 10 for value in seen[::3]] == [value // 10 for value in seen[2::3]]
    assert sorted(seen[:36]) == sorted(seen[36:])
    assert seen[:36] != seen[36:] != sorted(seen[36:])
    assert open_stream(f"folder:{tmp_path}?order=tracks&passes=2").n_images == 72
    with pytest.raises(UserError, match="order=tracks and stc=3 are two orders"):
        open_stream(f"folder:{tmp_path}?order=tracks&stc=3")


def test_file_names_may_tell_the_track(tmp_path):
    for c, name in enumerate(("ant", "bee")):
        for track in range(6):
            for frame in (0, 1, 10):
                paint(tmp_path / name / f"a_{track}_{frame}.png", 100 * c + 10 * track + frame % 9)
    assert open_stream(f"folder:{tmp_path}").tracks(torch.arange(3)) is None
    stream = open_stream(f"folder:{tmp_path}?tracks=name")
    assert stream.tracks(torch.arange(36)).tolist() == [number for number in range(12) for _ in range(3)]
    check_split(stream.source)
    pattern = open_stream(f"{tmp_path}/ant/*.png?tracks=name&order=tracks")
    assert len({*pattern.tracks(torch.arange(3)).tolist()}) == 1
    assert pattern.n_images == 18
    (tmp_path / "ant" / "a_0_10.png").rename(tmp_path / "ant" / "alone.png")
    tracks = open_stream(f"folder:{tmp_path}/ant?tracks=name").source.streamed.tracks
    assert np.bincount(tracks).tolist() == [2, 3, 3, 3, 3, 3, 1]


def test_folders_without_classes_may_be_tracks(tmp_path):
    class_folder(tmp_path, 3)
    stream = open_stream(f"folder:{tmp_path}?tracks=folder")
    assert (stream.classes, stream.train, stream.test) == ((), None, None)
    assert stream.tracks(torch.arange(9)).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert values(stream.read(9)) == [50 * c + i for c in range(3) for i in range(3)]
    pattern = open_stream(f"{tmp_path}/*/*.png?tracks=folder")
    assert np.bincount(pattern.source.streamed.tracks).tolist() == [3, 3, 3]


def test_frames_beside_folders_of_tracks_are_tracks_of_their_own(tmp_path):
    track_folder(tmp_path, n_tracks=2)
    for i in (7, 8):
        paint(tmp_path / "ant" / f"{i}.png", i)
    assert open_stream(f"folder:{tmp_path}").source.epoch == 2  # as before: one level, the other is ignored
    stream = open_stream(f"folder:{tmp_path}?tracks=folder")
    assert stream.classes == ("ant", "bee")
    assert np.bincount(stream.source.streamed.tracks).tolist() == [1, 1, 3, 3, 3, 3]
    for i in (7, 8):
        paint(tmp_path / "bee" / f"{i}.png", i)
    assert open_stream(f"folder:{tmp_path}?tracks=folder").classes == ("ant", "bee")


def test_tracks_in_train_and_val(tmp_path):
    track_folder(tmp_path / "train")
    track_folder(tmp_path / "val", n_tracks=2)
    source = open_stream(f"folder:{tmp_path}").source
    assert (len(source.train), len(source.test)) == (36, 12)
    assert not set(source.train.tracks) & set(source.test.tracks)


def test_a_train_folder_alone_is_no_class_of_tracks(tmp_path):
    class_folder(tmp_path / "train", 2)
    with pytest.raises(UserError, match="has only train: it needs train and val"):
        open_stream(f"folder:{tmp_path}")


def test_wrong_tracks(tmp_path):
    paint(tmp_path / "a.png", 1)
    with pytest.raises(UserError, match=r"tracks is 'names': did you mean 'name'\? use folder, name, none"):
        open_stream(f"folder:{tmp_path}?tracks=names")
    with pytest.raises(UserError, match=r"tracks=folder, and .* has no folder with images"):
        open_stream(f"folder:{tmp_path}?tracks=folder")
    with pytest.raises(UserError, match="order=tracks, and these images have no tracks"):
        open_stream(f"folder:{tmp_path}?order=tracks")


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
    assert (open_stream(f"folder:{tmp_path}?fit=crop").read(1) == 200).all()
    assert open_stream(f"folder:{tmp_path}?size=10").read(1).shape == (1, 3, 10, 10)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_modes_become_rgb(tmp_path, mode):
    suffix = "tif" if mode == "CMYK" else "png"
    paint(tmp_path / f"a.{suffix}", 255, mode=mode)
    assert (open_stream(f"folder:{tmp_path}").read(1) > 250).all()


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a junk", None])
def test_damaged_images_are_passed_over(tmp_path, content):
    for name, value in zip("abcdef", range(6), strict=True):
        paint(tmp_path / f"{name}.png", value)
    whole = (tmp_path / "b.png").read_bytes()
    damaged = whole[: len(whole) // 2] if content is None else content
    for name in "ad":  # the first image, whose size is asked for, and one inside
        (tmp_path / f"{name}.png").write_bytes(damaged)
    stream = open_stream(f"folder:{tmp_path}")
    assert [values(segment) for segment in stream.segments(3)] == [[1, 2, 4], [5]]
    assert stream.position == 6
    assert stream.account.is_balanced
    assert (stream.account.learned, stream.account.rejected.total()) == (4, 2)
    events = stream.take_events()
    assert [event.split(" cannot be used, ")[0] for _, event in events] == [
        f"the image {tmp_path}/{n}.png" for n in "ad"
    ]
    assert {source for source, _ in events} == {"rejected"}
    assert not stream.take_events()
    for name in "bcef":
        (tmp_path / f"{name}.png").write_bytes(damaged)
    with pytest.raises(UserError, match=r"not one image of a whole pass can be read; the image .*\.png"):
        list(open_stream(f"folder:{tmp_path}?size=16").segments(2))


def test_a_folder_of_files_that_are_no_images_is_an_error(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(b"text")
    with pytest.raises(UserError, match=r"none of 3 images can be read; the image .*a\.png"):
        open_stream(f"folder:{tmp_path}")


def test_an_endless_stream_of_bad_files_ends(tmp_path):
    class_folder(tmp_path)
    stream = open_stream(f"folder:{tmp_path}?stc=5")
    assert len(stream.read(7)) == 7
    for path in tmp_path.glob("*/*.png"):
        path.unlink()
    with pytest.raises(UserError, match="not one image of a whole pass"):
        stream.read(7)


def test_labels_by_arrival_when_images_were_passed_over(tmp_path):
    class_folder(tmp_path)
    bad = ("ant/0", "ant/3", "ant/9", "bee/0", "bee/1", "cat/9")
    for name in bad:
        (tmp_path / f"{name}.png").write_bytes(b"")
    stream = open_stream(f"folder:{tmp_path}?stc=4&seed=2")
    next(stream.segments(11))
    resumed = open_stream(f"folder:{tmp_path}?stc=4&seed=2")
    resumed.load_state_dict(stream.state_dict())
    first, rest = open_stream(f"folder:{tmp_path}?stc=4&seed=2").read(11), resumed.read(49)
    seen = [value // 50 for value in values(torch.cat([first, rest]))]  # the class, by its colour
    assert resumed.labels(torch.arange(60)).tolist() == seen
    named = open_stream(f"folder:{tmp_path}?stc=4&seed=2&tracks=name")  # each file is a track
    named.load_state_dict(resumed.state_dict())
    names = [named.source.streamed.paths[track] for track in named.tracks(torch.arange(60))]
    assert [50 * seen[i] + int(path.stem) for i, path in enumerate(names)] == values(torch.cat([first, rest]))
    assert resumed.account.rejected == {"empty": resumed.position - 60}
    assert resumed.account.is_balanced


def test_a_bad_file_is_left_out_of_stage_two(tmp_path, model, capsys):
    class_folder(tmp_path)
    (tmp_path / "bee" / "2.png").write_bytes(b"")
    (tmp_path / "bee" / "4.png").write_bytes(b"")
    source = open_stream(f"folder:{tmp_path}").source
    for _ in range(2):
        features, labels, numbers, _ = extract(model, source.train)
    assert len(features) == len(numbers) == 23
    assert labels.bincount().tolist() == [8, 7, 8]
    said = capsys.readouterr().err
    assert said.count("left out: 1 of 24 labelled images") == 1
    assert "bee/2.png" in said
    results, _ = evaluate(model, source.train, source.test, (1.0,), classifier="linear")
    assert (results["n_test"], results["labels"]["1.0"]["n_labels"]) == (5, 23)
    train_supervised(lambda: resnet18(width=2), source.train, torch.arange(24), epochs=1)
    with pytest.raises(UserError, match="1 of 1 labelled images"):
        extract(model, source.test, torch.tensor([2]))


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
    listed.write_text("n03\tthree, a long name\n\nn01\tone\n", "utf-8-sig")  # as some editors begin a file
    stream = open_stream(f"imagenet:{tmp_path}", classes=str(listed), size=16)
    assert stream.source.classes == ("n03", "n01")
    assert stream.source.stc == 100
    assert stream.read(3).shape == (3, 3, 16, 16)


@pytest.mark.parametrize(
    ("classes", "told"), [("4", "has 3"), ("0", "has 3"), ("nowhere.txt", "neither a number"), ("9" * 5000, "neither")]
)
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
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    with pytest.raises(UserError, match="train has no folder"):
        open_stream(f"imagenet:{tmp_path}?classes=2")
