import numpy as np
import pytest
from scipy.io import savemat

from streamclr import UserError, data, open_stream


def write(directory, n=9, compressed=True):
    rng, made = np.random.default_rng(0), {}
    for split in ("train", "test"):
        images, labels = rng.integers(0, 256, (32, 32, 3, n), np.uint8), rng.integers(1, 11, (n, 1), np.uint8)
        savemat(directory / f"{split}_32x32.mat", {"X": images, "y": labels}, do_compression=compressed)
        made[split] = images, labels
    return made


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
