"""Losses of the projections of two views: NT-Xent, which is the paper's, and others that can take its place."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.options import shown
from streamclr.encoders.inference import infer_views
from streamclr.encoders.projection import ContrastiveModel

# Losses without state: z0[i] and z1[i] are the unit projections of the two views of image i, n x d each.


def nt_xent(z0: Tensor, z1: Tensor, temperature: float = 0.5, reduction: str = "mean") -> Tensor:
    """SimCLR's loss (Eq. 1): each view must find the other view of its image among all views of the batch.

    With `reduction="none"` the result has one loss per anchor, first all of `z0`, then all of `z1`.

    >>> import torch
    >>> from streamclr import nt_xent
    >>> z = torch.nn.functional.normalize(torch.ones(8, 4))  # all views are alike: none can be told from the 15 others
    >>> torch.isclose(nt_xent(z, z), torch.tensor(15.0).log())
    tensor(True)
    """
    _check_pairs(z0, z1)
    if not 0 < temperature < torch.inf:
        raise UserError(f"temperature is {temperature}: use a number above 0")
    if reduction not in ("mean", "sum", "none"):
        raise UserError(f"reduction is {reduction!r}: use 'mean', 'sum' or 'none'")
    z = torch.cat([z0, z1])  # 2n x d
    anchors = torch.arange(len(z), device=z.device)
    positives = anchors.roll(len(z0))
    losses = []
    for rows in anchors.split(4096):  # one round for any usual batch; a bound on memory for a large pool
        logits = z[rows] @ z.T / temperature
        logits[rows - rows[0], rows] = -torch.inf  # a view is not its own negative
        losses.append(F.cross_entropy(logits, positives[rows], reduction="none"))
    loss = torch.cat(losses)
    return {"none": loss, "sum": loss.sum(), "mean": loss.mean()}[reduction]


def vicreg(z0: Tensor, z1: Tensor, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0) -> Tensor:
    """VICReg (Bardes et al. 2022, Sec. 3.1): views agree, each dimension varies, no two dimensions say the same.

    Unit vectors are scaled by √d here, so that dimensions of equal spread have the standard deviation 1 that is asked
    of them.

    >>> import torch
    >>> from streamclr import vicreg
    >>> z0, z1 = torch.nn.functional.normalize(torch.randn(2, 16, 4), dim=2)
    >>> vicreg(z0, z0) < vicreg(z0, z1)
    tensor(True)
    """
    n, d = _check_pairs(z0, z1)
    z0, z1 = z0 * d**0.5, z1 * d**0.5
    loss = invariance * F.mse_loss(z0, z1)
    for z in (z0, z1):
        z = z - z.mean(0)
        std = (z.square().mean(0) + 1e-4).sqrt()
        products = z.T @ z / n
        off_diagonal = products.square().sum() - products.diagonal().square().sum()
        loss = loss + variance / 2 * F.relu(1 - std).mean() + covariance * off_diagonal / d
    return loss


def barlow_twins(z0: Tensor, z1: Tensor, redundancy: float = 0.005) -> Tensor:
    """Barlow Twins (Zbontar et al. 2021, Sec. 2): the correlations of the views' dimensions are the identity matrix.

    >>> import torch
    >>> from streamclr import barlow_twins
    >>> z0, z1 = torch.nn.functional.normalize(torch.randn(2, 16, 4), dim=2)
    >>> barlow_twins(z0, z0) < barlow_twins(z0, z1)
    tensor(True)
    """
    n, _ = _check_pairs(z0, z1)
    x0, x1 = ((z - z.mean(0)) * (z.var(0, correction=0) + 1e-8).rsqrt() for z in (z0, z1))
    correlation = x0.T @ x1 / n  # d x d
    diagonal = correlation.diagonal()
    off_diagonal = correlation.square().sum() - diagonal.square().sum()
    return (diagonal - 1).square().sum() + redundancy * off_diagonal


def _check_pairs(z0: Tensor, z1: Tensor) -> tuple[int, int]:
    """n and d."""
    if z0.shape != z1.shape or z0.ndim != 2 or not len(z0):
        raise UserError(
            f"the views' projections are {tuple(z0.shape)} and {tuple(z1.shape)}: give two of n x d, n at least 1"
        )
    return z0.shape[0], z0.shape[1]


# ----------------------------------------------------------------------------------------------------------------------
# Losses with weights or state of their own.


class Loss(nn.Module):
    """A loss as the learner has it: what is in it learns, and is saved, resumed and undone with the learner's.

    A plain function of z0 and z1 becomes one. A loss with weights or state of its own derives from this: parameters
    learn with the encoder's, parameters without gradient and buffers are its state.

    target: a network that encodes the views too, in eval mode and without gradient; its projections of them come to
        `forward` as t0 and t1.

    >>> import torch
    >>> from streamclr import Learner, Loss, resnet18
    >>> class Agreement(Loss):
    ...     def forward(self, z0, z1):
    ...         return (z0 - z1).square().sum(1).mean()
    >>> learner = Learner(resnet18(width=4), buffer=8, loss=Agreement())
    >>> step = learner.learn_many(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8))
    >>> 0 <= step.loss <= 4
    True
    """

    def __init__(self, function: Callable[..., Tensor] | None = None):
        super().__init__()
        self.function = function
        self.target: nn.Module | None = None

    def __repr__(self) -> str:
        if self.function is None:
            return shown(self)
        return f"Loss({getattr(self.function, '__name__', self.function)})"

    def begin(self, model: ContrastiveModel) -> None:
        """Called once, before the first step: make the parts that depend on the model."""

    def forward(self, z0: Tensor, z1: Tensor, *targets: Tensor) -> Tensor:
        """The loss of n x d projections, one number."""
        assert self.function is not None
        return self.function(z0, z1, *targets)

    def follow(self, model: ContrastiveModel) -> None:
        """Called after each update."""

    def targets(self, views: Callable[[slice], Tensor], n: int, chunk_size: int | None) -> tuple[Tensor, ...]:
        """t0 and t1 of n views, which are made in chunks; none without a target network."""
        if self.target is None:
            return ()
        step = chunk_size or n
        return torch.cat([infer_views(self.target, views(slice(i, i + step))) for i in range(0, n, step)]).chunk(2)

    def state(self) -> dict[str, Tensor]:
        """What changes without being learned, by the names in the state dict."""
        learned = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: tensor for name, tensor in self.state_dict().items() if name not in learned}


class TargetNetwork(Loss):
    """A loss whose target network is a moving average of the model, its BatchNorm statistics too (Cai et al. 2021).

    >>> import torch
    >>> from streamclr import Learner, TargetNetwork, resnet18
    >>> class Follow(TargetNetwork):
    ...     def forward(self, z0, z1, t0, t1):
    ...         return (z0 - t1).square().sum(1).mean()
    >>> learner = Learner(resnet18(width=4), buffer=8, loss=Follow(momentum=0.9))
    >>> step = learner.learn_many(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8))
    >>> any(parameter.requires_grad for parameter in learner.loss.target.parameters())
    False
    """

    def __init__(self, momentum: float = 0.99):
        super().__init__()
        if not 0 <= momentum < 1:
            raise UserError(f"momentum is {momentum}: use 0 (the model itself) or more, below 1")
        self.momentum = momentum

    def begin(self, model: ContrastiveModel) -> None:
        self.target = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def follow(self, model: ContrastiveModel) -> None:
        assert self.target is not None
        for own, new in zip(self.target.state_dict().values(), model.state_dict().values(), strict=True):
            if own.is_floating_point():
                own.lerp_(new, 1 - self.momentum)
            else:
                own.copy_(new)


class BYOL(TargetNetwork):
    """BYOL (Grill et al. 2020, Sec. 3.1): a predictor finds the target network's projection of the other view.

    >>> import torch
    >>> from streamclr import BYOL, Learner, resnet18
    >>> learner = Learner(resnet18(width=4), buffer=8, loss=BYOL(momentum=0.9))
    >>> step = learner.learn_many(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8))
    >>> 0 <= step.loss <= 8
    True
    """

    def __init__(self, momentum: float = 0.99, width: int = 256):
        super().__init__(momentum)
        if width < 1:
            raise UserError(f"width is {width}: use at least 1 hidden unit of the predictor")
        self.width = width

    def begin(self, model: ContrastiveModel) -> None:
        super().begin(model)
        d = model.projection_size
        hidden = nn.Linear(d, self.width), nn.BatchNorm1d(self.width), nn.ReLU()
        self.predictor = nn.Sequential(*hidden, nn.Linear(self.width, d)).to(model.mean)

    def forward(self, z0: Tensor, z1: Tensor, *targets: Tensor) -> Tensor:
        p0, p1 = F.normalize(self.predictor(torch.cat([z0, z1])), dim=1).chunk(2)
        t0, t1 = targets
        return ((p0 - t1).square().sum(1) + (p1 - t0).square().sum(1)).mean()


def checked_loss(value: Any) -> Tensor:
    """What a loss returned, if it is one number."""
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        what += " without gradient" if isinstance(value, Tensor) and not value.ndim else ""
        raise UserError(f"the loss returned {what}: return one number with gradient, as loss.mean() has it")
    return value
