"""A linear classifier on frozen features: logistic regression, whose decay and temperature are cross-validated."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.classifier import Head, checked_features, checked_labels

# How much the sum of squares of the weights counts beside the mean cross-entropy.
DECAYS = (1e-1, 1e-2, 1e-3, 1e-4)
DEFAULT_DECAY = 1e-2  # with too few labels to hold some back
N_FOLDS = 5
MIN_LABELS, MIN_LABELS_OF_CLASS = 10, 2  # on average; with fewer, none is held back to choose by
MAX_LABELS_FOLDED = 2000  # with more, one fold of them is enough to choose by

# Logits are divided by the temperature with which labels that were held back are most probable, after a look at what it
# is usually: few labels say little, and a classifier of few labels is too sure of itself (docs/log.md).
TEMPERATURES = torch.logspace(-1, 1, 41)
USUAL_TEMPERATURE = 1.3
MIN_LABELS_OF_TEMPERATURE = 10  # held back; with fewer, nobody knows how probable a class is


def fit_linear(
    features: Tensor,
    labels: Tensor,
    n_classes: int,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    decay: float | None = None,
) -> Head:
    """Logistic regression on standardised features, to convergence.

    weights: of the labels: 1 if a person gave it, less if it was spread from another image.
    groups: a number for each label; labels of one group, as frames of one track, are held back together.
    decay: of the weights; default: chosen by cross-validation, and the temperature, too.

    >>> import torch
    >>> from streamclr import fit_linear
    >>> labels = torch.arange(40) % 2
    >>> features = torch.randn(40, 8) + 10 * labels[:, None]  # two classes, far apart
    >>> head = fit_linear(features, labels, n_classes=2)
    >>> (head(features).argmax(1) == labels).all()
    tensor(True)
    """
    features = checked_features(features)
    labels = checked_labels(labels, n_classes, len(features))
    weights = checked_weights(weights, labels)
    temperature = None
    if decay is None:
        validated = cross_validate(features, labels, n_classes, weights, groups)
        decay, temperature = validated.decay, validated.temperature
    head = Head(features.shape[1], n_classes)
    head.fit_scale(features, weights)
    x, basis = _reduced((features - head.mean) / head.std)
    found = _minimum(x, labels, weights, decay, torch.zeros(n_classes, x.shape[1]))
    with torch.no_grad():
        head.linear.weight.copy_(found[:, :-1] if basis is None else found[:, :-1] @ basis.T)
        head.linear.bias.copy_(found[:, -1])
    return head.cooled(temperature).eval().requires_grad_(False)


@dataclass(frozen=True)
class Validation:
    """What labels that were held back say of the linear classifier."""

    decay: float
    guesses: Tensor  # the class of each label by a classifier that did not learn from it; -1: it was not tested
    right: int = 0
    temperature: float | None = None  # None: too few labels tell

    @property
    def n(self) -> int:
        """Labels that were tested."""
        return int((self.guesses >= 0).sum())


def cross_validate(
    features: Tensor, labels: Tensor, n_classes: int, weights: Tensor | None = None, groups: Tensor | None = None
) -> Validation:
    """The best decay and temperature, and what classifiers say of labels that they were not trained on.

    Only labels that a person gave are tested. A label is tested with the decay that is best for the other folds, so
    that the choice does not flatter the result.
    """
    features = checked_features(features)
    labels = checked_labels(labels, n_classes, len(features))
    weights = checked_weights(weights, labels)
    groups = checked_groups(groups, labels)
    given = weights >= 1
    if len(groups.unique()) < N_FOLDS:
        return Validation(DEFAULT_DECAY, torch.full_like(labels, -1))
    decays = DECAYS if are_enough(labels[given]) else (DEFAULT_DECAY,)
    scale = Head(features.shape[1], 1)
    scale.fit_scale(features, weights)
    x, _ = _reduced((features - scale.mean) / scale.std)
    fold = folds_of(labels, groups)
    losses = torch.zeros(N_FOLDS, len(decays))
    guesses = torch.full((len(decays), len(labels)), -1)
    by_temperature, n_comparable = torch.zeros(len(decays), len(TEMPERATURES)), 0
    for k in range(N_FOLDS if len(labels) <= MAX_LABELS_FOLDED else 1):
        known, tested = fold != k, (fold == k) & given
        if len(labels[known].unique()) < 2:
            continue
        # No classifier knows a class that it was not shown: that says nothing about decay and temperature.
        comparable = torch.isin(labels[tested], labels[known])
        n_comparable += int(comparable.sum())
        found = torch.zeros(n_classes, x.shape[1])
        for i, decay in enumerate(decays):  # each begins where the last one ended
            found = _minimum(x[known], labels[known], weights[known], decay, found)
            logits = x[tested] @ found.T
            guesses[i, tested] = logits.argmax(1)
            by_temperature[i] += losses_at(logits[comparable], labels[tested][comparable])
            losses[k, i] = F.cross_entropy(logits[comparable], labels[tested][comparable], reduction="sum")
    of_others = losses.sum(0) - losses if len(labels) <= MAX_LABELS_FOLDED else losses
    guessed = guesses[of_others.argmin(1)[fold], torch.arange(len(labels))]
    best = int(losses.sum(0).argmin())
    temperature = temperature_of(by_temperature[best], n_comparable)
    return Validation(decays[best], guessed, int((guessed == labels).sum()), temperature)


def losses_at(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross-entropies at each of TEMPERATURES."""
    return torch.stack([F.cross_entropy(logits / t, labels, reduction="sum") for t in TEMPERATURES])


