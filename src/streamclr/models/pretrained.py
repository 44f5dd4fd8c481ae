"""A pretrained directory in the layout of Hugging Face's hub: config.json, model.safetensors and a card; no code."""

import copy
import hashlib
import json
import reprlib
import shutil
import tempfile
import typing
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.files import sha256_of, sync, write_new
from streamclr.base.tensors import load_checked
from streamclr.classifier import Classifier, Head
from streamclr.encoders.architecture import ENCODERS, Architecture
from streamclr.encoders.inference import checked_images, inference_mode
from streamclr.encoders.projection import PROJECTIONS, ContrastiveModel
from streamclr.encoders.resnet import STEMS
from streamclr.models.card import Card, card_text
from streamclr.streams.sight import FITS, MIDDLE

VERSION = 3  # of the layout
MAX_CONFIG_BYTES = 2**24  # about two hundred thousand class names
BATCH_SIZE = 64  # images


class Pretrained:
    """A classifier with its projection head and card; a copy, on the CPU.

    model: encoder and projection head. A Learner can go on with it; then the head has to be trained again.
    size: side of the images that the encoder learned from.
    card: what is known about how the model was made.
    fit: how the frames that it learned from became squares, see `streams.sight.Sight`.

    >>> import torch
    >>> from streamclr import Head, Learner, Pretrained, resnet18
    >>> learner = Learner(resnet18(width=4), buffer=8)
    >>> model = Pretrained(learner.model, Head(32, 2), classes=["cat", "dog"], size=16)
    >>> model
    Pretrained(resnet18, 2 classes, 16 px)
    >>> probabilities, features = model(torch.zeros(5, 3, 24, 24, dtype=torch.uint8))
    >>> probabilities.shape, features.shape
    (torch.Size([5, 2]), torch.Size([5, 32]))
    """

    def __init__(
        self,
        model: ContrastiveModel,
        head: Head,
        classes: Sequence[str],
        size: int,
        card: Card | None = None,
        fit: str = MIDDLE.fit,
    ):
        self.architecture = Architecture.of(model)
        n_classes = head.linear.out_features
        if len(classes) != n_classes or len(set(classes)) != n_classes:
            raise UserError(f"{len(set(classes))} different class names for {n_classes} classes: give one for each")
        self.model, self.classes, self.size = copy.deepcopy(model).cpu(), list(classes), size
        self.classifier = Classifier(self.model, copy.deepcopy(head).cpu(), self.classes, size)
        self.model.requires_grad_()  # a classifier is frozen, and a Learner goes on with its encoder
        self.encoder, self.mean, self.std = self.model.encoder, _short(self.model.mean), _short(self.model.std)
        self.card, self.fit = Card() if card is None else card, fit

    def __repr__(self) -> str:
        return f"Pretrained({self.architecture.encoder}, {len(self.classes)} classes, {self.size} px)"

    def __call__(self, images: Tensor | np.ndarray) -> tuple[Tensor, Tensor]:
        """uint8, n x 3 x H x W, of any height and width. Returns probabilities, n x classes, and features, n x d."""
        with inference_mode(self.classifier):
            parts = [self.classifier(part) for part in checked_images(images, "the batch").split(BATCH_SIZE)]
        probabilities, features = zip(*parts, strict=True)
        return torch.cat(probabilities), torch.cat(features)


def save_pretrained(pretrained: Pretrained, path: str | Path) -> None:
    """Write the directory, which must be new or empty: completely or not at all, and only if it can be loaded again.

    >>> import os
    >>> import tempfile
    >>> from streamclr import Head, Learner, Pretrained, resnet18, save_pretrained
    >>> learner = Learner(resnet18(width=4), buffer=8)
    >>> model = Pretrained(learner.model, Head(32, 2), classes=["cat", "dog"], size=16)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_pretrained(model, f"{directory}/animals")
    ...     print(sorted(os.listdir(f"{directory}/animals")))
    ['README.md', 'config.json', 'model.safetensors']
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already: give another directory, nothing is overwritten")
    if not path.parent.is_dir():
        raise UserError(f"no directory {path.parent} for {path.name}: make it, or give another")
    part = Path(tempfile.mkdtemp(prefix=".pretrained-", dir=path.parent))
    try:
        for name, content in files_of(pretrained).items():
            write_new(part / name, [content])
        from_pretrained(part)
        part.chmod(0o755)
        sync(part)
        part.rename(path)
        sync(path.parent)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, ValueError):  # a UserError, or a number that JSON does not have
            raise UserError(f"cannot save {path}: {str(error).replace(f'{part}/', '')}") from None
        raise


def files_of(pretrained: Pretrained) -> dict[str, bytes]:
    """The content of the directory's files."""
    named = _named(pretrained.model, folded(pretrained.classifier.head))
    weights = save({name: tensor.contiguous() for name, tensor in named.items()}, {"format": "pt"})
    config = json.dumps(_config(pretrained, hashlib.sha256(weights).hexdigest()), indent=2, allow_nan=False)
    return {
        "model.safetensors": weights,
        "config.json": config.encode() + b"\n",
        "README.md": card_text(pretrained).encode("utf-8", errors="replace"),
    }


