"""A compact encoder for learning from scratch on a CPU: few, wide layers and an early stride keep a core busy."""

from torch import nn

from streamclr.base.errors import UserError
from streamclr.encoders.block_encoder import BlockEncoder
from streamclr.encoders.blocks import Block
from streamclr.encoders.resnet import NORMS, BasicBlock, Norm, make_norm


class ConvNormReLU(nn.Sequential):
    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int, norm: Norm):
        conv = nn.Conv2d(n_in, n_out, kernel, stride, 1, bias=False)
        super().__init__(conv, make_norm(norm, n_out), nn.ReLU(inplace=True))

    def block(self, stage: int) -> Block:
        conv, norm, _ = self
        assert isinstance(conv, nn.Conv2d)
        return Block(stage, [(conv, norm)], adds=False)


class Compact(BlockEncoder):
    """Images to features: a strided stem, and three stages of one convolution and one residual pair.

    A ResNet-18 of width 8 has as many operations and fourteen layers too thin for the processor's vectors: docs/log.md
    compares what both learn in a CPU second.
    """

    def __init__(self, width: int = 32, norm: Norm = "batch"):
        super().__init__()
        if width < 2:
            raise UserError(f"width is {width}: use at least 2")
        if norm not in NORMS:
            raise UserError(f"norm is {norm!r}: use {' or '.join(map(repr, NORMS))}")
        self.width, self.n_features = width, 4 * width
        self.stem = ConvNormReLU(3, width // 2, 4, 2, norm)

        def stage(n_in: int, n_out: int, stride: int) -> nn.Sequential:
            return nn.Sequential(ConvNormReLU(n_in, n_out, 3, stride, norm), BasicBlock(n_out, n_out, 1, norm))

        self.stage1 = stage(width // 2, width, 1)
        self.stage2 = stage(width, 2 * width, 2)
        self.stage3 = stage(2 * width, 4 * width, 2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @property
    def stages(self) -> list[list[nn.Module]]:
        return [[self.stem], [self.stage1], [self.stage2], [self.stage3]]

    @property
    def blocks(self) -> list[Block]:
        found = [self.stem.block(0)]
        for number, (first, pair) in enumerate((self.stage1, self.stage2, self.stage3), 1):
            found += [first.block(number), Block(number, pair.path)]  # type: ignore[operator, arg-type]
        return found


def compact(width: int = 32, norm: Norm = "batch") -> Compact:
    """An encoder for learning from scratch on a CPU, with random weights.

    width: channels of the first stage; the stem has half of it, the other stages two and four times as many.
    norm: `batch` or `group`.

    >>> import torch
    >>> from streamclr import compact
    >>> encoder = compact(width=8)
    >>> encoder(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 32])
    """
    return Compact(width, norm)
