"""The classifier as an ONNX file, in float or in 8 bits."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamclr.base.progress import quiet
from streamclr.classifier import Classifier
from streamclr.models.formats.quantise import Calibration, quantise
from streamclr.models.formats.reader import about_text, checked_session, sealed, session_of
from streamclr.models.formats.torch_program import export_program
from streamclr.models.parity import ExportedFunction

if TYPE_CHECKING:
    import onnx
    import onnxruntime

OPSET = 18
OUTPUTS = ("probabilities", "features")


@quiet()
def make_onnx(classifier: Classifier, about: dict[str, Any], calibration: Calibration | None) -> bytes:
    exported = export_program(classifier)
    program = torch.onnx.export(
        exported, dynamo=True, opset_version=OPSET, input_names=["images"], output_names=OUTPUTS, verbose=False
    )
    assert program is not None
    model = program.model_proto
    _strip(model)
    if calibration is not None:
        model = _int8(model, calibration)
    model.metadata_props.add(key="streamclr", value=about_text(about))
    return sealed(model.SerializeToString(deterministic=True))


def _int8(model: "onnx.ModelProto", calibration: Calibration) -> "onnx.ModelProto":
    """The same in 8 bits; with a second look if too many classes would change without one."""
    from streamclr.models.formats.second_look import least_margin, look_again  # needs onnx

    quantised = quantise(model, calibration.ranges)
    _strip(quantised)
    if calibration.doubts is not None:
        files = (file.SerializeToString() for file in (model, quantised))
        exact, found = (_outputs(file, OUTPUTS, calibration.doubts) for file in files)
        if least := least_margin(exact, found):
            look_again(quantised, model, least)
    return quantised


def _strip(model: "onnx.ModelProto") -> None:
    """Remove stack traces and other notes of torch; plain names for nodes and sizes."""
    graph = model.graph
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for number, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{number}"
    for value in (graph.input[0], *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    for place, name in ((2, "height"), (3, "width")):
        graph.input[0].type.tensor_type.shape.dim[place].dim_param = name


def open_onnx(content: bytes) -> ExportedFunction:
    """As `predict` opens it, on one thread: a file that `predict` would refuse is never written."""
    return as_function(checked_session(content, Path("the file"), n_threads=1)[0])


def as_function(session: "onnxruntime.InferenceSession", outputs: tuple[str, ...] = OUTPUTS) -> ExportedFunction:
    return lambda images: tuple(map(torch.from_numpy, session.run(outputs, {"images": images.numpy()})))


def looked_again(content: bytes, images: Tensor) -> float | None:
    """The share of these images that an ONNX file runs twice; None if it has no second look."""
    from streamclr.models.formats.second_look import with_doubtful

    if (told := with_doubtful(content)) is None:
        return None
    return float(_outputs(told, ("doubtful",), images).double().mean())


def _outputs(content: bytes, outputs: tuple[str, ...], images: Tensor) -> Tensor:
    """The first of these outputs, for all images."""
    run = as_function(session_of(content, n_threads=1), outputs)
    return torch.cat([run(part)[0] for part in images.split(64)])
