"""Export of a run's classifier: ONNX, ExecuTorch, a torch program, or a pretrained directory."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.extras import how_to_install
from streamclr.base.files import write_bytes, write_json
from streamclr.base.options import argument, one_of, option
from streamclr.base.progress import say
from streamclr.base.statistics import evenly_spaced
from streamclr.classifier import Classifier
from streamclr.encoders.public import is_adapter, short_name
from streamclr.models.card import Card
from streamclr.models.formats.executorch import make_executorch, open_executorch
from streamclr.models.formats.onnx_file import looked_again, make_onnx, open_onnx
from streamclr.models.formats.quantise import Calibration
from streamclr.models.formats.reader import VERSION
from streamclr.models.formats.torch_program import make_torch, open_torch
from streamclr.models.heads import HeadInfo, Heads
from streamclr.models.parity import ExportedFunction, Parity, compare
from streamclr.models.pretrained import Pretrained, files_of, from_pretrained, save_pretrained
from streamclr.records.directory import RunDirectory
from streamclr.records.plan import open_run_stream
from streamclr.streams.cameras.feed import CAMERAS
from streamclr.streams.datasets.images import readable
from streamclr.streams.sight import MIDDLE
from streamclr.streams.spec import fit_of, split_source, takes

N_TEST = 1000  # test images on which the file is compared


@dataclass(frozen=True)
class ExportOptions:
    """Write encoder and classifier for other programs, and run what was written against PyTorch."""

    run: str = argument("the run directory")
    format: str = option(
        "onnx", "onnx, executorch (for XNNPACK), torch (a program of torch.export), or pretrained (a directory)"
    )
    int8: bool = option(
        False, "in 8 bits, calibrated on the run's buffer; onnx: where that is in doubt, again in float"
    )
    pure: bool = option(False, "with --int8: in 8 bits alone, a fifth of the size, for accelerators and small devices")
    fraction: float | None = option(None, "the classifier of this label fraction [the largest]")
    served: bool = option(False, "the version that `run --predict` serves, with its own encoder")
    out: str | None = option(
        None,
        "the file or directory, which must be new [RUN/NAME.onnx, NAME-int8.onnx, NAME.pte, NAME.pt2, NAME-pretrained]",
    )


def export(
    directory: RunDirectory,
    format: str = "onnx",
    int8: bool = False,
    out: Path | None = None,
    fraction: float | None = None,
    pure: bool = False,
    served: bool = False,
) -> tuple[Path, Parity]:
    """Write the file, compare it with PyTorch on real images, and write the result beside it, into FILE.json."""
    kind = _checked(format, int8, pure)
    if served and fraction is not None:
        raise UserError("both --served and --fraction are given: use one of them")
    _check_encoder(directory.config.encoder, format, int8)
    name = directory.path.resolve().name + ("-int8" if int8 else "")
    file = directory.path / f"{name}{kind.suffix}" if out is None else out
    found = file.with_name(f"{file.name}.json")
    for taken in (file, found):
        if taken.exists():
            raise UserError(f"{taken} exists already: give another --out, nothing is overwritten")
    if not file.parent.is_dir():
        raise UserError(f"no directory {file.parent} for {file.name}: make it, or give another --out")
    learner, encoder = directory.newest_learner()
    heads = Heads(directory)
    if served:
        head, classifier = heads.served()
        encoder = head.encoder
    else:
        model = directory.load_model() if learner is None else directory.model_with(learner["model"], encoder)
        head = heads.find(fraction)
        classifier = heads.classifier(head, (model, encoder))
    classifier = classifier.cpu()
    if learner is None:
        results = directory.results or {}
        buffer, n_seen, n_steps = directory.load_buffer()["images"], results["images"], results.get("steps")
    else:
        buffer, n_seen, n_steps = learner["buffer"]["images"], learner["buffer"]["n_seen"], learner["n_steps"]
    is_own = head.has_encoder or head.file == heads.labelled_file
    about = describe(directory, head, head.state if is_own else encoder, n_seen, n_steps, int8)
    tested = images_to_test(directory)
    images = torch.cat([buffer, tested])
    content = kind.make(classifier, about, Calibration.of(buffer, pure) if int8 else None)
    parity = compare(classifier, kind.open(content), images, kind.size(content), int8)
    parity = replace(parity, looked_again=kind.looked_again(content, images))
    counts = {"buffer": len(buffer), "test": len(tested)}
    try:
        write_json(found, {"file": file.name, "images": counts, **parity.as_dict(), "metadata": about})
        kind.write(file, content)
    except BaseException as error:
        found.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {file} ({error.strerror}): free some space, or give another --out") from None
        raise
    return file, parity


def describe(
    directory: RunDirectory, head: HeadInfo, encoder: str, n_seen: int, n_steps: int | None, int8: bool
) -> dict[str, Any]:
    """The metadata of the file: nothing about the machine, and of the source only its kind."""
    config = directory.config
    model = config.architecture
    accuracy = None if head.accuracy is None else {"value": head.accuracy, "measured": head.measured}
    return {
        "format_version": VERSION,
        "classes": head.classes,
        "size": config.size,
        **({"fit": fit_of(config.source)} if takes(config.source, "fit") else {}),
        "encoder": {"name": short_name(model.encoder), "width": model.width, "stem": model.stem, "norm": model.norm},
        "state": encoder,
        "source": kind_of(config.source),
        "policy": config.policy,
        "buffer": config.buffer,
        "images_seen": n_seen,
        "steps": n_steps,
        "accuracy": accuracy,
        "int8": int8,
        "streamclr": version("streamclr"),
        "torch": torch.__version__.partition("+")[0],
    }


def kind_of(source: str) -> str:
    """What kind of stream a source is, without addresses or paths; the name of a public dataset."""
    name = split_source(source)[0]
    kinds = {
        "synthetic": "the built-in stream",
        "imagenet": "ImageNet",
        "folder": "a folder of pictures",
        "watch": "a folder of pictures",
        "stdin": "pictures on standard input",
        "video": "a recording",
        "list": "several cameras or recordings",
    }
    return kinds.get(name, "a camera" if name in CAMERAS else name)


def images_to_test(directory: RunDirectory) -> Tensor:
    """At most N_TEST test images of the run's source, evenly spaced; none if it has none or is not at hand."""
    none = torch.empty(0, 3, directory.config.size or 0, directory.config.size or 0, dtype=torch.uint8)
    if "n_test" not in (directory.results or {}):
        return none
    try:
        test = open_run_stream(directory.config).test
    except UserError as error:
        say(f"streamclr: without the source's test images ({error})")
        return none
    if test is None:
        return none
    images, good, _ = readable(test, evenly_spaced(len(test), N_TEST))
    return torch.from_numpy(images) if len(good) else none


