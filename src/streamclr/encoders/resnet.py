"""The encoder f (Sec. II-A): ResNets of any width, for small and large images."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.encoders.block_encoder import BlockEncoder
from streamclr.encoders.blocks import Block, ConvNorm

Norm = Literal["batch", "group"]
NORMS = ("batch", "group")
Stem = Literal["small", "half", "imagenet"]
STEMS = {"small": (3, 1), "half": (3, 2), "imagenet": (7, 2)}  # kernel and stride; max-pool after the last alone


def make_norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return GroupNorm(math.gcd(channels, max(1, channels // 16)), channels)  # 16 channels a group, as Wu & He


class GroupNorm(nn.GroupNorm):
    """Its backward pass, channels last, is a segmentation fault in torch 2.13 if the input needs no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not x.requires_grad:  # the norms alone learn, and this is the first
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        return super().forward(x)


class ResidualBlock(nn.Module):
    """A residual block: relu(path(x) + downsample(x)), the path being convolutions with a norm each, relu between."""

    expansion: int  # channels out of the block per channel in its middle

    def __init__(self, path: list[nn.Conv2d], stride: int, norm: Norm):
        super().__init__()
        for i, conv in enumerate(path, 1):
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", make_norm(norm, conv.out_channels))
        n_in, n_out = path[0].in_channels, path[-1].out_channels
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or n_in != n_out:
            pointwise = PointwiseConv(n_in, n_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(pointwise, make_norm(norm, n_out))

    @property
    def path(self) -> list[ConvNorm]:
        *modules, _ = self.children()  # conv1, bn1, conv2, bn2 and so on; downsample is the last
        return list(zip(modules[::2], modules[1::2], strict=True))  # type: ignore[arg-type]

    @property
    def shortcut(self) -> ConvNorm | None:
        """The convolution and norm in `downsample`; None where it is the identity."""
        if not isinstance(self.downsample, nn.Sequential):
            return None
        conv, norm = self.downsample
        assert isinstance(conv, nn.Conv2d)
        return conv, norm

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (conv, norm) in enumerate(self.path):
            y = norm(conv(F.relu_(y) if i else y))  # in place: no backward pass needs the old value
        return F.relu_(y.add_(self.downsample(x)))


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution that keeps the size. On a single pixel only the centre of the kernel counts."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] == (1, 1):  # the last stage at 32 px with the imagenet stem: a quarter of a narrow step
            return F.conv2d(x, self.weight[:, :, 1:2, 1:2])
        return super().forward(x)


class BasicBlock(ResidualBlock):
    expansion = 1

    def __init__(self, n_in: int, n_out: int, stride: int, norm: Norm):
        first = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False) if stride > 1 else Conv3x3(n_in, n_out)
        super().__init__([first, Conv3x3(n_out, n_out)], stride, norm)


class Bottleneck(ResidualBlock):
    expansion = 4

    def __init__(self, n_in: int, n_mid: int, stride: int, norm: Norm):
        first, middle = nn.Conv2d(n_in, n_mid, 1, bias=False), nn.Conv2d(n_mid, n_mid, 3, stride, 1, bias=False)
        last = nn.Conv2d(n_mid, n_mid * self.expansion, 1, bias=False)
        super().__init__([first, middle, last], stride, norm)


class PointwiseConv(nn.Conv2d):
    """A strided 1x1 convolution that drops the pixels first and then convolves with stride 1.

    oneDNN's strided one, channels last, writes past its workspace in the backward pass where the input has few
    channels (uxlfoundation/oneDNN#6035): a crash, a hang or wrong gradients.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x[..., :: self.stride[0], :: self.stride[1]], self.weight)


class ResNet(BlockEncoder):
    """Images to features, with torchvision's parameter names, so that public pre-trained weights load."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        width: int = 64,
        stem: Stem = "small",
        norm: Norm = "batch",
    ):
        super().__init__()
        if width < 1:
            raise UserError(f"width is {width}: use at least 1")
        if stem not in STEMS:
            raise UserError(f"stem is {stem!r}: use 'small' (about 32 px), 'half' or 'imagenet' (larger images)")
        if norm not in NORMS:
            raise UserError(f"norm is {norm!r}: use 'batch' or 'group'")
        kernel, stride = STEMS[stem]
        self.conv1 = nn.Conv2d(3, width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = make_norm(norm, width)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        self.n_features = width

        def layer(depth: int, n_mid: int, stride: int) -> nn.Sequential:
            blocks = []
            for i in range(depth):
                blocks.append(block(self.n_features, n_mid, stride if i == 0 else 1, norm))
                self.n_features = n_mid * block.expansion
            return nn.Sequential(*blocks)

        self.layer1 = layer(depths[0], width, 1)
        self.layer2 = layer(depths[1], 2 * width, 2)
        self.layer3 = layer(depths[2], 4 * width, 2)
        self.layer4 = layer(depths[3], 8 * width, 2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @property
    def stages(self) -> list[list[nn.Module]]:
        return [[self.conv1, self.bn1], [self.layer1], [self.layer2], [self.layer3], [self.layer4]]

    @property
    def blocks(self) -> list[Block]:
        stem = Block(0, [(self.conv1, self.bn1)], adds=False, pool=self.maxpool)
        layers = enumerate((self.layer1, self.layer2, self.layer3, self.layer4), 1)
        return [stem, *(Block(stage, block.path, block.shortcut) for stage, layer in layers for block in layer)]  # type: ignore[arg-type]

    def run_stage(self, number: int, x: Tensor) -> Tensor:
        return super().run_stage(number, x) if number else self.maxpool(F.relu_(self.bn1(self.conv1(x))))


def resnet18(width: int = 64, stem: Stem = "small", norm: Norm = "batch") -> ResNet:
    """ResNet-18 with random weights: images to features.

    width: channels of the first stage; 64 is the ResNet of the literature.
    stem: `small` (3x3, stride 1, no max-pool) for images of about 32 px, `imagenet` (7x7, stride 2, max-pool) above;
        `half` (3x3, stride 2, no max-pool) is a quarter of the work of `small`.
    norm: `batch` or `group`.

    >>> import torch
    >>> from streamclr import resnet18
    >>> encoder = resnet18(width=4, norm="group")
    >>> encoder(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 32])
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), width, stem, norm)


def resnet34(width: int = 64, stem: Stem = "small", norm: Norm = "batch") -> ResNet:
    """ResNet-34 with random weights: images to features.

    width, stem, norm: as of `resnet18`.

    >>> import torch
    >>> from streamclr import resnet34
    >>> encoder = resnet34(width=4, norm="group")
    >>> encoder(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 32])
    """
    return ResNet(BasicBlock, (3, 4, 6, 3), width, stem, norm)


def resnet50(width: int = 64, stem: Stem = "small", norm: Norm = "batch") -> ResNet:
    """ResNet-50 with random weights: images to features.

    width, stem, norm: as of `resnet18`.

    >>> import torch
    >>> from streamclr import resnet50
    >>> encoder = resnet50(width=4, norm="group")
    >>> encoder(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 128])
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), width, stem, norm)
