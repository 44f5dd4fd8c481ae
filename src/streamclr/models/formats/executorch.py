"""The classifier as a program of ExecuTorch for phones and small boards: XNNPACK computes, in float or in 8 bits."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streamclr.base.progress import quiet
from streamclr.classifier import Classifier
from streamclr.encoders.resnet import Conv3x3
from streamclr.models.formats.quantise import Calibration
from streamclr.models.formats.reader import PROGRAM_SEAL, about_text, sealed
from streamclr.models.parity import ExportedFunction

MAX_SIDE = 1920  # pixels of an image; ExecuTorch reserves memory for the largest, here 56 MB


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Nothing on the file descriptor of stderr either: the C++ library logs there when it is loaded, and has no setting
    for that. Lines of other threads are lost meanwhile, but an export is a command of its own."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with quiet(), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@quiet_stderr()
def make_executorch(classifier: Classifier, about: dict[str, Any], calibration: Calibration | None) -> bytes:
    """A method `forward` for one image at a time, of any size up to MAX_SIDE, and a method `metadata`.

    int8 has no second look: few accelerators could run it.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    plain = classifier.plain()
    for module in plain.modules():
        if isinstance(module, Conv3x3):  # XNNPACK takes no part of a weight
            module.__class__ = nn.Conv2d  # type: ignore[assignment]
    if calibration is not None:
        _quantise(plain, calibration.ranges)
    example = torch.zeros(1, 3, classifier.size + 1, classifier.size + 2, dtype=torch.uint8)
    height, width = (torch.export.Dim(name, min=1, max=MAX_SIDE) for name in ("height", "width"))
    lowered = to_edge_transform_and_lower(
        torch.export.export(plain, (example,), dynamic_shapes=({2: height, 3: width},)),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),  # the pre-processing computes in int64 and double
        constant_methods={"metadata": torch.tensor(list(about_text(about).encode()), dtype=torch.uint8)},
    )
    return sealed(bytes(lowered.to_executorch().buffer), PROGRAM_SEAL)


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

    # The runtime keeps no reference to the content and the program.
    def run(images: Tensor, _held: object = (content, program)) -> tuple[Tensor, ...]:
        found = [[part.clone() for part in forward.execute([image])] for image in images.split(1)]
        return tuple(map(torch.cat, zip(*found, strict=True)))

    return run


open_executorch = quiet_stderr()(open_program)


def metadata(content: bytes) -> str:
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(content)
    (found,) = program.load_method("metadata").execute([])
    return bytes(found.tolist()).decode()
