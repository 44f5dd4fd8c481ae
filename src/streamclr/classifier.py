"""Stage two: a classifier from few labels on the frozen encoder, probes, and the supervised baseline (Sec. IV-A)."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.progress import Progress


@dataclass(frozen=True)
class Accuracy:
    top1: float
    per_class: tuple[float, ...]  # NaN for a class with no test image

    @classmethod
    def of(cls, predicted: Tensor, labels: Tensor, n_classes: int) -> "Accuracy":
        right = (predicted == labels).double()
        per_class = tuple(float(right[labels == label].mean()) for label in range(n_classes))
        return cls(float(right.mean()), per_class)


class Head(nn.Module):
    """A linear layer on standardised features; the mean and spread are those of the features it was trained on."""

    mean: Tensor
    std: Tensor

    def __init__(self, n_features: int, n_classes: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_features))
        self.register_buffer("std", torch.ones(n_features))
        # The problem is convex, so any start leads to one end, and zeros need no seed.
        self.linear = nn.utils.skip_init(nn.Linear, n_features, n_classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def fit_scale(self, features: Tensor) -> None:
        self.mean.copy_(features.mean(0))
        self.std.copy_(features.std(0, correction=0).clamp(min=1e-6))

    def forward(self, features: Tensor) -> Tensor:
        return self.linear((features - self.mean) / self.std)


def draw_labelled(labels: np.ndarray, fraction: float, classes: tuple[str, ...], seed: int = 0) -> Tensor:
    """The indices of a class-balanced draw of a fraction of the images; 1 is all of them."""
    if not 0 < fraction <= 1:
        raise UserError(f"the label fraction is {fraction}: use a number above 0 and up to 1, as 0.01 for 1 %")
    if fraction == 1:
        return torch.arange(len(labels))
    n_each = round(fraction * len(labels) / len(classes))
    if n_each < 1:
        raise UserError(
            f"{fraction:.2%} of {len(labels)} labels is less than one for each of {len(classes)} classes: "
            f"use a fraction of at least {min(1.0, math.ceil(1e4 * len(classes) / len(labels)) / 1e4)}"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label, name in enumerate(classes):
        own = torch.from_numpy(np.flatnonzero(labels == label))
        if len(own) < n_each:
            raise UserError(
                f"class {name!r} has {len(own)} labelled images, and {fraction:.2%} of the labels needs {n_each} of "
                "each class: use a smaller fraction, or 1 for all"
            )
        chosen.append(own[torch.randperm(len(own), generator=generator)[:n_each]])
    return torch.cat(chosen).sort().values


def train_head(
    features: Tensor,
    labels: Tensor,
    n_classes: int,
    epochs: int = 500,
    lr: float = 3e-4,
    batch_size: int = 256,
    seed: int = 0,
    quiet: bool = False,
) -> Head:
    """The paper's classifier: Adam on the labelled features for 500 epochs.

    The gradient and Adam are written out: 100,000 steps on a layer this small are all overhead otherwise.
    """
    head = Head(features.shape[1], n_classes)
    head.fit_scale(features)
    # The bias is the weight of a feature that is always 1.
    features = F.pad((features - head.mean) / head.std, (0, 1), value=1.0)
    targets = F.one_hot(labels, n_classes).to(features)
    weight, mean, square = (torch.zeros(n_classes, features.shape[1]) for _ in range(3))
    generator = torch.Generator().manual_seed(seed)
    n_steps = 0
    with Progress(f"head on {len(labels):,} labels, epochs", epochs, quiet=quiet) as bar:
        for _ in range(epochs):
            order = torch.randperm(len(features), generator=generator)
            for x, y in zip(features[order].split(batch_size), targets[order].split(batch_size), strict=True):
                n_steps += 1
                gradient = (weight @ x.T).softmax(0).sub_(y.T).div_(len(x)) @ x  # of the mean cross-entropy
                mean.lerp_(gradient, 0.1)
                square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                scale = (square / (1 - 0.999**n_steps)).sqrt_().add_(1e-8)
                weight.addcdiv_(mean, scale, value=-lr / (1 - 0.9**n_steps))
            bar.advance(1)
    with torch.no_grad():
        head.linear.weight.copy_(weight[:, :-1])
        head.linear.bias.copy_(weight[:, -1])
    return head.eval().requires_grad_(False)


def linear_probe(features: Tensor, labels: Tensor, n_classes: int, decay: float = 1e-3) -> Head:
    """Logistic regression to convergence: what is linearly readable from the features, whatever the optimizer."""
    probe = Head(features.shape[1], n_classes)
    probe.fit_scale(features)
    features = (features - probe.mean) / probe.std
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(probe.linear(features), labels) + decay * probe.linear.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return probe.eval().requires_grad_(False)


def knn_probe(features: Tensor, labels: Tensor, queries: Tensor, n_classes: int, k: int = 20) -> Tensor:
    """The class of each query by a vote of its k nearest neighbours, weighted by exp(cosine / 0.07)."""
    known = F.normalize(features, dim=1)
    predicted = []
    for chunk in F.normalize(queries, dim=1).split(1024):
        similarity, nearest = (chunk @ known.T).topk(min(k, len(known)), dim=1)
        votes = torch.zeros(len(chunk), n_classes).scatter_add_(1, labels[nearest], (similarity / 0.07).exp())
        predicted.append(votes.argmax(1))
    return torch.cat(predicted)