def temperature_of(losses: Tensor, n: int) -> float | None:
    """The best temperature. losses: of n labels that were held back, see `losses_at`."""
    if n < MIN_LABELS_OF_TEMPERATURE:
        return None
    return float(TEMPERATURES[(losses + (TEMPERATURES / USUAL_TEMPERATURE).log().square()).argmin()])


def folds_of(labels: Tensor, groups: Tensor, n_folds: int = N_FOLDS) -> Tensor:
    """The fold of each label: groups stay whole, and the groups of a class are dealt out one by one."""
    _, group = groups.unique(return_inverse=True)
    n = int(group.max()) + 1
    label = torch.zeros(n, dtype=torch.long).scatter_(0, group.flip(0), labels.flip(0))  # of its first row
    rank = torch.empty(n, dtype=torch.long)
    rank[label.argsort(stable=True)] = torch.arange(n)
    return rank[group] % n_folds


def are_enough(labels: Tensor) -> bool:
    return len(labels) >= max(MIN_LABELS, MIN_LABELS_OF_CLASS * len(labels.unique()))


def checked_weights(weights: Tensor | None, labels: Tensor) -> Tensor:
    if weights is None:
        return torch.ones(len(labels))
    if weights.shape != labels.shape or not bool((weights > 0).all() and weights.isfinite().all()):
        raise UserError(f"weights of shape {tuple(weights.shape)} for {len(labels)} labels: give a number above 0 each")
    return weights.float()


def checked_groups(groups: Tensor | None, labels: Tensor) -> Tensor:
    if groups is None:
        return torch.arange(len(labels))
    if groups.shape != labels.shape or groups.is_floating_point():
        raise UserError(f"groups of shape {tuple(groups.shape)} for {len(labels)} labels: give a whole number each")
    return groups.long()


def _reduced(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows with a 1 at their end, for the bias. With fewer rows than features: their coordinates in an orthonormal
    basis of the rows (d x n). The best weights lie in it, because any other part only adds to their squares."""
    basis = None
    if len(x) < x.shape[1]:
        basis, coordinates = torch.linalg.qr(x.T)
        x = coordinates.T
    return F.pad(x, (0, 1), value=1.0), basis


def _minimum(x: Tensor, labels: Tensor, weights: Tensor, decay: float, start: Tensor) -> Tensor:
    """Of the weighted mean cross-entropy + decay · |weights|²: n classes x columns of x, the last is the bias."""
    if not x.isfinite().all():  # of an encoder that broke: nothing can be learned, and the search would not end well
        return torch.full_like(start, math.nan)
    found, shares = start.clone(), (weights / weights.sum())[:, None]
    targets = F.one_hot(labels, len(found)).to(x)
    decays = torch.full((x.shape[1],), decay)
    decays[-1] = 0
    optimizer = torch.optim.LBFGS(
        [found],
        max_iter=200,
        history_size=10,
        tolerance_grad=1e-5,
        tolerance_change=1e-8,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:  # the gradient is written out: autograd would take half of the time
        log_p = (x @ found.T).log_softmax(1)
        found.grad = ((log_p.exp() - targets) * shares).T @ x + 2 * decays * found
        return (decays * found.square()).sum() - (shares * targets * log_p).sum()

    optimizer.step(closure)
    return found
