import numpy as np
import pytest
from scipy.io import savemat

from streamclr import UserError, open_stream
from streamclr.streams.datasets import registry as data
from support.svhn import write


@pytest.mark.parametrize("compressed", [True, False])
def test_official_files(tmp_path, compressed):
    made = write(tmp_path, compressed=compressed)
    splits = data.load("svhn", tmp_path)
    images, labels = made["train"]
    assert np.array_equal(splits.train_images, images.transpose(3, 2, 0, 1))
    assert splits.train_labels.tolist() == [label % 10 for label in labels.ravel()]  # 10 stands for the digit 0
    assert len(splits.test_images) == 9
    assert open_stream(f"svhn:{tmp_path}?stc=1").read(2).shape == (2, 3, 32, 32)


def test_damaged_or_wrong_files_are_named(tmp_path):
    write(tmp_path)
    file = tmp_path / "test_32x32.mat"
    whole = file.read_bytes()
    for content in (b"", b"no mat file", whole[: len(whole) // 2], whole[:200]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"test_32x32\.mat") as error:
            data.load("svhn", tmp_path)
        assert "\n" not in str(error.value)
    savemat(file, {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.zeros((3, 1), np.uint8)})
    with pytest.raises(UserError, match=r"test_32x32\.mat"):
        data.load("svhn", tmp_path)
    for labels in (np.full((4, 1), 77), np.full((4, 1), np.nan), np.array([["a"], ["b"], ["c"], ["d"]])):
        savemat(file, {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": labels})
        with pytest.raises(UserError, match=r"test_32x32\.mat"):
            data.load("svhn", tmp_path)
    savemat(file, {"X": np.zeros((32, 32, 3, 0), np.uint8), "y": np.zeros((0, 1), np.uint8)})
    with pytest.raises(UserError, match=r"test_32x32\.mat"):
        data.load("svhn", tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"no file .*test_32x32\.mat"):
        data.load("svhn", tmp_path)


def test_it_reads_what_scipy_reads(tmp_path):
    """Labels of any type, and other arrays beside."""
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 3), np.uint8)
    others = {"a": np.ones((2, 2)), "cells": np.array([["x"], ["y"]], object), "struct": {"X": 1}, "text": "abc"}
    write(tmp_path)
    for dtype in (np.uint8, np.int16, np.float32, float, np.int64):
        labels = np.array([[1], [10], [5]], dtype)
        for packed in (True, False):
            savemat(tmp_path / "train_32x32.mat", others | {"X": images, "y": labels}, do_compression=packed)
            splits = data.load("svhn", tmp_path)
            assert np.array_equal(splits.train_images, images.transpose(3, 2, 0, 1))
            assert splits.train_labels.tolist() == [1, 0, 5]


@pytest.mark.parametrize("compressed", [True, False])
def test_any_damage_is_one_line_or_plain_data(tmp_path, compressed):
    """scipy's reader ended the process on some of these."""
    write(tmp_path, n=4, compressed=compressed)
    file = tmp_path / "train_32x32.mat"
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    for i in range(1000):
        broken = bytearray(whole)
        for _ in range(1 + i % 4):
            broken[rng.integers(300)] = rng.integers(256)
        file.write_bytes(broken if i % 5 else broken[: rng.integers(len(broken))])
        try:
            splits = data.load("svhn", tmp_path)
        except UserError as error:
            assert "train_32x32.mat" in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert splits.train_images.shape[1:] == (3, 32, 32)


def test_what_is_no_array_of_numbers_is_named(tmp_path):
    write(tmp_path)
    file = tmp_path / "train_32x32.mat"
    images = np.zeros((32, 32, 3, 2), np.uint8)
    for content in ({"X": {"a": 1}, "y": [1, 2]}, {"X": images, "y": "ab"}, {"X": images}, {"y": [1, 2]}):
        savemat(file, content)
        with pytest.raises(UserError, match=r"train_32x32\.mat"):
            data.load("svhn", tmp_path)
    file.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(500))
    with pytest.raises(UserError, match=r"train_32x32\.mat cannot be read \(it is MATLAB 7\.3 in HDF5, not MATLAB 5"):
        data.load("svhn", tmp_path)
    savemat(file, {"X": images.astype(float), "y": [1, 2]})
    with pytest.raises(UserError, match=r"train_32x32\.mat holds X \(32, 32, 3, 2\) of float64"):
        data.load("svhn", tmp_path)


def test_another_file_beside_them_is_not_taken_for_them(tmp_path):
    write(tmp_path)
    (other := tmp_path / "extra_32x32.mat").write_bytes(b"other")
    with pytest.raises(UserError, match=r"no files of SVHN at .*extra_32x32\.mat"):
        data.load("svhn", other)
    assert len(data.load("svhn", tmp_path / "test_32x32.mat").train_images) == 9
