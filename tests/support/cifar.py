"""Small CIFAR files in each of the published formats."""

import io
import json
import pickle
import tarfile

import numpy as np
from PIL import Image

RNG = np.random.default_rng(0)

N = 6  # images in a batch


def make_batches(n_classes):
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if n_classes == 10 else ["train", "test"]
    return {name: (RNG.integers(0, 256, (N, 3072), np.uint8), RNG.integers(0, n_classes, N)) for name in names}


def as_python(batches, protocol=2):
    key = b"labels" if "test_batch" in batches else b"fine_labels"
    return {
        name: pickle.dumps({b"data": x, key: y.tolist(), b"coarse_labels": [0] * N, b"batch_label": b"b"}, protocol)
        for name, (x, y) in batches.items()
    }


def as_binary(batches):
    files = {}
    for name, (x, y) in batches.items():
        labels = y[:, None] if "test_batch" in batches else np.stack([y // 5, y], 1)
        files[name + ".bin"] = np.concatenate([labels.astype(np.uint8), x], 1).tobytes()
    return files


def as_npm(batches):
    files = {}
    for name, (x, _) in batches.items():
        png = io.BytesIO()
        Image.fromarray(x.reshape(N, 3, 1024).transpose(0, 2, 1)).save(png, "PNG")
        files[name + ".png"] = png.getvalue()
    train = [int(label) for i in range(1, 6) for label in batches[f"data_batch_{i}"][1]]
    files["train_lables.json"] = json.dumps(train).encode()
    files["test_lables.json"] = json.dumps(batches["test_batch"][1].tolist()).encode()
    return files


def write(directory, files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def pack(path, files, folder):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def check(splits, batches):
    train = [name for name in batches if not name.startswith("test")]
    test = next(name for name in batches if name.startswith("test"))
    images = np.concatenate([batches[name][0] for name in train]).reshape(-1, 3, 32, 32)
    assert np.array_equal(splits.train_images, images)
    assert np.array_equal(splits.train_labels, np.concatenate([batches[name][1] for name in train]))
    assert np.array_equal(splits.test_images, batches[test][0].reshape(-1, 3, 32, 32))
    assert np.array_equal(splits.test_labels, batches[test][1])
