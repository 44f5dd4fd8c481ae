"""Whether the numbers of a step are finite: checked before the optimizer changes anything."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from streamclr.base.errors import NotFinite


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """By their norms: a gradient that is too large for Adam to square counts as infinite too."""
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    return bool(torch.stack(torch._foreach_norm(floating)).isfinite().all()) if floating else True


def check_finite(tensors: Mapping[str, Sequence[Tensor]], step: int, loss: float) -> None:
    """An update with finite gradients leaves finite weights. tensors: by what they are, for the error."""
    for name, own in tensors.items():
        if not all_finite(own):
            where = f"the {name} at step {step} is not finite (loss {loss:.4g})"
            raise NotFinite(f"{where}: lower lr or raise temperature")
