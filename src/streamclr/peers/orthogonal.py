"""Orthogonal gradients: an optimizer that moves by what is new in a gradient."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from streamclr.compute.adam import Adam

BETA = 0.9  # of the moving average of the gradients
TINY = 1e-30  # added to what may be 0


class OrthogonalAdam(Adam):
    """Adam by the part of a gradient that is orthogonal to those before it (Han et al. 2025, Orthogonal-AdamW).

    u_t = g_t - proj(g_t on c_{t-1}) goes to Adam, and c_t = β c_{t-1} + (1 - β) g_t: consecutive frames have
    nearly the same gradient, which would be followed again and again. Each weight tensor is treated by itself. Weight
    decay is Adam's here, not AdamW's.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0):
        super().__init__(parameters, lr, weight_decay)
        self.histories = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, history in zip(self.parameters, self.histories, strict=True):
            if parameter.grad is not None:
                decorrelate(parameter.grad, history)
        super().step()

    @property
    def _columns(self) -> dict[str, list[Tensor]]:
        return super()._columns | {"histories": self.histories}


def decorrelate(gradient: Tensor, history: Tensor) -> None:
    """Both in place, g to u and c_{t-1} to c_t, where g = u + share c_{t-1}."""
    share = (gradient * history).sum() / (history.square().sum() + TINY)
    gradient.addcmul_(history, share, value=-1)
    history.mul_(BETA + (1 - BETA) * share).add_(gradient, alpha=1 - BETA)
