"""The global encoder: the mean of the devices' updates, without broken or poisoned ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from streamclr.base.errors import UserError

MAX_LENGTH_RATIO = 5.0  # longer updates, relative to the median length, are rejected
N_LENGTHS_KEPT = 50  # of earlier updates, for rounds with fewer than three
STATISTICS = ("shared", "local")
Weights = dict[str, Tensor]


def is_statistic(name: str) -> bool:
    """Whether it is a running statistic of BatchNorm, not a learned weight."""
    return name.endswith(("running_mean", "running_var"))


def exchanged(model: nn.Module, statistics: str = "shared") -> Weights:
    """The tensors that devices send and receive: the weights of encoder and projection head, and the statistics of
    BatchNorm if they are shared. Its counters and the constants of input scaling stay on the device."""
    learned = {name for name, _ in model.named_parameters()}
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if name in learned or (statistics == "shared" and is_statistic(name))
    }


@dataclass(frozen=True)
class Update:
    """The weights of a device after a round."""

    device: str
    weights: Weights
    n_images: int
    loss: float = math.nan


@dataclass
class Round:
    """The result of one round."""

    number: int
    n_asked: int = 0
    taken: list[str] = field(default_factory=list)  # the devices
    refused: dict[str, str] = field(default_factory=dict)  # device: why
    n_images: int = 0
    loss: float = math.nan  # mean over the images
    moved: float = math.nan  # length of the step of the global encoder


class Average:
    """The global encoder and how it moves.

    weights: the initial ones.
    momentum: server momentum (Hsu et al. 2019): velocity = momentum * velocity + mean step of the devices.
    slow: decay of the moving average that is kept for use; 0 keeps the encoder that the devices continue with.
    most_images: largest weight of one device in the mean, however many images it claims.
    """

    def __init__(self, weights: Weights, momentum: float = 0.0, slow: float = 0.0, most_images: int | None = None):
        for name, value in {"momentum": momentum, "slow": slow}.items():
            if not 0 <= value < 1:
                raise UserError(f"{name} is {value}: use 0 (none) or more, below 1")
        self.momentum, self.slow, self.most_images = momentum, slow, most_images
        self.weights, self.kept = dict(weights), dict(weights)  # to continue with, and for use
        self.velocity = {name: torch.zeros_like(t) for name, t in weights.items() if not is_statistic(name)}
        self.lengths: dict[str, list[float]] = {}  # of the last updates, for weights and statistics
        self.n_rounds = 0

    def take(self, updates: Sequence[Update], n_asked: int = 0) -> Round:
        """One round: reject bad updates, average the rest, move. If none is left, the encoder stays as it is."""
        self.n_rounds += 1
        done = Round(self.n_rounds, n_asked)
        done.refused = {update.device: why for update in updates if (why := self._fault(update))}
        if near := self._near([update for update in updates if update.device not in done.refused], done):
            self._move(near, done)
        return done

    def _fault(self, update: Update) -> str:
        """What is wrong with this update on its own; empty if nothing is."""
        own = {name: (tensor.shape, tensor.dtype) for name, tensor in self.weights.items()}
        if own != {name: (tensor.shape, tensor.dtype) for name, tensor in update.weights.items()}:
            return "weights of another model"
        if not all(bool(tensor.isfinite().all()) for tensor in update.weights.values()):
            return "not finite"
        if any(name.endswith("running_var") and bool((t < 0).any()) for name, t in update.weights.items()):
            return "a negative variance"
        return "" if update.n_images > 0 else "no images"

    def _near(self, near: list[Update], done: Round) -> list[Update]:
        """The updates of usual length. Random weights, for example, are much farther from the global encoder."""
        for kind in ("weights", "statistics"):
            names = [name for name in self.weights if is_statistic(name) == (kind == "statistics")]
            if not names or not near:
                continue
            lengths = {u.device: _length({n: u.weights[n] - self.weights[n] for n in names}) for u in near}
            before = self.lengths.get(kind, [])
            usual = median(lengths.values()) if len(lengths) >= 3 else median(before) if before else math.inf
            far = [device for device, length in lengths.items() if length > MAX_LENGTH_RATIO * usual]
            done.refused |= dict.fromkeys(far, "too far from the others")
            near = [update for update in near if update.device not in far]
            self.lengths[kind] = [*before, *(lengths[u.device] for u in near)][-N_LENGTHS_KEPT:]
        return near

    def _move(self, updates: Sequence[Update], done: Round) -> None:
        most = self.most_images or max(update.n_images for update in updates)
        shares = [min(update.n_images, most) for update in updates]
        total = sum(shares)
        before = self.weights
        self.weights = {}
        for name, own in before.items():
            mean = sum(update.weights[name].double() * (n / total) for update, n in zip(updates, shares, strict=True))
            assert isinstance(mean, Tensor)
            step = mean.to(own.dtype) - own
            if name in self.velocity:  # not for statistics: with momentum a variance could become negative
                self.velocity[name] = step = self.momentum * self.velocity[name] + step
            self.weights[name] = own + step
        self.kept = {name: torch.lerp(t, self.kept[name], self.slow) for name, t in self.weights.items()}
        done.taken = [update.device for update in updates]
        done.n_images = sum(update.n_images for update in updates)
        done.loss = sum(update.loss * n for update, n in zip(updates, shares, strict=True)) / total
        done.moved = _length({name: self.weights[name] - before[name] for name in self.velocity})

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("weights", "kept", "velocity", "lengths", "n_rounds")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own, saved = ({n: t.shape for n, t in weights.items()} for weights in (self.weights, state["weights"]))
        if own != saved:
            raise UserError("the saved rounds are of another encoder: give the options that they were started with")
        self.weights, self.kept, self.velocity = (dict(state[name]) for name in ("weights", "kept", "velocity"))
        self.lengths, self.n_rounds = dict(state["lengths"]), state["n_rounds"]


def _length(weights: Weights) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in weights.values()))