def from_pretrained(path: str | Path) -> Pretrained:
    """The model in a directory that `save_pretrained` or `streamclr export --format pretrained` has written.

    A damaged or foreign directory, or one of a later version, is an error before memory is taken for it.

    >>> import tempfile
    >>> from streamclr import Head, Learner, Pretrained, from_pretrained, resnet18, save_pretrained
    >>> learner = Learner(resnet18(width=4), buffer=8)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_pretrained(Pretrained(learner.model, Head(32, 2), ["cat", "dog"], size=16), f"{directory}/animals")
    ...     model = from_pretrained(f"{directory}/animals")
    >>> model.classes
    ['cat', 'dog']
    >>> Learner(model.model, buffer=8)  # goes on learning
    Learner(resnet18, buffer 0 of 8, step 0)
    """
    config = read_config(Path(path) / "config.json")
    file = Path(path) / "model.safetensors"
    architecture = Architecture(*(config[name] for name in Architecture._fields))
    with torch.device("meta"):  # shapes, and nothing in memory
        model = architecture.make_model(config["projection_size"])
        fc = nn.Linear(model.n_features, len(config["id2label"]))
    tensors = load_checked(file, _named(model, fc))
    if sha256_of(file) != config["sha256"]:
        raise UserError(f"{file} is damaged, or not the one that {file.parent}/config.json is for: its SHA-256 differs")
    model.to_empty(device="cpu")
    head = Head(fc.in_features, fc.out_features)
    with torch.no_grad():
        for name, tensor in _named(model, head.linear).items():
            tensor.copy_(tensors[name])
        model.mean.copy_(torch.tensor(config["image_mean"]).view(3, 1, 1))
        model.std.copy_(torch.tensor(config["image_std"]).view(3, 1, 1))
    classes, card = list(config["id2label"].values()), Card(**config["card"])
    return Pretrained(model, head, classes, config["image_size"], card, config["image_fit"])


def is_pretrained(path: Path) -> bool:
    """Whether a directory is a pretrained one, damaged or not; a run directory has a config.json as well."""
    try:
        return "library_name" in json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


# ----------------------------------------------------------------------------------------------------------------------
# model.safetensors: the encoder under torchvision's names, the head as its `fc`, and the projection head.


def _named(model: ContrastiveModel, fc: nn.Module) -> dict[str, Tensor]:
    named = dict(model.encoder.state_dict())
    named |= {f"fc.{name}": tensor for name, tensor in fc.state_dict().items()}
    return named | {f"projection.{name}": tensor for name, tensor in model.head.state_dict().items()}


def folded(head: Head) -> nn.Linear:
    """The head as one linear layer: weight / std, and bias - weight / std · mean, rounded once, at the end."""
    linear = nn.utils.skip_init(nn.Linear, head.linear.in_features, head.linear.out_features)
    with torch.no_grad():
        weight = head.linear.weight.double() / head.std.double()
        linear.weight.copy_(weight)
        linear.bias.copy_(head.linear.bias.double() - weight @ head.mean.double())
    return linear


# ----------------------------------------------------------------------------------------------------------------------
# config.json.


def _config(pretrained: Pretrained, sha256: str) -> dict[str, Any]:
    return {
        "library_name": "streamclr",
        "format_version": VERSION,
        **pretrained.architecture._asdict(),
        "projection_size": pretrained.model.head[-1].out_features,
        "image_size": pretrained.size,
        "image_fit": pretrained.fit,
        "image_mean": pretrained.mean,
        "image_std": pretrained.std,
        "id2label": {str(i): name for i, name in enumerate(pretrained.classes)},
        "label2id": {name: i for i, name in enumerate(pretrained.classes)},
        "card": asdict(pretrained.card),
        "sha256": sha256,
        "streamclr": version("streamclr"),
        "torch": torch.__version__.partition("+")[0],
    }


