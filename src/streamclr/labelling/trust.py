"""How far a page can be trusted: which pictures it may offer as look-alikes, and when more labels no longer help."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from streamclr.base.statistics import wilson
from streamclr.linear import fit_linear, folds_of

# Look-alikes. The similarity is the cosine of directions (order.py); measured in docs/log.md.
USUAL_SIMILARITY = 0.92  # from which pictures are of one class on streams that nobody has labelled yet
SIMILARITIES = torch.arange(0.98, 0.48, -0.02)
MIN_PAIRS, RIGHT_PAIRS = 20, 0.95  # answered pairs that must be as similar, and the share of them that is of one class
MAX_COMPARED = 1000  # answers, the newest

# More labels.
MIN_SETTLED_LABELS = 20
MAX_CHANGE = 0.05  # of the other pictures may get another class by twice as many labels, with 97.5 % certainty


def least_similarity(directions: Tensor, labels: Tensor) -> float:
    """The similarity from which two pictures may be taken to be of one class.

    The answers decide: as low as the pairs of answered pictures that are as similar, or more, are of one class.

    directions: of the answered pictures, n x d, of length 1, the oldest first.
    """
    directions, labels = directions[-MAX_COMPARED:], labels[-MAX_COMPARED:]
    first, second = torch.triu_indices(len(labels), len(labels), 1)
    similarity = (directions @ directions.T)[first, second]
    is_one_class = labels[first] == labels[second]
    least = USUAL_SIMILARITY
    for one in SIMILARITIES.tolist():
        pairs = is_one_class[similarity >= one]
        if len(pairs) < MIN_PAIRS:
            continue
        if pairs.float().mean() < RIGHT_PAIRS:
            return one + 0.02 if one >= USUAL_SIMILARITY else least
        least = min(least, one)
    return least


def look_alikes(row: int, others: Sequence[int], directions: Tensor, guesses: Tensor | None, least: float) -> list[int]:
    """Those of the others that should be of one class with the picture of this row, the most similar first.

    guesses: the class of each row by the classifier, if there is one; look-alikes have the same.
    """
    similarity = directions[others] @ directions[row]
    nearest = similarity.argsort(descending=True)[: int((similarity >= least).sum())]
    found = [others[place] for place in nearest.tolist() if others[place] != row]
    return found if guesses is None else [other for other in found if guesses[other] == guesses[row]]


class Settled(NamedTuple):
    """What the classifier of half of the labels says of pictures that have no label."""

    same: int  # pictures that get the same class from the classifier of all labels
    n: int

    @property
    def is_enough(self) -> bool:
        """Whether more labels would hardly change anything."""
        return 1 - wilson(self.same, self.n)[0] <= MAX_CHANGE


def settled(
    features: Tensor, labels: Tensor, weights: Tensor, groups: Tensor, decay: float, others: Tensor, guesses: Tensor
) -> Settled | None:
    """Compare the guesses for other pictures with those of half of the labels; None with too few labels to halve.

    features, labels, weights, groups: what the classifier learned from.
    others: features of the pictures without a label, n x d; guesses: their classes.
    """
    half = folds_of(labels, groups, 2) == 0
    n_classes = int(labels.max()) + 1
    if (weights >= 1).sum() < MIN_SETTLED_LABELS or not len(others):
        return None
    if min(len(labels[half].unique()), len(labels[~half].unique())) < n_classes:
        return None  # a class with one label: nobody knows what another would change
    head = fit_linear(features[half], labels[half], n_classes, weights[half], decay=decay)
    return Settled(int((head(others).argmax(1) == guesses).sum()), len(others))
