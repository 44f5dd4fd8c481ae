"""Fast models for scoring: BatchNorm folded into the convolutions, in half or int8.

A score only ranks images, so it need not be exact. The fast model is made from the weights at every call, which costs
far less than it saves: it is never out of date and not part of any state.
"""

import json
import timeit
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.files import write_json
from streamclr.base.machine import cache_dir, cpu_name
from streamclr.encoders.architecture import is_built_in
from streamclr.encoders.block_encoder import BlockEncoder
from streamclr.encoders.blocks import Block
from streamclr.encoders.compact import Compact
from streamclr.encoders.folded import FoldedBlocks, FoldedConv
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import ResNet

PRECISIONS = ("fp32", "int8", "half")
Projection = Callable[[Tensor], Tensor]  # images in [0, 1] to unit vectors


def projection(model: nn.Module, images: Tensor, precision: str) -> Projection:
    """The model in this precision: images to projections. `fp32` is the model itself.

    images: uint8, those to be projected; int8 takes the ranges of the activations from a few of them.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}: use auto, {', '.join(PRECISIONS)}")
    check_precision(model, precision)
    if precision == "fp32":
        return model
    assert isinstance(model, ContrastiveModel)
    assert is_built_in(model.encoder)
    folded = FoldedEncoder(model.encoder, torch.half if precision == "half" else torch.float32)
    encode: Projection = folded
    if precision == "int8":
        few = images[:: max(1, len(images) // N_CALIBRATION)][:N_CALIBRATION].to(model.mean.device)
        encode = Int8Encoder(folded, model.standardise(few / 255))
    return lambda x: model.project(encode(model.standardise(x)))


def check_precision(model: nn.Module, precision: str) -> None:
    """An error if the model cannot be computed in this precision."""
    if precision not in ("auto", *(possible := precisions(model))):
        raise UserError(f"this encoder cannot be scored in {precision!r}: use auto, {', '.join(possible)}")


def precisions(model: nn.Module) -> tuple[str, ...]:
    """Those that the model has: with BatchNorm a built-in encoder is a fixed map in eval mode.

    MobileNetV2 has no int8: with public weights its scores rank like the exact ones by 0.93 only (Spearman, 256 images
    of GTSRB at 64 px), at half the time.
    """
    encoder = model.encoder if isinstance(model, ContrastiveModel) else model
    if not is_built_in(encoder) or any(isinstance(module, nn.GroupNorm) for module in encoder.modules()):
        return ("fp32",)
    return PRECISIONS if isinstance(encoder, ResNet | Compact) else ("fp32", "half")


class FoldedEncoder(FoldedBlocks):
    """Standardised images to features."""

    def __init__(self, encoder: BlockEncoder, dtype: torch.dtype | None = None):
        super().__init__(encoder.blocks, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).float().mean((2, 3))


# ----------------------------------------------------------------------------------------------------------------------
# int8: unsigned activations with one scale per tensor, signed weights with one scale per channel, oneDNN's kernels,
# which take plain uint8 and int8 tensors; torch's quantized tensors are being removed (pytorch/pytorch#184982).

N_CALIBRATION = 8  # images from which the ranges of the activations are taken


class Int8Conv:
    """A folded convolution on uint8 activations of a given scale and zero point."""

    def __init__(self, conv: FoldedConv, scale: float, zero: int = 0):
        self.conv, self.scale, self.zero = conv, scale, zero
        weight_scale = _weight_scale(conv.weight)
        weight = (conv.weight / weight_scale.view(-1, 1, 1, 1)).round_().to(torch.int8)
        self.geometry = (conv.stride, conv.padding, [1, 1], conv.groups)
        packed = torch.ops.onednn.qconv_prepack(weight, weight_scale, scale, zero, *self.geometry, None)
        self.weight = (zero, packed, weight_scale, torch.zeros(len(weight), dtype=torch.int32))
        self.out_scale, self.out_zero = 1.0, 0  # of its output, set by set_range

    def set_range(self, out: Tensor, summed: bool = False) -> None:
        """Take the range from the output of the float convolution with everything fused to it.

        summed: whether the output will be an operand of a sum, which has one of two zero points (see `add_`).
        """
        self.out_scale, self.out_zero = _scale_and_zero(out)
        if summed and self.out_zero:
            self.out_scale, self.out_zero = max(out.abs().max().item() / 127, 1e-8), 128

    def __call__(self, x: Tensor, relu: bool = True) -> Tensor:
        return torch.ops.onednn.qconv2d_pointwise(
            x, self.scale, *self.weight, self.conv.bias, *self.geometry, self.out_scale, self.out_zero,
            torch.uint8, "relu" if relu else "none", [], "",
        )  # fmt: skip

    def add_(self, x: Tensor, other: Tensor, scale: float, zero: int) -> Tensor:
        """relu(conv(x) + other), written over `other`, whose scale and zero point are given.

        oneDNN compiles and keeps a kernel for every scale and zero point of `other`, and the scale changes with the
        encoder. So everything is divided by that scale, which makes it 1, and only two zero points occur.
        """
        return torch.ops.onednn.qconv2d_pointwise.binary(
            x, self.scale / scale, *self.weight, other, self.conv.bias / scale, *self.geometry,
            self.out_scale / scale, self.out_zero, torch.uint8, 1.0, zero, "sum", 1.0, "relu", [], "",
        )  # fmt: skip


class Int8Encoder:
    """Standardised images to features, every convolution in int8.

    x: standardised images from which the ranges are taken, by one pass in float.
    """

    def __init__(self, folded: FoldedEncoder, x: Tensor):
        x = x.contiguous(memory_format=torch.channels_last)
        scale, zero = self.scale, self.zero = _scale_and_zero(x)
        self.blocks: list[tuple[Block, list[Int8Conv], Int8Conv | None]] = []
        for block, convolutions, folded_shortcut in folded.blocks:
            y, path, shortcut = x, [], None
            in_scale, in_zero = scale, zero
            for conv in convolutions:
                path.append(Int8Conv(conv, scale, zero))
                y = conv(y)
                if conv is not convolutions[-1]:
                    path[-1].set_range(F.relu_(y))
                    scale, zero = path[-1].out_scale, path[-1].out_zero
            if folded_shortcut:
                x = folded_shortcut(x)
                shortcut = Int8Conv(folded_shortcut, in_scale, in_zero)
                shortcut.set_range(x, summed=True)
            x = F.relu_(y.add_(x) if block.adds else y)
            path[-1].set_range(x, summed=True)
            scale, zero = path[-1].out_scale, path[-1].out_zero
            x = block.pool(x)
            self.blocks.append((block, path, shortcut))

    def __call__(self, x: Tensor) -> Tensor:
        scale, zero = self.scale, self.zero
        x = (x / scale).add_(zero).round_().clamp_(0, 255).to(torch.uint8, memory_format=torch.channels_last)
        for block, path, shortcut in self.blocks:
            y, last = x, path[-1]
            for conv in path[:-1]:
                y = conv(y)
            if shortcut:
                x, scale, zero = shortcut(x, relu=False), shortcut.out_scale, shortcut.out_zero
            x = last.add_(y, x, scale, zero) if block.adds else last(y)
            scale, zero = last.out_scale, last.out_zero
            if isinstance(block.pool, nn.MaxPool2d):
                x = _max_pool(x)
        return x.float().mean((2, 3)).mul_(scale)


def _max_pool(x: Tensor) -> Tensor:
    """The imagenet stem's (3x3, stride 2, padding 1); torch has none for uint8 images above 255 pixels in all."""
    for dim in (2, 3):
        n = (x.shape[dim] + 1) // 2
        x = F.pad(x, (0, 0, 1, 1) if dim == 2 else (1, 1, 0, 0))
        a, b, c = (x[:, :, i : i + 2 * n - 1 : 2] if dim == 2 else x[..., i : i + 2 * n - 1 : 2] for i in range(3))
        x = torch.maximum(torch.maximum(a, b), c)
    return x.contiguous(memory_format=torch.channels_last)