def _short(tensor: Tensor) -> list[float]:
    """The shortest decimals that give the same float32: 0.485, not 0.48500001430511475."""
    return [float(str(value)) for value in tensor.flatten().numpy()]


def read_config(file: Path) -> dict[str, Any]:
    """Checked field by field."""
    if not file.is_file():
        raise UserError(f"{file.parent} holds no model: it has no config.json")
    try:
        if (size := file.stat().st_size) > MAX_CONFIG_BYTES:
            raise ValueError(f"it has {size} bytes, and may have {MAX_CONFIG_BYTES}")
        content = json.loads(file.read_text("utf-8"), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({error})") from None
    library = content.get("library_name") if isinstance(content, dict) else None
    if library != "streamclr":
        hint = ": of a run make one with streamclr export RUN --format pretrained" if library is None else ""
        raise UserError(f"{file} is no model of streamclr, library_name is {reprlib.repr(library)}{hint}")
    found = content.get("format_version")
    if type(found) is int and found > VERSION:
        raise UserError(f"{file} has format_version {found}, and this streamclr reads {VERSION}: install a newer one")
    if found == 1:  # without a choice of the projection head
        content = {"projection": "plain", **content}
    if type(found) is int and found < 3:
        content = {"image_fit": MIDDLE.fit, **content}
    if missing := sorted(CHECKS.keys() - content.keys()):
        raise UserError(f"{file} lacks {', '.join(missing)}")
    if unknown := sorted(content.keys() - CHECKS.keys()):
        raise UserError(f"{file} has keys that are not known: {reprlib.repr(unknown)}")
    for name, check in CHECKS.items():
        if not check.fits(content[name]):
            raise UserError(f"{file} has {reprlib.repr(content[name])} for {name}: it must be {check.allowed}")
    if content["label2id"] != {name: i for i, name in enumerate(content["id2label"].values())}:
        raise UserError(f"{file}: label2id is not id2label the other way round")
    return content


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number in JSON")


class Check(NamedTuple):
    fits: Callable[[Any], bool]
    allowed: str


TEXT = Check(lambda value: isinstance(value, str), "text")


def _one_of(names: Sequence[str]) -> Check:
    return Check(lambda value: isinstance(value, str) and value in names, " or ".join(names))


def _whole(least: int, most: int) -> Check:
    # True is an int, too.
    return Check(lambda value: type(value) is int and least <= value <= most, f"a whole number, {least} to {most}")


def _or_none(check: Check) -> Check:
    return Check(lambda value: value is None or check.fits(value), f"null, or {check.allowed}")


def _three(least: float, most: float = 1e6) -> Check:
    def fits(value: Any) -> bool:
        numbers = value if isinstance(value, list) else []
        return len(numbers) == 3 and all(type(n) in (int, float) and least <= n <= most for n in numbers)

    return Check(fits, f"three numbers, {least:g} to {most:g}")


def _are_names(value: Any) -> bool:
    names = value if isinstance(value, dict) else {}
    return bool(names) and all(k == str(i) and isinstance(name, str) for i, (k, name) in enumerate(names.items()))


def _is_card(value: Any) -> bool:
    hints = typing.get_type_hints(Card)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        return False
    if any(not isinstance(value[name], hint) or isinstance(value[name], bool) for name, hint in hints.items()):
        return False
    counts = [value[name] or 0 for name in ("buffer", "images", "steps")]
    return 0 <= (value["accuracy"] or 0) <= 1 and 0 <= min(counts) <= max(counts) < 2**63


CHECKS = {
    "library_name": _one_of(["streamclr"]),
    "format_version": _whole(1, VERSION),
    "encoder": _one_of(list(ENCODERS)),
    "width": _or_none(_whole(1, 2**14)),
    "stem": _or_none(_one_of(list(STEMS))),
    "norm": _or_none(_one_of(["batch", "group"])),
    "projection": _one_of(PROJECTIONS),
    "projection_size": _whole(1, 2**14),
    "image_size": _whole(8, 4096),
    "image_fit": _one_of(FITS),
    "image_mean": _three(-1e6),
    "image_std": _three(1e-6),
    "id2label": Check(_are_names, 'class names by number from "0"'),
    "label2id": Check(lambda value: isinstance(value, dict), "numbers by class name"),
    "card": Check(_is_card, f"an object of {', '.join(Card.__dataclass_fields__)}"),
    "sha256": TEXT,
    "streamclr": TEXT,
    "torch": TEXT,
}
