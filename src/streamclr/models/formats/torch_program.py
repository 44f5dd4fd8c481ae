"""The classifier as a program of torch.export (.pt2)."""

import io
from typing import Any

import torch

from streamclr.base.progress import quiet
from streamclr.classifier import Classifier
from streamclr.models.formats.quantise import Calibration
from streamclr.models.formats.reader import about_text
from streamclr.models.parity import ExportedFunction


@quiet()
def export_program(classifier: Classifier) -> torch.export.ExportedProgram:
    """The graph, for any number of images of any size, without stack traces."""
    example = torch.zeros(2, 3, classifier.size + 1, classifier.size + 2, dtype=torch.uint8)
    n, height, width = (torch.export.Dim(name, min=1) for name in ("n", "height", "width"))
    program = torch.export.export(classifier.plain(), (example,), dynamic_shapes=({0: n, 2: height, 3: width},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


@quiet()
def make_torch(classifier: Classifier, about: dict[str, Any], calibration: Calibration | None) -> bytes:
    content = io.BytesIO()
    torch.export.save(export_program(classifier), content, extra_files={"streamclr": about_text(about)})
    return content.getvalue()


@quiet()
def open_torch(content: bytes) -> ExportedFunction:
    return torch.export.load(io.BytesIO(content)).module()
