"""The encoder of an ONNX file in 8 bits; pre-processing, classifier and softmax stay in float."""

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from streamclr.base.statistics import evenly_spaced
from streamclr.views import StrongViews, flip

if TYPE_CHECKING:
    import onnx

N_CALIBRATION = 256  # images of the buffer, at most


class Calibration(NamedTuple):
    """Images that give the ranges of the activations, and others to measure how often int8 changes a class.

    doubts: None for no second look.
    """

    ranges: Tensor
    doubts: Tensor | None

    @classmethod
    def of(cls, buffer: Tensor, pure: bool) -> "Calibration":
        """No image of the buffer is in both. Random views widen the ranges, so that new images are clipped less: that
        nearly halves the error on them (docs/log.md)."""
        images = buffer[evenly_spaced(len(buffer), N_CALIBRATION)]
        if pure:
            return cls(torch.cat([images, *_views(images, 1)]), None)
        ranges, doubts = images[::2], images[1::2] if len(images) > 1 else images
        return cls(torch.cat([ranges, *_views(ranges, 3)]), torch.cat([doubts, flip(doubts), *_views(doubts, 2)]))


def _views(images: Tensor, n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)  # the same run gives the same file
    return [(StrongViews()(images, generator) * 255).round().byte() for _ in range(n)]


def quantise(model: "onnx.ModelProto", images: Tensor) -> "onnx.ModelProto":
    """A copy with QDQ nodes: a scale for each channel of the weights, and one for each tensor of unsigned activations.

    images: give the ranges of the activations, from minimum to maximum; leaving out the last 0.01 % changes more
    classes (docs/log.md).
    """
    import onnx
    import onnxruntime.quantization as ort

    batches = iter([{"images": part.numpy()} for part in images.split(32)])

    class Reader(ort.CalibrationDataReader):
        def get_next(self) -> object:
            return next(batches, None)

    nodes = encoder_nodes(model)
    with tempfile.TemporaryDirectory() as place:  # onnxruntime writes it only to a file
        file = Path(place) / "int8.onnx"
        ort.quantize_static(
            copy.deepcopy(model),  # it changes the model
            file,
            Reader(),
            quant_format=ort.QuantFormat.QDQ,
            op_types_to_quantize=sorted({node.op_type for node in nodes}),
            nodes_to_quantize=[node.name for node in nodes],
            per_channel=True,
            activation_type=ort.QuantType.QUInt8,
            weight_type=ort.QuantType.QInt8,
            calibrate_method=ort.CalibrationMethod.MinMax,
        )
        return onnx.load(file)


def encoder_nodes(model: "onnx.ModelProto") -> "list[onnx.NodeProto]":
    """Convolutions, ReLU and ReLU6, max-pools and the sums of two paths, which a CPU runs faster in 8 bits."""
    weights = {tensor.name for tensor in model.graph.initializer}
    nodes = list(model.graph.node)
    nodes = nodes[[node.op_type for node in nodes].index("Conv") :]
    return [
        node
        for node in nodes
        if node.op_type in ("Conv", "Relu", "Clip", "MaxPool")
        or (node.op_type == "Add" and not weights & set(node.input))
    ]
