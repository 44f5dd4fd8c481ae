"""Layers that do not learn as convolutions alone: BatchNorm is folded in, and a chunk fits the processor's cache."""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.encoders.blocks import Block

# Bytes of the widest activation of a chunk. MobileNetV2's first two stages on 128 views of 64 px, one thread: 71 ms
# with BatchNorm and all at once, 44 folded, 13 in chunks of 16, 15 of 32, 20 of 8.
CACHE_BYTES = 6 * 2**20
MIN_CHUNK = 8


class FoldedConv:
    """A convolution with its BatchNorm folded in: weight, bias, stride, padding and groups."""

    def __init__(self, conv: nn.Conv2d, norm: nn.Module, dtype: torch.dtype | None = None):
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        gain = norm.weight * (norm.running_var + norm.eps).rsqrt()
        self.weight = (conv.weight * gain.view(-1, 1, 1, 1)).to(dtype)
        self.bias = (norm.bias - norm.running_mean * gain).to(dtype)
        self.stride, self.padding, self.groups = list(conv.stride), [int(p) for p in conv.padding], conv.groups

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, groups=self.groups)


class FoldedBlocks:
    """What blocks compute whose BatchNorm is a fixed map, from the weights as they are now.

    dtype: of the arithmetic; default: the weights' own.
    """

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype | None = None):
        self.dtype = dtype
        self.blocks: list[tuple[Block, list[FoldedConv], FoldedConv | None]] = []
        for block in blocks:
            path = [FoldedConv(conv, norm, dtype) for conv, norm in block.path]
            self.blocks.append((block, path, FoldedConv(*block.shortcut, dtype) if block.shortcut else None))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype or x.dtype, memory_format=torch.channels_last)
        for _, stage in groupby(self.blocks, key=lambda folded: folded[0].stage):
            x = self._stage(list(stage), x)
        return x

    def _stage(self, blocks: list[tuple[Block, list[FoldedConv], FoldedConv | None]], x: Tensor) -> Tensor:
        """Early stages have large maps and go in small chunks; late ones have many weights and go in large chunks."""
        if x.device.type != "cpu":
            return _run(blocks, x)
        widest = max(len(conv.weight) for _, path, _ in blocks for conv in path)
        n = CACHE_BYTES // (4 * widest * x.shape[2] * x.shape[3])
        n = max(MIN_CHUNK, 2 ** (n.bit_length() - 1))  # oneDNN compiles and keeps kernels for every size
        return torch.cat([_run(blocks, chunk) for chunk in x.split(n)]) if n < len(x) else _run(blocks, x)


def _run(blocks: list[tuple[Block, list[FoldedConv], FoldedConv | None]], x: Tensor) -> Tensor:
    for block, path, shortcut in blocks:
        y = x
        for i, conv in enumerate(path):
            y = conv(block.activate_(y) if i else y)
        if block.adds:
            y += shortcut(x) if shortcut else x
        x = block.pool(block.activate_(y) if block.ends_active else y)
    return x
