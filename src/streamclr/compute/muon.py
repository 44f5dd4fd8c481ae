"""Muon: the optimizer of the recipe `device`. From scratch it needs less than half of Adam's steps (docs/log.md)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from streamclr.compute.adam import Adam

MOMENTUM = 0.9
ADAM_SHARE = 0.05  # of the learning rate, for what is not a matrix
# Of the Newton-Schulz iteration x -> a x + b x³ + c x⁵, which moves every singular value near 1 in five rounds.
A, B, C, ROUNDS = 3.4445, -4.7750, 2.0315, 5


class Muon(Adam):
    """Muon (Jordan et al. 2024): each matrix moves along its momentum with all singular values made about equal.

    A convolution counts as a matrix, with a row for each channel that comes out. Biases and the weights of norms move
    as Adam would move them. Weight decay is taken from the weights, not added to the gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0):
        super().__init__(parameters, lr, weight_decay)
        for i, parameter in enumerate(self.parameters):
            if parameter.ndim > 1:  # a matrix has no use for squares
                self.squares[i] = parameter.new_empty(0)

    @torch.no_grad()
    def step(self) -> None:
        used = self._used()
        self._adam([columns for columns in used if columns[0].ndim < 2], ADAM_SHARE * self.lr, weight_decay=0.0)
        for parameter, momentum, _, n_steps in used:
            if parameter.ndim < 2:
                continue
            assert parameter.grad is not None
            n_steps += 1
            momentum.mul_(MOMENTUM).add_(parameter.grad)
            ahead = parameter.grad.add(momentum, alpha=MOMENTUM).flatten(1)  # Nesterov's
            rows, columns = ahead.shape
            parameter.mul_(1 - self.lr * self.weight_decay)
            size = self.lr * max(1.0, rows / columns) ** 0.5
            parameter.add_(orthogonal(ahead).view_as(parameter), alpha=-size)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values moved near 1.

    The iteration is done on the smaller Gram matrix, which takes half the time of one on the matrix itself.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    matrix = matrix / (matrix.norm() + 1e-7)
    gram, product = matrix @ matrix.T, torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    identity = product
    for _ in range(ROUNDS):
        factor = A * identity + B * gram + C * (gram @ gram)
        product, gram = factor @ product, factor @ gram @ factor
    return product @ matrix
