"""An exported file, opened for prediction. It may come from anyone: no code in it is executed.

Everything is checked first: its checksum, its version, and that it refers to nothing outside the file. An ONNX file
needs onnxruntime and no torch.
"""

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamclr.base.errors import UserError
from streamclr.base.extras import how_to_install, how_to_install_package
from streamclr.base.options import checked_size
from streamclr.models.formats import protobuf as wire
from streamclr.streams.sight import FITS, MIDDLE

if TYPE_CHECKING:
    import onnxruntime
    import torch

VERSION = 1  # of the metadata
MAX_BYTES = 2**31  # protobuf's own limit
COPY_AGAIN = "copy it again, or export it again"
USE_EXPORT = "give a file that 'streamclr export' wrote"


class Predictor(NamedTuple):
    """What predicts the classes of numpy images, whatever file it came from."""

    classes: list[str]
    size: int  # side of the images that it learned from; it scales others itself
    classify: Callable[[np.ndarray], np.ndarray]  # uint8 images, n x 3 x H x W, to probabilities, n x classes
    fit: str = MIDDLE.fit  # how the frames that it learned from became squares


def open_exported(path: Path) -> Predictor:
    """The first bytes tell the format."""
    with path.open("rb") as file:
        head = file.read(8)
    if not head:
        raise UserError(f"{path} is empty: {COPY_AGAIN}")
    if head[4:6] == b"ET":
        return _open_executorch(path)
    return _open_torch(path) if head[:4] == b"PK\x03\x04" else _open_onnx(path)


def about_text(about: dict[str, Any]) -> str:
    """The metadata as it is written into a file."""
    return json.dumps(about, sort_keys=True)


