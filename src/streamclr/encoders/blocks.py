"""What an encoder computes, as plain data: chunks, folding and int8 run the blocks of any encoder from it."""

import math
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn

ConvNorm = tuple[nn.Conv2d, nn.Module]


@dataclass(frozen=True, eq=False)
class Block:
    """Convolutions with a norm each and the activation between; then the sum, the activation and the pooling, if any.

    An encoder is its `blocks`, one after the other, and the mean over the pixels. The first is the stem, the only one
    with pooling; it adds nothing.
    """

    stage: int  # a stage works at one resolution; 0 is nearest to the image
    path: list[ConvNorm]
    shortcut: ConvNorm | None = None  # to which the path is added; None: to the input itself
    adds: bool = True
    ends_active: bool = True  # with the activation after the sum
    ceiling: float = math.inf  # of the activation: ReLU has none, ReLU6 has 6
    pool: nn.Module = field(default_factory=nn.Identity)

    def activate_(self, x: Tensor) -> Tensor:
        """In place: no backward pass needs the old value."""
        return F.relu_(x) if self.ceiling == math.inf else F.hardtanh(x, 0, self.ceiling, inplace=True)

    def passes(self, active: Tensor) -> Tensor:
        """Where the activation passes a gradient on, from its output."""
        return active > 0 if self.ceiling == math.inf else (active > 0).logical_and_(active < self.ceiling)

    @property
    def pairs(self) -> list[ConvNorm]:
        return [*self.path, self.shortcut] if self.shortcut else self.path

    @property
    def learns(self) -> bool:
        return any(parameter.requires_grad for pair in self.pairs for part in pair for parameter in part.parameters())

    @property
    def is_fixed(self) -> bool:
        """Whether BatchNorm is a fixed map here: it may be folded into the convolutions, if no gradient is due."""
        return all(isinstance(norm, nn.BatchNorm2d) and not norm.training for _, norm in self.pairs)
