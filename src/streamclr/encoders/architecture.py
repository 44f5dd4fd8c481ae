"""Encoders by name, and all that is needed to build a model again."""

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import torch
from torch import nn

from streamclr.base import plugins
from streamclr.base.errors import UserError
from streamclr.base.options import one_of
from streamclr.encoders.compact import Compact, compact
from streamclr.encoders.mobilenet import MobileNetV2, mobilenet_v2
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.public import is_adapter, make_adapter, resolved_name, short_name
from streamclr.encoders.resnet import STEMS, ResNet, resnet18, resnet34, resnet50

RESNETS: dict[str, Callable[..., ResNet]] = {"resnet18": resnet18, "resnet34": resnet34, "resnet50": resnet50}
SCRATCH_ENCODERS = (*RESNETS, "compact")  # learn from random weights, unless others are given
ENCODERS = (*SCRATCH_ENCODERS, "mobilenet_v2")
ADAPTERS = ("hf:NAME_OR_DIR", "timm:NAME", "package.module:function")


def is_built_in(encoder: nn.Module) -> TypeGuard[ResNet | Compact | MobileNetV2]:
    """Whether its `blocks` say all that it computes; a class derived from these may compute something else."""
    return type(encoder) in (ResNet, Compact, MobileNetV2)


class Architecture(NamedTuple):
    """The options that make a model; the same as those of a run. Only a ResNet has a choice of stem, and only an
    encoder that learns from scratch of width and norm."""

    encoder: str
    width: int | None = None
    stem: str | None = None
    norm: str | None = None
    projection: str = "plain"

    def __str__(self) -> str:
        if self.width is None:
            return f"a {short_name(self.encoder)}"
        stem = f"the {self.stem} stem and " if self.stem else ""
        return f"a {self.encoder} of width {self.width} with {stem}{self.norm} norm"

    @classmethod
    def resolve(
        cls,
        encoder: str,
        size: int,
        width: int | None = None,
        stem: str | None = None,
        norm: str | None = None,
        projection: str | None = None,
    ) -> "Architecture":
        """With every default filled in, for images of this size; what does not fit together is refused."""
        if encoder in RESNETS:
            stem = ("small" if size < 64 else "imagenet") if stem is None else stem
            norm = "batch" if norm is None else norm
            return cls(encoder, 64 if width is None else width, stem, norm, projection or "plain")
        if encoder == "compact":
            _refuse(encoder, stem=stem)
            return cls(encoder, 32 if width is None else width, None, norm or "batch", projection or "batchnorm")
        encoder = plugins.full_name("encoder", encoder, ENCODERS)
        encoder = resolved_name(encoder) if is_adapter(encoder) else _known(encoder)
        _refuse(encoder, width=width, stem=stem, norm=norm)
        return cls(encoder, projection=projection or "batchnorm")

    @property
    def usual_init(self) -> str:
        """What a run starts from unless it is told: `pretrained`, or `random`, which a function of one's own may be."""
        has_own = self.encoder == "mobilenet_v2" or self.encoder.startswith(("hf:", "timm:"))
        return "pretrained" if has_own else "random"

    def make(self) -> nn.Module:
        """The encoder, with random weights; a function of one's own may bring others."""
        if self.encoder in RESNETS:
            return RESNETS[self.encoder](self.width, self.stem, self.norm)
        if self.encoder == "compact":
            return compact(self.width, self.norm)  # type: ignore[arg-type]
        if is_adapter(self.encoder):
            return make_adapter(self.encoder)
        _known(self.encoder)
        return mobilenet_v2()

    def make_model(self, projection_size: int = 128) -> ContrastiveModel:
        """The encoder with its projection head, both with random weights."""
        return ContrastiveModel(self.make(), projection_size, self.projection)

    @classmethod
    def of(cls, model: ContrastiveModel) -> "Architecture":
        encoder = model.encoder
        if isinstance(encoder, MobileNetV2):
            return cls("mobilenet_v2", projection=model.projection)
        if isinstance(encoder, Compact):
            norm = "group" if isinstance(encoder.stem[1], nn.GroupNorm) else "batch"
            return cls("compact", encoder.width, None, norm, model.projection)
        if isinstance(encoder, ResNet):
            conv, shapes = encoder.conv1, _shapes(encoder)
            stem = next(name for name, shape in STEMS.items() if shape == (conv.kernel_size[0], conv.stride[0]))
            norm = "group" if isinstance(encoder.bn1, nn.GroupNorm) else "batch"
            for found in (cls(name, conv.out_channels, stem, norm, model.projection) for name in RESNETS):
                with torch.device("meta"):  # no memory, no random numbers
                    if _shapes(found.make()) == shapes:
                        return found
        raise UserError(f"the encoder is a {type(encoder).__name__}: use {', '.join(ENCODERS)} of streamclr")


def encoder_name(model: ContrastiveModel) -> str:
    """For people: of streamclr's own encoders the name, of others the class."""
    try:
        return Architecture.of(model).encoder
    except UserError:
        return type(model.encoder).__name__


def _refuse(encoder: str, **options: int | str | None) -> None:
    """Options of which this encoder has no choice."""
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name} is {value}, and {encoder} has no choice of it: leave it out")


def _known(encoder: str) -> str:
    if encoder not in ENCODERS:
        raise UserError(f"no encoder {encoder!r}: {one_of(encoder, (*ENCODERS, *ADAPTERS))}")
    return encoder


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}