# ----------------------------------------------------------------------------------------------------------------------
# The formats. Each makes the content of a file from a classifier and what the file says about itself, and opens such
# content again as a function of images.


def make_pretrained(classifier: Classifier, about: dict[str, Any], calibration: Calibration | None) -> Pretrained:
    """Saved and loaded again, so that the comparison is with what a user will load."""
    same = {name: about[name] for name in ("source", "policy", "buffer", "steps", "state")}
    accuracy = about["accuracy"] or {"value": None, "measured": None}
    card = Card(images=about["images_seen"], accuracy=accuracy["value"], measured=accuracy["measured"], **same)
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / "pretrained"
        parts = classifier.model, classifier.head, classifier.classes, classifier.size
        save_pretrained(Pretrained(*parts, card, about.get("fit", MIDDLE.fit)), made)
        return from_pretrained(made)


class Format(NamedTuple):
    suffix: str
    extra: str  # of this package, which installs what the format needs
    packages: tuple[str, ...]
    has_int8: bool
    make: Callable[[Classifier, dict[str, Any], Calibration | None], Any]  # the content, in memory
    open: Callable[[Any], ExportedFunction]
    looked_again: Callable[[Any, Tensor], float | None] = lambda content, images: None
    write: Callable[[Path, Any], None] = write_bytes
    size: Callable[[Any], int] = len


FORMATS = {
    "onnx": Format(".onnx", "export", ("onnx", "onnxscript", "onnxruntime"), True, make_onnx, open_onnx, looked_again),
    "executorch": Format(".pte", "executorch", ("executorch",), True, make_executorch, open_executorch),
    "torch": Format(".pt2", "", (), False, make_torch, open_torch),
    "pretrained": Format(
        "-pretrained",
        "",
        (),
        False,
        make_pretrained,
        lambda pretrained: pretrained,
        write=lambda path, pretrained: save_pretrained(pretrained, path),
        size=lambda pretrained: sum(map(len, files_of(pretrained).values())),
    ),
}


def _checked(format: str, int8: bool, pure: bool) -> Format:
    if format not in FORMATS:
        raise UserError(f"no format {format!r}: {one_of(format, FORMATS)}")
    kind = FORMATS[format]
    if int8 and not kind.has_int8:
        raise UserError(
            f"{format} has no int8 here: use --int8 with {' or '.join(n for n, k in FORMATS.items() if k.has_int8)}"
        )
    if pure and not int8:
        raise UserError("--pure is for --int8: give both, or neither")
    if missing := [name for name in kind.packages if not find_spec(name)]:
        raise UserError(f"{format} needs {', '.join(missing)}: {how_to_install(kind.extra)}")
    return kind


def _check_encoder(encoder: str, format: str, int8: bool) -> None:
    """What an encoder of another library can be exported to."""
    if not is_adapter(encoder):
        return
    if format in ("torch", "pretrained"):
        raise UserError(
            f"{format} builds the encoder by its name, and {short_name(encoder)} is not streamclr's: use onnx"
        )
    if int8:
        raise UserError(f"--int8 is for streamclr's own encoders, and the run has {short_name(encoder)}: leave it out")
