"""MobileNetV2 (Sandler et al. 2018), the encoder of choice for a device: public weights, 2.2 million parameters."""

from torch import Tensor, nn

from streamclr.encoders.block_encoder import BlockEncoder
from streamclr.encoders.blocks import Block, ConvNorm

# Of each group of blocks: expansion, channels, blocks, stride of the first (Table 2 of the paper).
GROUPS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
STAGE_ENDS = (2, 4, 7, 14, 19)  # in `features`: a stage works at one resolution


class ConvNormReLU(nn.Sequential):
    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int = 1, groups: int = 1):
        conv = nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(n_out), nn.ReLU6(inplace=True))

    def block(self, stage: int) -> Block:
        return Block(stage, _convolutions(self), adds=False, ceiling=6)


class InvertedResidual(nn.Module):
    """1x1 to more channels, 3x3 on each of them alone, 1x1 to few; added to the input where the shapes are equal."""

    def __init__(self, n_in: int, n_out: int, stride: int, expansion: int):
        super().__init__()
        n_mid = n_in * expansion
        self.adds = stride == 1 and n_in == n_out
        widen = [ConvNormReLU(n_in, n_mid, 1)] if expansion > 1 else []
        filter_ = ConvNormReLU(n_mid, n_mid, 3, stride, groups=n_mid)
        self.conv = nn.Sequential(*widen, filter_, nn.Conv2d(n_mid, n_out, 1, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)

    def block(self, stage: int) -> Block:
        return Block(stage, _convolutions(self), adds=self.adds, ends_active=False, ceiling=6)


def _convolutions(module: nn.Module) -> list[ConvNorm]:
    found = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.BatchNorm2d)]
    return list(zip(found[::2], found[1::2], strict=True))  # type: ignore[arg-type]


class MobileNetV2(BlockEncoder):
    """Images to features, with torchvision's parameter names, so that its public weights load."""

    n_features = 1280

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvNormReLU(3, 32, 3, 2)]
        n_in = 32
        for expansion, n_out, n_blocks, stride in GROUPS:
            for i in range(n_blocks):
                layers.append(InvertedResidual(n_in, n_out, stride if i == 0 else 1, expansion))
                n_in = n_out
        self.features = nn.Sequential(*layers, ConvNormReLU(n_in, self.n_features, 1))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    @property
    def stages(self) -> list[list[nn.Module]]:
        layers, starts = list(self.features), (0, *STAGE_ENDS[:-1])
        return [layers[start:end] for start, end in zip(starts, STAGE_ENDS, strict=True)]

    @property
    def blocks(self) -> list[Block]:
        return [layer.block(number) for number, stage in enumerate(self.stages) for layer in stage]  # type: ignore[operator]


def mobilenet_v2() -> MobileNetV2:
    """MobileNetV2 with random weights; `Learner("mobilenet_v2")` has the public ones.

    >>> import torch
    >>> from streamclr import mobilenet_v2
    >>> mobilenet_v2()(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 1280])
    """
    return MobileNetV2()