def checked(about: str | bytes, path: Path) -> dict[str, Any]:
    """The metadata of the file, if it can be used."""
    try:
        found = json.loads(about)
        version = found["format_version"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UserError(f"the metadata of {path} cannot be read: {COPY_AGAIN}") from None
    if version != VERSION:
        raise UserError(f"{path} has format version {version!r}, and this streamclr knows {VERSION}: use a newer one")
    classes, size = found.get("classes"), found.get("size")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise UserError(f"the metadata of {path} names no classes: {USE_EXPORT}")
    if not isinstance(size, int) or isinstance(size, bool):
        raise UserError(f"the metadata of {path} has {size!r} for size: {USE_EXPORT}")
    if (fit := found.setdefault("fit", MIDDLE.fit)) not in FITS:
        raise UserError(f"the metadata of {path} has {fit!r} for fit: {USE_EXPORT}")
    try:
        checked_size(size)
    except UserError as error:
        raise UserError(f"the metadata of {path} cannot be used: {error}") from None
    return found


# ----------------------------------------------------------------------------------------------------------------------
# ONNX. The last entry of the metadata is the SHA-256 of all bytes before it: onnxruntime does not notice a damaged
# weight. The numbers are those of the fields in onnx.proto.

SEAL = b"\x72\x4a\x0a\x06sha256\x12\x40"  # metadata_props, 74 bytes: key "sha256", value of 64 characters


def sealed(content: bytes, seal: bytes = SEAL) -> bytes:
    """Content with its checksum appended; to protobuf that is one more entry of the metadata."""
    return content + seal + hashlib.sha256(content).hexdigest().encode()


def is_whole(content: bytes, seal: bytes = SEAL) -> bool:
    return content == sealed(content[: -len(seal) - 64], seal)


def checked_session(
    content: bytes, path: Path, n_threads: int
) -> "tuple[onnxruntime.InferenceSession, dict[str, Any]]":
    """The graph in the content of an ONNX file, ready to run, and the metadata. path: the file's name in errors."""
    try:
        metadata = [dict(wire.fields(entry)) for entry in wire.parts(memoryview(content), 14)]
        about = {bytes(entry[1]): bytes(entry[2]) for entry in metadata}
        graphs = list(wire.parts(memoryview(content), 7))
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{path} is no whole ONNX file: {USE_EXPORT}, or {COPY_AGAIN}") from None
    if not graphs or b"streamclr" not in about:
        raise UserError(f"{path} does not say that it is a classifier of streamclr: {USE_EXPORT}")
    if not is_whole(content):
        raise UserError(f"{path} is damaged, its checksum differs: {COPY_AGAIN}")
    found = checked(about[b"streamclr"], path)
    if problem := _reaches_out(memoryview(content)):
        raise UserError(f"{path} {problem}, which no file of streamclr does: it is refused")
    try:
        session = session_of(content, n_threads)
    except ImportError:
        raise UserError(f"{path} needs onnxruntime: {how_to_install_package('onnxruntime')}") from None
    except Exception as error:  # noqa: BLE001  onnxruntime has an exception for each of its codes, and no base for them
        raise UserError(f"onnxruntime cannot open {path} ({error}): {USE_EXPORT}") from None
    ports = {value.name: (value.type, len(value.shape)) for value in (*session.get_inputs(), *session.get_outputs())}
    floats = ("tensor(float)", 2)
    if ports != {"images": ("tensor(uint8)", 4), "probabilities": floats, "features": floats}:
        raise UserError(f"{path} does not take images and give probabilities and features: {USE_EXPORT}")
    n_classes = session.get_outputs()[0].shape[1]
    if n_classes != len(found["classes"]):
        raise UserError(f"{path} has {n_classes} classes, and names for {len(found['classes'])}: {USE_EXPORT}")
    return session, found


def session_of(content: bytes, n_threads: int) -> "onnxruntime.InferenceSession":
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = n_threads, 1
    options.log_severity_level = 4  # errors come as exceptions
    # Its fallback would only try the same again, and print to standard output.
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"], enable_fallback=0)


def _reaches_out(model: memoryview) -> str | None:
    """Why a graph is refused: for anything but ONNX's own operators on weights in the file, in one graph and the
    branches of an `If`. None if it is accepted."""
    try:
        if any(wire.parts(model, 20, 25)):
            return "defines functions of its own"
        graphs = [(graph, 0) for graph in wire.parts(model, 7)]
        for graph, depth in graphs:  # the list grows in the loop
            tensors = list(wire.parts(graph, 5))
            if any(wire.parts(graph, 15)):
                return "has sparse weights"
            for node in wire.parts(graph, 1):
                for domain in wire.parts(node, 7):
                    if bytes(domain) not in (b"", b"ai.onnx"):
                        return f"uses operators of {bytes(domain).decode(errors='replace')!r}"
                is_if = [bytes(kind) for kind in wire.parts(node, 4)] == [b"If"]
                for attribute in wire.parts(node, 5):
                    inner = list(wire.parts(attribute, 6))
                    if any(wire.parts(attribute, 11, 22, 23)) or (inner and (depth or not is_if)):
                        return "has a graph inside its graph"
                    graphs += [(branch, depth + 1) for branch in inner]
                    tensors += wire.parts(attribute, 5, 10)
            if any(number in (13, 14) and value for tensor in tensors for number, value in wire.fields(tensor)):
                return "has weights in other files"
    except ValueError as error:
        return f"has a graph that is no protobuf ({error})"
    return None


def _open_onnx(path: Path) -> Predictor:
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path} has more than 2 GiB, which no ONNX file has: {USE_EXPORT}")
    session, about = checked_session(path.read_bytes(), path, n_threads())

    def classify(images: np.ndarray) -> np.ndarray:
        try:
            return session.run(["probabilities"], {"images": images})[0]
        except Exception as error:  # noqa: BLE001  as above
            raise UserError(f"onnxruntime cannot run {path} ({error}): {USE_EXPORT}") from None

    return Predictor(about["classes"], about["size"], classify, about["fit"])


