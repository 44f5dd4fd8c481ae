"""Stage two (Sec. IV-A): a classifier from few labels on the frozen encoder, and probes of what the encoder knows."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.progress import Progress
from streamclr.base.tensors import load_weights
from streamclr.encoders.inference import infer
from streamclr.encoders.preprocessing import scaled
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import PointwiseConv


@dataclass(frozen=True)
class Accuracy:
    """The share of images whose class is right, in all and of each class.

    >>> import torch
    >>> from streamclr import Accuracy
    >>> Accuracy.of(torch.tensor([0, 1, 1, 1]), labels=torch.tensor([0, 0, 1, 1]), n_classes=2)
    Accuracy(top1=0.75, per_class=(0.5, 1.0))
    """

    top1: float
    per_class: tuple[float, ...]  # NaN for a class with no test image

    @classmethod
    def of(cls, predicted: Tensor, labels: Tensor, n_classes: int) -> "Accuracy":
        right = (predicted == labels).double()
        per_class = tuple(float(right[labels == label].mean()) for label in range(n_classes))
        return cls(float(right.mean()), per_class)


class Head(nn.Module):
    """A linear layer on features that are standardised with the mean and spread of the training features.

    >>> import torch
    >>> from streamclr import Head
    >>> head = Head(n_features=32, n_classes=3)
    >>> head(torch.zeros(5, 32)).shape
    torch.Size([5, 3])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, n_features: int, n_classes: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_features))
        self.register_buffer("std", torch.ones(n_features))
        # The problem is convex, so every start leads to the same minimum, and zeros need no seed.
        self.linear = nn.utils.skip_init(nn.Linear, n_features, n_classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], where: str) -> "Head":
        """A frozen head with the weights of a state dict. where: where they came from, for the error."""
        weight = state.get("linear.weight")
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise UserError(f"{where} has no head: linear.weight, n classes x n features, is missing")
        head = cls(weight.shape[1], weight.shape[0])
        load_weights(head, dict(state), where)
        return head.eval().requires_grad_(False)

    def __repr__(self) -> str:
        return f"Head({self.linear.in_features} features, {self.linear.out_features} classes)"

    def fit_scale(self, features: Tensor, weights: Tensor | None = None) -> None:
        """weights: of the rows; a row of twice the weight counts as two."""
        if weights is None:
            mean, std = features.mean(0), features.std(0, correction=0)
        else:
            shares = (weights / weights.sum())[:, None]
            mean = (shares * features).sum(0)
            std = (shares * (features - mean).square()).sum(0).sqrt()
        self.mean.copy_(mean)
        self.std.copy_(std.clamp(min=1e-6))

    @torch.no_grad()
    def cooled(self, temperature: float | None) -> "Head":
        """Divide the logits from now on: above 1, probabilities are less certain, and the classes stay. None: as is."""
        if temperature is not None:
            self.linear.weight /= temperature
            self.linear.bias /= temperature
        return self

    def forward(self, features: Tensor) -> Tensor:
        return self.linear((features - self.mean) / self.std)


class Classifier(nn.Module):
    """A frozen encoder and a head on it, with class names, and with the pre-processing of images in the graph.

    size: side of the images that the encoder learned from.
    """

    def __init__(self, model: ContrastiveModel, head: Head, classes: Sequence[str], size: int):
        super().__init__()
        if head.linear.out_features != len(classes):
            raise UserError(f"{len(classes)} class names for a head of {head.linear.out_features} classes: use its own")
        if head.linear.in_features != model.n_features:
            raise UserError(
                f"the head takes {head.linear.in_features} features, the encoder has {model.n_features}: use its own"
            )
        self.model, self.head, self.classes, self.size = model, head, list(classes), size
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """uint8, n x 3 x H x W, of any height and width. Returns probabilities, n x classes, and features, n x d."""
        features = self.model.features(scaled(images, self.size) / 255)
        return self.head(features).softmax(1), features

    def probabilities(self, images: Tensor) -> Tensor:
        """Of any number of images of any size, uint8: n x classes, on the CPU. Any thread may call it."""
        if images.shape[-2:] != (self.size, self.size):
            images = scaled(images, self.size).byte()
        return self.head(infer(self.model, images, self.model.features).cpu()).softmax(1)

    def plain(self) -> "Classifier":
        """A copy for export, without what is for training alone: the projection head, and convolutions that leave out
        pixels before they multiply instead of taking strides."""
        plain = copy.deepcopy(self)
        plain.model.head = nn.Sequential()
        for module in list(plain.modules()):
            for name, conv in module.named_children():
                if isinstance(conv, PointwiseConv):
                    strided = nn.Conv2d(conv.in_channels, conv.out_channels, 1, conv.stride, bias=False)  # type: ignore[arg-type]
                    strided.weight = conv.weight
                    setattr(module, name, strided)
        return plain.eval().requires_grad_(False)


