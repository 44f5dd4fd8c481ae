"""Adam by torch's own function, without `torch.optim.Optimizer`, which imports the compiler (70 MB, one second)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from streamclr.base.errors import UserError

DEFAULTS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}


class Adam:
    """Adam (Kingma and Ba 2015) with L2 weight decay, fused, so that a step allocates nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.lr, self.weight_decay = lr, weight_decay
        self.n_steps = [torch.zeros((), device=parameter.device) for parameter in self.parameters]
        self.means, self.squares = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self._keep_gradients = False

    def keep_gradients(self) -> None:
        """Allocate the gradients once, now, so that a memory plan counts them."""
        self._keep_gradients = True
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            if self._keep_gradients and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self._adam(self._used(), self.lr, self.weight_decay)

    def _used(self) -> list[tuple[nn.Parameter, Tensor, Tensor, Tensor]]:
        """The parameters that have a gradient, with their state: some may not be in the graph."""
        state = zip(self.parameters, self.means, self.squares, self.n_steps, strict=True)
        return [columns for columns in state if columns[0].grad is not None]

    def _adam(self, used: list[tuple[nn.Parameter, Tensor, Tensor, Tensor]], lr: float, weight_decay: float) -> None:
        if not used:
            return
        parameters, means, squares, n_steps = (list(column) for column in zip(*used, strict=True))
        gradients = [parameter.grad for parameter in parameters]
        settings = DEFAULTS | {"lr": lr, "weight_decay": weight_decay}
        adam(parameters, gradients, means, squares, [], n_steps, fused=True, **settings)

    def state_dict(self, copy: bool = True) -> dict[str, Any]:
        return {name: [t.clone() if copy else t for t in column] for name, column in self._columns.items()}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a state that does not fit the parameters."""
        for name, column in self._columns.items():
            saved, own = ([list(tensor.shape) for tensor in tensors] for tensors in (state.get(name, []), column))
            if saved != own:
                i = next((i for i, (a, b) in enumerate(zip(saved, own, strict=False)) if a != b), None)
                what = f"{len(saved)} {name}, not {len(own)}" if i is None else f"{name} of {saved[i]}, not {own[i]}"
                raise UserError(f"the saved state does not fit the model: its optimizer has {what}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state_dict(state)
        for name, column in self._columns.items():
            for tensor, value in zip(column, state[name], strict=True):
                tensor.copy_(value)

    @property
    def _columns(self) -> dict[str, list[Tensor]]:
        return {"n_steps": self.n_steps, "means": self.means, "squares": self.squares}