def n_threads() -> int:
    """As torch does: OMP_NUM_THREADS, or the cores that this process may use."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) else len(os.sched_getaffinity(0))


# ----------------------------------------------------------------------------------------------------------------------
# A program of ExecuTorch, with a checksum appended, which the runtime ignores. The runtime trusts every offset in the
# file, so it must never see a damaged one.

PROGRAM_SEAL = b"\nstreamclr sha256 "


def _open_executorch(path: Path) -> Predictor:
    content = path.read_bytes()
    if not is_whole(content, PROGRAM_SEAL):
        raise UserError(f"{path} is damaged, or no classifier of streamclr: {USE_EXPORT}, or {COPY_AGAIN}")
    if not find_spec("executorch"):
        raise UserError(f"{path} needs ExecuTorch: {how_to_install('executorch')}")
    import torch

    from streamclr.models.formats.executorch import metadata, open_program

    try:
        about, run = checked(metadata(content), path), open_program(content)
    except (RuntimeError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"ExecuTorch cannot open {path} ({error})") from None

    def classify(images: np.ndarray) -> np.ndarray:
        try:
            return run(torch.from_numpy(images))[0].numpy()
        except RuntimeError as error:
            raise UserError(f"ExecuTorch cannot run {path} ({error}): {USE_EXPORT}") from None

    return Predictor(about["classes"], about["size"], classify, about["fit"])


# ----------------------------------------------------------------------------------------------------------------------
# A program of torch.export. `torch.export.load` would unpickle and evaluate parts of the file. So only the weights are
# read, which are plain bytes, and the encoder is built from its name.


def _open_torch(path: Path) -> Predictor:
    import torch

    from streamclr.base.tensors import load_weights
    from streamclr.classifier import Classifier, Head
    from streamclr.encoders.architecture import ENCODERS, Architecture

    about, weights = _read_program(path)
    try:
        architecture = Architecture(*(about["encoder"][name] for name in ("name", "width", "stem", "norm")))
        encoder, width, *others, _ = map(type, architecture)
        if encoder is not str or width not in (int, NoneType) or not {*others} <= {str, NoneType}:
            raise TypeError
        if architecture.encoder not in ENCODERS:  # never a function that a file names
            raise UserError("not one of streamclr's own")
        with torch.device("meta"):  # no memory; all weights are checked against it, and then put in its place
            model = architecture.make_model()
            head = Head(model.n_features, len(about["classes"]))
            classifier = Classifier(model, head, about["classes"], about["size"]).plain()
    except (LookupError, TypeError, RuntimeError, UserError):
        raise UserError(f"the metadata of {path} describes no encoder known to this streamclr: {USE_EXPORT}") from None
    kinds = {name: tensor.dtype for name, tensor in classifier.state_dict().items()}
    load_weights(classifier, weights, str(path), assign=True)
    if any(tensor.dtype != kinds[name] for name, tensor in weights.items()):
        raise UserError(f"{path} has weights that are not of the encoder's kind: {USE_EXPORT}")

    def classify(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return classifier(torch.from_numpy(images))[0].numpy()

    return Predictor(about["classes"], about["size"], classify, about["fit"])


def _read_program(path: Path) -> "tuple[dict[str, Any], dict[str, torch.Tensor]]":
    """The metadata of the file, and its weights by name."""
    import torch

    kinds = {7: torch.float32, 5: torch.int64}  # as torch.export numbers them
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("torch does not compress")
            if (bad := archive.testzip()) is not None:
                raise ValueError(f"the checksum of {bad} differs")
            root = archive.namelist()[0].partition("/")[0]
            about = archive.read(f"{root}/extra/streamclr") if f"{root}/extra/streamclr" in archive.namelist() else b""
            listed, weights = json.loads(archive.read(f"{root}/data/weights/model_weights_config.json")), {}
            for name, entry in listed["config"].items():
                if entry["use_pickle"]:
                    raise ValueError(f"{name} is pickled")
                content = bytearray(archive.read(f"{root}/data/weights/{entry['path_name']}"))
                shape = [side["as_int"] for side in entry["tensor_meta"]["sizes"]]
                weights[name] = torch.frombuffer(content, dtype=kinds[entry["tensor_meta"]["dtype"]]).reshape(shape)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, LookupError) as error:
        why = str(error)
    except (TypeError, AttributeError, RuntimeError) as error:
        why = repr(error)
    else:
        if not about:
            raise UserError(f"{path} does not say that it is a classifier of streamclr: {USE_EXPORT}")
        return checked(about, path), weights
    raise UserError(f"{path} is no whole program of torch.export ({why}): {USE_EXPORT}, or {COPY_AGAIN}")