def _scale_and_zero(x: Tensor) -> tuple[float, int]:
    """Such that 0 to 255 cover the values, and zero, the padding, is exact."""
    low, high = min(0.0, x.min().item()), max(0.0, x.max().item())
    scale = max((high - low) / 255, 1e-8)
    return scale, round(-low / scale)


def _weight_scale(weight: Tensor) -> Tensor:
    """One scale per channel, as fine as int8 allows without overflow.

    Without VNNI the CPU adds the products of two neighbouring channels in 16 bits: two weights of one sign, together
    above 128, overflow with large activations. Which two are neighbours is the kernel's choice among four.
    """
    n_out, n_in = weight.shape[:2]
    four = F.pad(weight, (0, 0, 0, 0, 0, -n_in % 4)).view(n_out, -1, 4, *weight.shape[2:]).unbind(2)
    largest = torch.maximum(weight.amax((1, 2, 3)), -weight.amin((1, 2, 3)))
    for a, b, c, d in (four, [-w for w in four]):
        one, other = torch.maximum(a, b), torch.maximum(c, d)
        two = torch.maximum(one + other, torch.maximum(a + b, c + d))  # the largest sum of two of the four
        largest = torch.maximum(largest, two.amax((1, 2, 3)))
    return largest.clamp_(min=1e-8).div_(127)


# ----------------------------------------------------------------------------------------------------------------------
# The fastest precision on this machine: measured once, then cached.

MIN_SPEEDUP = 1.2  # over the best so far, for a less exact precision


def fastest(model: nn.Module, images: Tensor) -> str:
    """The precision to score with: half on CUDA; on a CPU the fastest, measured now or cached."""
    if precisions(model) == ("fp32",):
        return "fp32"
    assert isinstance(model, ContrastiveModel)
    if model.mean.device.type != "cpu":
        return "half"
    file, key = cache_dir() / "precision.json", _situation(model, images)
    known = _read(file)
    if key not in known:
        known[key] = _measured(model, images[:32])
        with suppress(OSError):  # without a cache it is measured again next time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, _read(file) | known)
    return known[key]


def _measured(model: ContrastiveModel, images: Tensor) -> str:
    best, least = "fp32", 0.0
    for precision in [name for name in precisions(model) if name != "half"]:  # which is for GPUs
        try:
            project = projection(model, images, precision)
            seconds = min(timeit.repeat(partial(project, images / 255), number=1, repeat=3))  # the first warms up
        except RuntimeError:  # this build of torch or this CPU has no such kernels
            continue
        if precision == "fp32" or seconds * MIN_SPEEDUP < least:
            best, least = precision, seconds
    return best


def _situation(model: ContrastiveModel, images: Tensor) -> str:
    """Everything that the fastest precision depends on."""
    cpu = f"{torch.backends.cpu.get_cpu_capability()} {cpu_name()}"
    sizes = [parameter.numel() for parameter in model.parameters()]
    return (
        f"{cpu}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{sum(sizes)} weights in {len(sizes)} tensors, {images.shape[-2]}x{images.shape[-1]} px"
    )


def _read(file: Path) -> dict[str, str]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in content.items() if v in PRECISIONS} if isinstance(content, dict) else {}
