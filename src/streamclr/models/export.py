"""Encoder and classifier of a run for others: ONNX, ExecuTorch, a torch program, a directory for Hugging Face's hub."""

import io
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.files import write_bytes, write_json
from streamclr.base.numbers import evenly_spaced
from streamclr.base.options import one_of, option
from streamclr.base.progress import say
from streamclr.models.card import Card
from streamclr.models.formats.executorch import make_program, open_program
from streamclr.models.formats.quantise import Calibration, quantise
from streamclr.models.formats.reader import PROGRAM_SEAL, VERSION, checked_session, sealed, session_of
from streamclr.models.parity import Parity, Shipment, compare
from streamclr.models.pretrained import Pretrained, files_of, from_pretrained, save_pretrained
from streamclr.models.shipped import Shipped
from streamclr.records.directory import RunDirectory
from streamclr.records.plan import open_run_stream
from streamclr.streams.cameras.feed import CAMERAS
from streamclr.streams.datasets.images import readable
from streamclr.streams.spec import split_source

if TYPE_CHECKING:
    import onnx
    import onnxruntime

OPSET = 18
OUTPUTS = ("probabilities", "features")
N_TEST = 1000  # test images that the file is run on


@dataclass(frozen=True)
class ExportOptions:
    """Write encoder and classifier for other programs, and run what was written against PyTorch."""

    run: str = option("", "the run directory")
    format: str = option(
        "onnx", "onnx, executorch (for XNNPACK), torch (a program of torch.export), or pretrained (a directory)"
    )
    int8: bool = option(
        False, "in 8 bits, calibrated on the run's buffer; onnx: where that is in doubt, again in float"
    )
    pure: bool = option(False, "with --int8: in 8 bits alone, a fifth of the size, for accelerators and small devices")
    fraction: float | None = option(None, "the classifier of this label fraction [the largest]")
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
) -> tuple[Path, Parity]:
    """Write the file, run it against PyTorch on real images, and write what was found beside it, into FILE.json."""
    kind = _checked(format, int8, pure)
    name = directory.path.resolve().name + ("-int8" if int8 else "")
    file = directory.path / f"{name}{kind.suffix}" if out is None else out
    found = file.with_name(f"{file.name}.json")
    for taken in (file, found):
        if taken.exists():
            raise UserError(f"{taken} exists already: give another --out, nothing is overwritten")
    if not file.parent.is_dir():
        raise UserError(f"no directory {file.parent} for {file.name}: make it, or give another --out")
    learner, encoder = directory.newest_learner()
    model = directory.load_model() if learner is None else directory.model_with(learner["model"], encoder)
    head, classes = directory.load_classifier(fraction, encoder)
    shipped = Shipped(model.cpu(), head, directory.config.size)
    buffer, n_seen, n_steps = _buffer(directory, learner)
    about = describe(directory, fraction, classes, encoder, n_seen, n_steps, int8)
    tested = held_out(directory)
    images = torch.cat([buffer, tested])
    content = kind.make(shipped, about, Calibration.of(buffer, pure) if int8 else None)
    parity = compare(shipped, kind.open(content), images, kind.size(content), int8)
    if kind.looked_again is not None:
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
    directory: RunDirectory,
    fraction: float | None,
    classes: list[str],
    encoder: str,
    n_seen: int,
    n_steps: int | None,
    int8: bool,
) -> dict[str, Any]:
    """What the file says about itself: nothing of the machine, and of the source what kind it is."""
    config = directory.config
    return {
        "format_version": VERSION,
        "classes": classes,
        "size": config.size,
        "encoder": {"name": config.encoder, "width": config.width, "stem": config.stem, "norm": config.norm},
        "state": encoder,
        "source": kind_of(config.source),
        "policy": config.policy,
        "buffer": config.buffer,
        "images_seen": n_seen,
        "steps": n_steps,
        "accuracy": _accuracy(directory, fraction),
        "int8": int8,
        "streamclr": version("streamclr"),
        "torch": torch.__version__.partition("+")[0],
    }


def kind_of(source: str) -> str:
    """The kind of stream that a source is, and no more of it; the name of a public dataset."""
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


def _accuracy(directory: RunDirectory, fraction: float | None) -> dict[str, Any] | None:
    """That of the classifier in float, and how it was measured; None where nobody measured it."""
    if fraction is None and (about := directory.about_labelled()) is not None:
        if about.get("accuracy") is None:
            return None
        measured = f"cross-validation of {about['n_labels']} labels that a person gave"
        return {"value": about["accuracy"], "measured": measured}
    results = directory.results or {}
    by_fraction = {float(key): entry for key, entry in results.get("labels", {}).items()}
    entry = by_fraction.get(max(by_fraction, default=0.0) if fraction is None else fraction)
    if entry is None:
        return None
    measured = f"{results['n_test']} test images, classifier from {entry['n_labels']} labels"
    return {"value": entry["accuracy"], "measured": measured}


def _buffer(directory: RunDirectory, learner: dict[str, Any] | None) -> tuple[Tensor, int, int | None]:
    """The images in the buffer, images seen, and steps; learner: of the checkpoint of a run that is not finished."""
    if learner is None:
        results = directory.results or {}
        return directory.load_buffer()["images"], results["images"], results.get("steps")
    return learner["buffer"]["images"], learner["buffer"]["n_seen"], learner["n_steps"]


def held_out(directory: RunDirectory, most: int = N_TEST) -> Tensor:
    """Up to so many test images of the run's source, evenly spaced; none where it has none, or is not here."""
    none = torch.empty(0, 3, directory.config.size or 0, directory.config.size or 0, dtype=torch.uint8)
    if "n_test" not in (directory.results or {}):
        return none
    try:
        test = open_run_stream(directory.config).source.test
    except UserError as error:
        say(f"streamclr: without the source's test images ({error})")
        return none
    if test is None:
        return none
    images, good, _ = readable(test, evenly_spaced(len(test), most))
    return torch.from_numpy(images) if len(good) else none