# ----------------------------------------------------------------------------------------------------------------------
# Training on few labels.


def checked_labels(labels: Tensor | np.ndarray, n_classes: int, n_images: int | None = None) -> Tensor:
    """Labels as int64. n_images: how many there must be."""
    labels = torch.as_tensor(labels)
    if labels.ndim != 1 or not len(labels):
        raise UserError(f"the shape of the labels is {tuple(labels.shape)}: use one number for each image")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UserError(f"the labels are {labels.dtype}: use whole numbers, as torch.int64")
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= n_classes:
        raise UserError(f"the labels are {least} to {most}: use 0 to {n_classes - 1}, for {n_classes} classes")
    if n_images not in (None, len(labels)):
        raise UserError(f"{len(labels)} labels for {n_images} images: use one for each")
    return labels.long()


def checked_features(features: Tensor | np.ndarray, n_features: int | None = None) -> Tensor:
    """Features as float32, n x d. n_features: the d that they must have."""
    features = torch.as_tensor(features)
    if not features.is_floating_point() or features.ndim != 2 or 0 in features.shape:
        what = f"{features.dtype} of shape {tuple(features.shape)}"
        raise UserError(f"the features are {what}: give floats, n x d, as features_of(learner, images) has them")
    if n_features not in (None, features.shape[1]):
        raise UserError(f"there are {features.shape[1]} features, and {n_features} are known: use the same encoder")
    return features.float()


def draw_labelled(labels: Tensor | np.ndarray, fraction: float, classes: Sequence[str], seed: int = 0) -> Tensor:
    """The indices of a class-balanced draw of a fraction of the images; 1 is all of them.

    >>> import torch
    >>> from streamclr import draw_labelled
    >>> labels = torch.arange(100) % 2
    >>> chosen = draw_labelled(labels, 0.1, classes=("cat", "dog"))
    >>> labels[chosen].bincount()
    tensor([5, 5])
    """
    labels = checked_labels(labels, len(classes))
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
        own = (labels == label).nonzero().flatten()
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

    The gradient and Adam are written out: for a layer this small, autograd would take most of the time.

    >>> import torch
    >>> from streamclr import train_head
    >>> labels = torch.arange(40) % 2
    >>> features = torch.randn(40, 8) + 10 * labels[:, None]  # two classes, far apart
    >>> head = train_head(features, labels, n_classes=2, lr=0.01, epochs=50)
    >>> (head(features).argmax(1) == labels).all()
    tensor(True)
    """
    features = checked_features(features)
    labels = checked_labels(labels, n_classes, len(features))
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
    """Logistic regression to convergence: what is linear in the features, independent of the optimizer.

    >>> import torch
    >>> from streamclr import linear_probe
    >>> labels = torch.arange(40) % 2
    >>> features = torch.randn(40, 8) + 10 * labels[:, None]  # two classes, far apart
    >>> probe = linear_probe(features, labels, n_classes=2)
    >>> (probe(features).argmax(1) == labels).all()
    tensor(True)
    """
    features = checked_features(features)
    labels = checked_labels(labels, n_classes, len(features))
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
    """The class of each query by a vote of its k nearest neighbours, weighted by exp(cosine / 0.07).

    >>> import torch
    >>> from streamclr import knn_probe
    >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> knn_probe(features, labels, queries=torch.tensor([[0.8, 0.2], [0.2, 0.8]]), n_classes=2, k=3)
    tensor([0, 1])
    """
    features = checked_features(features)
    labels = checked_labels(labels, n_classes, len(features))
    queries = checked_features(queries, features.shape[1])
    if k < 1:
        raise UserError(f"k is {k}: use at least 1 neighbour")
    known = F.normalize(features, dim=1)
    predicted = []
    for chunk in F.normalize(queries, dim=1).split(1024):
        similarity, nearest = (chunk @ known.T).topk(min(k, len(known)), dim=1)
        votes = torch.zeros(len(chunk), n_classes).scatter_add_(1, labels[nearest], (similarity / 0.07).exp())
        predicted.append(votes.argmax(1))
    return torch.cat(predicted)
