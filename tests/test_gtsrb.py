import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from streamclr import UserError, open_stream
from streamclr.streams.datasets import registry as data
from streamclr.streams.datasets.gtsrb import GTSRB_CLASSES, TEST_ZIPS, TRAINING_ZIP
from streamclr.streams.datasets.images import every_fifth_track
from support.gtsrb import (
    N_CLASSES,
    N_FRAMES,
    N_TRACKS,
    colour,
    files,
    pack_tar,
    pack_zip,
    ppm,
    write_test,
    write_training,
)

SHARED = Path(os.environ.get("STREAMCLR_CLIPS", "../shared/data")) / "gtsrb-train.tar.xz"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The training part, unpacked; not to be changed."""
    return write_training(tmp_path_factory.mktemp("gtsrb"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def check_training_part(splits):
    """Every fifth track of each class, which is number 4, is the test set; frames in the order of their names."""
    for part, tracks in (("train", (0, 1, 2, 3, 5)), ("test", (4,))):
        images, labels, numbers = (getattr(splits, f"{part}_{what}") for what in ("images", "labels", "tracks"))
        frames = [(c, t, f) for c in range(N_CLASSES) for t in tracks for f in range(N_FRAMES)]
        assert labels.tolist() == [c for c, _, _ in frames]
        assert numbers.tolist() == [100_000 * c + t for c, t, _ in frames]
        assert images.shape == (len(frames), 3, 32, 32)
        assert [tuple(rgb) for rgb in images[:, :, 3, 7].tolist()] == [colour(*frame) for frame in frames]
    assert not set(splits.train_tracks) & set(splits.test_tracks)


@pytest.mark.parametrize("form", ["folder", "its parent", "zip", "tar.xz", "folder of the zip"])
def test_the_training_part_alone_whichever_way_it_came(form, made, tmp_path, cache):
    root = made.parent
    if form == "folder":
        place = made
    elif form == "its parent":
        place = root
    elif form == "tar.xz":
        place = pack_tar(tmp_path / "gtsrb-train.tar.xz", root, files(made))
    else:
        place = pack_zip(tmp_path / TRAINING_ZIP, root, files(made))
    said = data.get("gtsrb", tmp_path if form == "folder of the zip" else place)
    n = N_CLASSES * N_FRAMES
    assert f"{n * (N_TRACKS - 1)} training and {n} test images (officially 39,209 and 12,630)" in said
    check_training_part(data.load("gtsrb"))
    assert [path.name for path in cache.iterdir()] == ["gtsrb.safetensors"]


def check_official_test(splits):
    assert splits.test_labels.tolist() == [42, 41, 40, 39, 38, 37, 36]
    assert [tuple(rgb) for rgb in splits.test_images[:, :, 0, 0].tolist()] == [
        colour(label, 9, 0) for label in splits.test_labels
    ]
    assert len(splits.train_images) == N_CLASSES * N_TRACKS * N_FRAMES
    assert len(set(splits.test_tracks)) == 7
    assert not set(splits.train_tracks) & set(splits.test_tracks)


def test_the_official_test_part_as_a_folder(tmp_path):
    made = write_training(tmp_path)
    write_test(tmp_path)
    check_official_test(data.load("gtsrb", made))
    check_official_test(data.load("gtsrb", tmp_path))
    (tmp_path / "GT-final_test.csv").rename(made / "Final_Test" / "Images" / "GT-final_test.csv")
    check_official_test(data.load("gtsrb", made))
    (made / "Final_Test" / "Images" / "GT-final_test.csv").unlink()
    check_training_part(data.load("gtsrb", made))  # no labels of the test images


def test_the_official_zips_beside_each_other(made, tmp_path):
    write_test(tmp_path / "made")
    training = pack_zip(tmp_path / TRAINING_ZIP, made.parent, files(made))
    pack_zip(tmp_path / TEST_ZIPS[0], tmp_path / "made", files(tmp_path / "made" / "GTSRB"))
    check_training_part(data.load("gtsrb", training))  # no labels of the test images
    pack_zip(tmp_path / TEST_ZIPS[1], tmp_path / "made", [tmp_path / "made" / "GT-final_test.csv"])
    check_official_test(data.load("gtsrb", training))
    check_official_test(data.load("gtsrb", tmp_path))
    with pytest.raises(UserError, match=r"no files of GTSRB at .*: give the official archive or its folder"):
        data.load("gtsrb", tmp_path / TEST_ZIPS[1])


def test_files_larger_than_32_px_are_kept_at_64(tmp_path):
    made = write_training(tmp_path)
    (made / "Final_Training" / "Images" / "00003" / "00002_00000.ppm").write_bytes(ppm(33, (1, 2, 3)))
    splits = data.load("gtsrb", made)
    assert splits.train_images.shape[2:] == splits.test_images.shape[2:] == (64, 64)


@pytest.fixture
def cached(made):
    data.get("gtsrb", made)
    return data.load("gtsrb")


def test_the_stream_shows_whole_tracks_and_never_one_of_the_test(cached):
    stream = open_stream("gtsrb?seed=1")
    n = stream.epoch
    assert n == N_CLASSES * (N_TRACKS - 1) * N_FRAMES
    assert len(stream.classes) == len(set(GTSRB_CLASSES)) == N_CLASSES
    seen, tracks = stream.read(2 * n)[:, :, 0, 0].tolist(), stream.tracks(torch.arange(2 * n)).tolist()
    for first in range(0, 2 * n, n):
        assert tracks[first : first + n : 2] == tracks[first + 1 : first + n : 2]
        assert sorted(tracks[first : first + n]) == sorted(cached.train_tracks.tolist())
    assert seen == [list(colour(t // 100_000, t % 100_000, i % 2)) for i, t in enumerate(tracks)]
    assert not set(tracks) & set(stream.test.tracks.tolist())
    assert stream.labels(torch.arange(n)).tolist() == [track // 100_000 for track in tracks[:n]]


def test_other_orders_and_sizes(cached):
    iid = open_stream("gtsrb?order=iid")
    tracks = iid.tracks(torch.arange(iid.epoch))
    assert (tracks[1:] == tracks[:-1]).float().mean() < 0.05
    labels = open_stream("gtsrb?stc=10").labels(torch.arange(200)).reshape(-1, 10)
    assert (labels == labels[:, :1]).all()
    with pytest.raises(UserError, match="order=tracks and stc=5"):
        open_stream("gtsrb?order=tracks&stc=5")
    with pytest.raises(UserError, match="order=iid and stc=5"):
        open_stream("gtsrb?order=iid", stc=5)
    stream = open_stream("gtsrb?size=48")
    assert stream.size == 48
    assert stream.test.images(np.arange(2)).shape == (2, 3, 48, 48)


@pytest.mark.system
def test_what_is_trained_on_and_what_is_tested_share_no_track(cached, model):
    from streamclr.runs.evaluation import evaluate, extract, labelled

    train, test = labelled(open_stream("gtsrb"))
    known, tested = extract(model, train), extract(model, test)
    assert not set(train.tracks[known.numbers]) & set(test.tracks[tested.numbers])
    results, _ = evaluate(model, train, test, (0.2,))
    assert results["n_test"] == len(test)


@pytest.fixture
def own(made, tmp_path):
    """A copy to be damaged."""
    shutil.copytree(made, tmp_path / "own" / "GTSRB")
    return tmp_path / "own" / "GTSRB" / "Final_Training" / "Images"


def without_csv(images):
    (images / "00007" / "GT-00007.csv").unlink()


def without_class(images):
    shutil.rmtree(images / "00042")


def without_frame(images):
    (images / "00007" / "00001_00001.ppm").unlink()


def with_another_frame(images):
    shutil.copy(images / "00007" / "00001_00001.ppm", images / "00007" / "00001_00009.ppm")


def with_another_name(images):
    (images / "00007" / "00001_00001.ppm").rename(images / "00007" / "sign-1.ppm")
    listing = images / "00007" / "GT-00007.csv"
    listing.write_text(listing.read_text().replace("00001_00001.ppm", "sign-1.ppm"))


def with_another_class(images):
    listing = images / "00007" / "GT-00007.csv"
    listing.write_text(listing.read_text().replace("00001_00001.ppm;8;8;1;1;7;7;7", "00001_00001.ppm;8;8;1;1;7;7;8"))


def with_commas(images):
    listing = images / "00007" / "GT-00007.csv"
    listing.write_text(listing.read_text().replace(";", ","))


def with_words(images):
    (images / "00007" / "GT-00007.csv").write_text("Filename;ClassId\n00001_00001.ppm;stop\n")


def with_short_lines(images):
    (images / "00007" / "GT-00007.csv").write_text("Filename;ClassId\n00001_00001.ppm\n")


def with_bytes(images):
    (images / "00007" / "GT-00007.csv").write_bytes(bytes(range(256)))


def with_cut_frame(images):
    (images / "00007" / "00001_00001.ppm").write_bytes(ppm(8, (1, 2, 3))[:50])


def without_frames(images):
    for path in (images / "00007").glob("*.ppm"):
        path.unlink()
    (images / "00007" / "GT-00007.csv").write_text("Filename;ClassId\n")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (without_csv, r"no file .*GT-00007\.csv"),
        (without_class, r"no file .*GT-00042\.csv"),
        (without_frame, r"00007/00001_00001\.ppm is missing"),
        (with_another_frame, r"00007/00001_00009\.ppm is not in GT-00007\.csv"),
        (with_another_name, r"00007/sign-1\.ppm is not named TTTTT_FFFFF\.ppm"),
        (with_another_class, r"00001_00001\.ppm is listed as of class 8, not 7"),
        (with_commas, r"GT-00007\.csv is not a list with Filename and ClassId"),
        (with_words, r"GT-00007\.csv is not a list with Filename and ClassId"),
        (with_short_lines, r"GT-00007\.csv is not a list with Filename and ClassId"),
        (with_bytes, r"GT-00007\.csv is not a list with Filename and ClassId"),
        (with_cut_frame, r"00007/00001_00001\.ppm cannot be used, truncated"),
        (without_frames, r"GT-00007\.csv lists no image"),
    ],
)
def test_files_that_are_not_the_dataset(harm, told, own, tmp_path):
    harm(own)
    with pytest.raises(UserError, match=told) as error:
        data.load("gtsrb", own.parents[1])
    assert "\n" not in str(error.value)
    packed = pack_zip(tmp_path / "packed.zip", own.parents[2], files(own))
    with pytest.raises(UserError, match=rf"packed\.zip is not whole, or another archive \(.*{told}") as error:
        data.load("gtsrb", packed)
    assert "/streamclr-" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_class_of_the_test_part_that_does_not_exist(tmp_path):
    made = write_training(tmp_path)
    write_test(tmp_path)
    listing = tmp_path / "GT-final_test.csv"
    listing.write_text(listing.read_text().replace(";42\n", ";43\n"))
    with pytest.raises(UserError, match=r"has a class outside 0 to 42 for 00000\.ppm"):
        data.load("gtsrb", made)


def leaving_zip(file, name):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, "x")


def leaving_tar(file, name):
    with tarfile.open(file, "w") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))


@pytest.mark.parametrize("write", [leaving_zip, leaving_tar])
@pytest.mark.parametrize("name", ["../out.ppm", "GTSRB/../../out.ppm"])
def test_archives_with_paths_that_leave_their_folder(write, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    write(tmp_path / "packed", name)
    with pytest.raises(UserError, match=r"packed is not a whole archive \(.*out\.ppm.* is? ?outside") as error:
        data.load("gtsrb", tmp_path / "packed")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("out.ppm"))


def cut(content):
    return content[: len(content) // 2]


def changed(content):
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 255 for byte in content[middle : middle + 500]) + content[middle + 500 :]


def locked(content):
    """With the bit of the first entry that says that it has a password."""
    first = content.index(b"PK\x01\x02") + 8
    return content[:first] + bytes([content[first] | 1]) + content[first + 1 :]


@pytest.mark.parametrize(
    ("form", "harm"), [("zip", cut), ("zip", changed), ("zip", locked), ("tar.xz", cut), ("tar.xz", changed)]
)
def test_damaged_archives(form, harm, made, tmp_path):
    pack = pack_zip if form == "zip" else pack_tar
    file = pack(tmp_path / f"packed.{form}", made.parent, files(made))
    file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(UserError, match=rf"packed\.{form} is not a whole archive") as error:
        data.load("gtsrb", file)
    assert "\n" not in str(error.value)


@pytest.mark.system
def test_the_real_thing(monkeypatch):
    if not SHARED.is_file():
        pytest.skip(f"no {SHARED}")
    assert "31,920 training and 7,289 test images" in data.get("gtsrb", SHARED)
    splits = data.load("gtsrb")
    assert splits.train_images.shape[1:] == (3, 32, 32)
    labels = np.concatenate([splits.train_labels, splits.test_labels])
    tracks = np.concatenate([splits.train_tracks, splits.test_tracks])
    assert len(np.unique(tracks)) == 1307
    assert np.bincount(labels)[[0, 1, 2, 42]].tolist() == [210, 2220, 2250, 240]
    assert set(splits.test_labels) == set(range(43))
    assert not set(splits.train_tracks) & set(splits.test_tracks)
    order = np.argsort(tracks, kind="stable")
    assert set(tracks[order][every_fifth_track(labels[order], tracks[order])]) == set(splits.test_tracks)
    stream = open_stream("gtsrb?size=64")
    assert stream.tracks(torch.arange(90)).unique(return_counts=True)[1].tolist() == [30, 30, 30]
    images = stream.read(90).float().reshape(3, 30, -1)
    inside = (images[:, 1:] - images[:, :-1]).abs().mean()
    assert inside < 0.5 * (images[1:, 0] - images[:-1, 0]).abs().mean()  # consecutive frames of one sign are alike
