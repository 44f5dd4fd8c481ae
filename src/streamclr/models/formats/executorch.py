"""The classifier as a program of ExecuTorch for phones and small boards: XNNPACK computes, in float or in 8 bits."""

from typing import Any

import torch
from torch import Tensor

from streamclr.classifier import Classifier
from streamclr.models.formats.quantise import Calibration
from streamclr.models.formats.quiet import quiet_stderr
from streamclr.models.formats.reader import PROGRAM_SEAL, about_text, sealed
from streamclr.models.parity import ExportedFunction

MAX_SIDE = 1920  # pixels of an image; ExecuTorch reserves memory for the largest, here 56 MB


def make_executorch(classifier: Classifier, about: dict[str, Any], calibration: Calibration | None) -> bytes:
    """int8 has no second look: few accelerators could run it."""
    with quiet_stderr():
        program = make_program(classifier, about_text(about), None if calibration is None else calibration.ranges)
    return sealed(program, PROGRAM_SEAL)


def open_executorch(content: bytes) -> ExportedFunction:
    with quiet_stderr():
        return open_program(content)


def make_program(classifier: Classifier, about: str, calibration: Tensor | None) -> bytes:
    """A method `forward` for one image at a time, of any size up to MAX_SIDE, and a method `metadata`.

    calibration: images that give int8 the ranges of the activations; None for float.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    plain = classifier.plain()
    if calibration is not None:
        _quantise(plain, calibration)
    example = torch.zeros(1, 3, classifier.size + 1, classifier.size + 2, dtype=torch.uint8)
    height, width = (torch.export.Dim(name, min=1, max=MAX_SIDE) for name in ("height", "width"))
    lowered = to_edge_transform_and_lower(
        torch.export.export(plain, (example,), dynamic_shapes=({2: height, 3: width},)),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),  # the pre-processing computes in int64 and double
        constant_methods={"metadata": torch.tensor(list(about.encode()), dtype=torch.uint8)},
    )
    return bytes(lowered.to_executorch().buffer)


def _quantise(classifier: Classifier, images: Tensor) -> None:
    """Quantise the encoder: a scale for each channel of the weights and one for each activation."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    pixels = [classifier.model.standardise(image / 255) for image in images.split(1)]
    encoder = torch.export.export(classifier.model.encoder, (pixels[0],)).module()
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(encoder, quantizer)
    with torch.no_grad():
        for image in pixels:
            prepared(image)
    classifier.model.encoder = convert_pt2e(prepared)


def open_program(content: bytes) -> ExportedFunction:
    """Run by ExecuTorch's own runtime, one image at a time."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(content)
    forward = program.load_method("forward")

    def run(
        images: Tensor, _held: object = (content, program)
    ) -> tuple[Tensor, ...]:  # the runtime keeps no reference to them
        found = [[part.clone() for part in forward.execute([image])] for image in images.split(1)]
        return tuple(map(torch.cat, zip(*found, strict=True)))

    return run


def metadata(content: bytes) -> str:
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(content)
    (found,) = program.load_method("metadata").execute([])
    return bytes(found.tolist()).decode()