# ----------------------------------------------------------------------------------------------------------------------
# The formats. Each makes the content of a file from a Shipped and what is said about it, and opens such content again
# as a function of images.


def as_text(about: dict[str, Any]) -> str:
    return json.dumps(about, sort_keys=True)


def _program(shipped: Shipped) -> torch.export.ExportedProgram:
    """The graph, for any number of images of any size, without the places in the source that it came from."""
    example = torch.zeros(2, 3, shipped.size + 1, shipped.size + 2, dtype=torch.uint8)
    n, height, width = (torch.export.Dim(name, min=1) for name in ("n", "height", "width"))
    with _quiet():
        program = torch.export.export(shipped.plain(), (example,), dynamic_shapes=({0: n, 2: height, 3: width},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def make_torch(shipped: Shipped, about: dict[str, Any], calibration: Calibration | None) -> bytes:
    content = io.BytesIO()
    with _quiet():
        torch.export.save(_program(shipped), content, extra_files={"streamclr": as_text(about)})
    return content.getvalue()


def open_torch(content: bytes) -> Shipment:
    with _quiet():
        return torch.export.load(io.BytesIO(content)).module()


def make_onnx(shipped: Shipped, about: dict[str, Any], calibration: Calibration | None) -> bytes:
    with _quiet():
        program = torch.onnx.export(
            _program(shipped),
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=OUTPUTS,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _strip(model)
    if calibration is not None:
        with _quiet():
            model = _int8(model, calibration)
    model.metadata_props.add(key="streamclr", value=as_text(about))
    return sealed(model.SerializeToString(deterministic=True))


def _int8(model: "onnx.ModelProto", calibration: Calibration) -> "onnx.ModelProto":
    """The same in 8 bits, with a second look if it changes too many classes without."""
    from streamclr.models.formats.second_look import least_margin, look_again  # needs onnx

    quantised = quantise(model, calibration.ranges)
    _strip(quantised)
    if calibration.doubts is not None:
        parts = calibration.doubts.split(64)
        exact, found = (run_by(session_of(file.SerializeToString(), n_threads=1)) for file in (model, quantised))
        least = least_margin(*(torch.cat([run(part)[0] for part in parts]) for run in (exact, found)))
        if least:
            look_again(quantised, model, least)
    return quantised


def _strip(model: "onnx.ModelProto") -> None:
    """Leave out stack traces and what else torch tells about itself; plain names for nodes and sizes."""
    graph = model.graph
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for number, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{number}"
    for value, sizes in [(graph.input[0], {0: "n", 2: "height", 3: "width"})] + [
        (out, {0: "n"}) for out in graph.output
    ]:
        for place, name in sizes.items():
            value.type.tensor_type.shape.dim[place].dim_param = name


def open_onnx(content: bytes) -> Shipment:
    """As `predict` does, but for one thread: what it would refuse is never written."""
    return run_by(checked_session(content, Path("the file"), n_threads=1)[0])


def run_by(session: "onnxruntime.InferenceSession", outputs: tuple[str, ...] = OUTPUTS) -> Shipment:
    return lambda images: tuple(map(torch.from_numpy, session.run(outputs, {"images": images.numpy()})))


def make_executorch(shipped: Shipped, about: dict[str, Any], calibration: Calibration | None) -> bytes:
    """int8 without a second look, which few accelerators could run."""
    with _quiet():
        program = make_program(shipped, as_text(about), None if calibration is None else calibration.ranges)
    return sealed(program, PROGRAM_SEAL)


def open_executorch(content: bytes) -> Shipment:
    with _quiet():
        return open_program(content)


def looked_again(content: bytes, images: Tensor) -> float | None:
    """The share of these images that an ONNX file runs twice; None if it has no second look."""
    from streamclr.models.formats.second_look import telling

    if (told := telling(content)) is None:
        return None
    run = run_by(session_of(told, n_threads=1), ("doubtful",))
    return float(torch.cat([run(part)[0] for part in images.split(64)]).double().mean())


def make_pretrained(shipped: Shipped, about: dict[str, Any], calibration: Calibration | None) -> Pretrained:
    """As whoever loads it will have it."""
    accuracy = about["accuracy"] or {"value": None, "measured": None}
    card = Card(
        source=about["source"],
        policy=about["policy"],
        buffer=about["buffer"],
        images=about["images_seen"],
        steps=about["steps"],
        state=about["state"],
        accuracy=accuracy["value"],
        measured=accuracy["measured"],
    )
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / "pretrained"
        save_pretrained(Pretrained(shipped.model, shipped.head, about["classes"], shipped.size, card), made)
        return from_pretrained(made)


class Format(NamedTuple):
    suffix: str
    extra: str  # of the package, that has what it needs
    packages: tuple[str, ...]
    has_int8: bool
    make: Callable[[Shipped, dict[str, Any], Calibration | None], Any]  # the content, in memory
    open: Callable[[Any], Shipment]
    looked_again: Callable[[Any, Tensor], float | None] | None = None
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
        raise UserError(f"{format} needs {', '.join(missing)}: pip install -c constraints.txt -e '.[{kind.extra}]'")
    return kind


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters say much that is not for a user, those that are not in Python straight to stderr."""
    before, stderr = logging.root.manager.disable, os.dup(2)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nothing:
            warnings.simplefilter("ignore")
            sys.stderr.flush()
            os.dup2(nothing.fileno(), 2)
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        logging.disable(before)
