"""Stage two: a classifier from few labels on the frozen encoder, probes, and the supervised baseline (Sec. IV-A)."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.encoder import ContrastiveModel, infer, seeded
from streamclr.errors import UserError
from streamclr.frame import BadFrame
from streamclr.progress import Progress
from streamclr.sources.dataset import Images, readable
from streamclr.views import StrongViews


@dataclass(frozen=True)
class Accuracy:
    top1: float
    per_class: tuple[float, ...]  # NaN for a class with no test image

    @classmethod
    def of(cls, predicted: Tensor, labels: Tensor, n_classes: int) -> "Accuracy":
        right = (predicted == labels).double()
        per_class = tuple(float(right[labels == label].mean()) for label in range(n_classes))
        return cls(float(right.mean()), per_class)


class Classifier(nn.Module):
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


class Extracted(NamedTuple):
    """Of the labelled images that can be read: features (n x d on the CPU), labels, and their numbers."""

    features: Tensor
    labels: Tensor
    numbers: Tensor


def extract(model: ContrastiveModel, images: Images, numbers: Tensor | None = None) -> Extracted:
    """Features of labelled images: computed once, not augmented, the encoder frozen in eval mode."""
    numbers = torch.arange(len(images)) if numbers is None else numbers
    parts, read = [], []
    bad: dict[int, BadFrame] = {}
    with Progress("features", len(numbers)) as bar:
        for chunk in numbers.split(1024):
            pixels, good, worse = readable(images, chunk.numpy())
            if len(good):
                parts.append(infer(model, torch.from_numpy(pixels), model.features).cpu())
            read.append(good)
            bad |= worse
            bar.advance(len(chunk))
    tell_left_out(bad, len(numbers))
    kept = np.concatenate(read)
    return Extracted(torch.cat(parts), torch.from_numpy(images.labels[kept]), torch.from_numpy(kept))


def tell_left_out(bad: dict[int, BadFrame], n: int) -> None:
    if not bad:
        return
    message = f"{len(bad)} of {n} labelled images cannot be read; {next(iter(bad.values()))}"
    if len(bad) == n:
        raise UserError(message)
    _say_once(f"left out: {message}")


@cache
def _say_once(message: str) -> None:
    print(message, file=sys.stderr)


def train_head(
    features: Tensor,
    labels: Tensor,
    n_classes: int,
    epochs: int = 500,
    lr: float = 3e-4,
    batch_size: int = 256,
    seed: int = 0,
    quiet: bool = False,
) -> Classifier:
    """The paper's classifier: Adam on the labelled features for 500 epochs.

    The gradient and Adam are written out: 100,000 steps on a layer this small are all overhead otherwise.
    """
    head = Classifier(features.shape[1], n_classes)
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


def linear_probe(features: Tensor, labels: Tensor, n_classes: int, decay: float = 1e-3) -> Classifier:
    """Logistic regression to convergence: what is linearly readable from the features, whatever the optimizer."""
    probe = Classifier(features.shape[1], n_classes)
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


def train_supervised(
    encoder: Callable[[], nn.Module],
    images: Images,
    numbers: Tensor,
    epochs: int = 100,
    lr: float = 1e-3,
    batch_size: int = 128,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[ContrastiveModel, Classifier]:
    """The supervised baseline, first reading: a new encoder and a linear layer, end to end on the labels alone.

    The views are crops of at least half of the image and flips. The second reading, a head on an untrained frozen
    encoder, is `train_head` on the features of a new encoder.
    """
    with seeded(seed):
        model = ContrastiveModel(encoder()).to(device)
    head = Classifier(model.n_features, len(images.classes)).to(device)
    optimizer = torch.optim.Adam([*model.encoder.parameters(), *head.parameters()], lr=lr, weight_decay=1e-4)
    views = StrongViews(scale=(0.5, 1.0), jitter=0, grey=0, blur=0)
    generator = torch.Generator(device).manual_seed(seed)
    read, good, bad = readable(images, numbers.numpy())
    tell_left_out(bad, len(numbers))
    pixels, labels = (torch.from_numpy(array).to(device) for array in (read, images.labels[good]))
    with Progress(f"supervised on {len(numbers):,} labels, epochs", epochs) as bar:
        for _ in range(epochs):
            for batch in torch.randperm(len(pixels), generator=generator, device=device).split(batch_size):
                logits = head(model.features(views(pixels[batch], generator)))
                optimizer.zero_grad()
                F.cross_entropy(logits, labels[batch]).backward()
                optimizer.step()
            bar.advance(1)
    return model, head.cpu().eval().requires_grad_(False)


def curve_point(model: ContrastiveModel, train: Images, test: Images) -> float:
    """One point of a learning curve: kNN accuracy on at most 5,000 labelled and 2,000 test images, evenly spaced."""
    known, queries = (
        torch.linspace(0, len(images) - 1, min(len(images), most)).long()
        for images, most in ((train, 5000), (test, 2000))
    )
    features, labels, _ = extract(model, train, known)
    tested = extract(model, test, queries)
    predicted = knn_probe(features, labels, tested.features, len(train.classes))
    return Accuracy.of(predicted, tested.labels, len(train.classes)).top1


def evaluate(
    model: ContrastiveModel, train: Images, test: Images, fractions: tuple[float, ...], seed: int = 0
) -> tuple[dict[str, Any], dict[float, Classifier]]:
    """Stage two: a head for each label fraction, and both probes on all labels; the heads are returned too."""
    n_classes = len(train.classes)
    draws = {fraction: draw_labelled(train.labels, fraction, train.classes, seed) for fraction in fractions}
    known, tested = extract(model, train), extract(model, test)
    heads: dict[float, Classifier] = {}
    labels: dict[str, Any] = {}
    for fraction, numbers in draws.items():
        drawn = torch.isin(known.numbers, numbers)
        if not drawn.any():
            raise UserError(f"none of the {len(numbers)} images of {fraction:.2%} labels can be read: use more labels")
        heads[fraction] = train_head(known.features[drawn], known.labels[drawn], n_classes, seed=seed)
        accuracy = Accuracy.of(heads[fraction](tested.features).argmax(1), tested.labels, n_classes)
        labels[str(fraction)] = {
            "n_labels": int(drawn.sum()),
            "accuracy": accuracy.top1,
            "per_class": dict(zip(train.classes, accuracy.per_class, strict=True)),
        }
    probe = linear_probe(known.features, known.labels, n_classes)
    predicted = {
        "linear_probe": probe(tested.features).argmax(1),
        "knn": knn_probe(known.features, known.labels, tested.features, n_classes),
    }
    probes = {name: Accuracy.of(guess, tested.labels, n_classes).top1 for name, guess in predicted.items()}
    return {"n_test": len(tested.labels), "labels": labels, **probes}, heads


def evaluate_supervised(
    encoder: Callable[[], nn.Module],
    train: Images,
    test: Images,
    fractions: tuple[float, ...],
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, dict[str, float]]:
    """Both readings of the supervised baseline, on the same draws of labels."""
    n_classes = len(train.classes)
    with seeded(seed):
        untrained = ContrastiveModel(encoder()).to(device)
    untrained_tested = extract(untrained, test)
    results = {}
    for fraction in fractions:
        numbers = draw_labelled(train.labels, fraction, train.classes, seed)
        model, head = train_supervised(encoder, train, numbers, seed=seed, device=device)
        features, labels, _ = extract(untrained, train, numbers)
        frozen = train_head(features, labels, n_classes, seed=seed)
        guesses = {"end_to_end": (head, extract(model, test)), "untrained_encoder": (frozen, untrained_tested)}
        results[str(fraction)] = {
            reading: Accuracy.of(classifier(tested.features).argmax(1), tested.labels, n_classes).top1
            for reading, (classifier, tested) in guesses.items()
        }
    return results
