"""An encoder that is its stages one after the other: each runs in the way that costs least."""

import torch
from torch import Tensor, nn

from streamclr.encoders.blocks import Block
from streamclr.encoders.folded import FoldedBlocks
from streamclr.encoders.fused import can_fuse, learn_block

# With fewer images folding takes longer than it saves. A single frame is classified by the layers as they are.
MIN_IMAGES = 8


class BlockEncoder(nn.Module):
    """An encoder that is its stages one after the other, and then the mean over the pixels.

    Derived classes have `stages` and `blocks`, which say what a stage computes. The first stages that neither learn nor
    gather statistics, which are all of them in inference, run folded.
    """

    n_features: int

    @property
    def stages(self) -> list[list[nn.Module]]:
        """The layers by resolution, the first nearest to the image."""
        raise NotImplementedError

    @property
    def blocks(self) -> list[Block]:
        raise NotImplementedError

    def run_stage(self, number: int, x: Tensor) -> Tensor:
        for layer in self.stages[number]:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.early(x))

    @property
    def n_frozen(self) -> int:
        """How many of the first stages do not learn."""
        return next((block.stage for block in self.blocks if block.learns), len(self.stages))

    @property
    def _is_watched(self) -> bool:
        """Whether somebody wants to see every layer."""
        return torch.compiler.is_compiling() or any(module._forward_hooks for module in self.modules())

    @property
    def n_fixed(self) -> int:
        """How many of the first stages are a fixed map."""
        if self._is_watched:
            return 0
        with_gradient = torch.is_grad_enabled()
        changes = (block.stage for block in self.blocks if not block.is_fixed or (with_gradient and block.learns))
        return next(changes, len(self.stages))

    def early(self, x: Tensor) -> Tensor:
        """Standardised images to what enters the first stage that is no fixed map."""
        x = x.contiguous(memory_format=torch.channels_last)  # two thirds of the time in a narrow encoder
        n = self.n_fixed
        if n and len(x) >= MIN_IMAGES:
            return FoldedBlocks([block for block in self.blocks if block.stage < n])(x)
        for number in range(n):
            x = self.run_stage(number, x)
        return x

    def late(self, x: Tensor) -> Tensor:
        """What `early` gave to features, n x n_features."""
        fuse = torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type) and not self._is_watched
        for number in range(self.n_fixed, len(self.stages)):
            blocks = [block for block in self.blocks if block.stage == number]
            if fuse and all(map(can_fuse, blocks)):
                for block in blocks:
                    x = learn_block(block, x)
            else:
                x = self.run_stage(number, x)
        return x.mean((2, 3), keepdim=True).flatten(1)
