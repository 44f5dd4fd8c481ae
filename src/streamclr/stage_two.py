"""Stage two, beyond the paper: fine-tuning of the whole encoder, self-training, and the choice of a classifier."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import one_of
from streamclr.base.progress import Progress
from streamclr.classifier import Head, checked_labels
from streamclr.encoders.inference import checked_images, infer, seeded
from streamclr.encoders.projection import ContrastiveModel, model_of
from streamclr.encoders.stages import set_trained
from streamclr.linear import (
    N_FOLDS,
    are_enough,
    checked_groups,
    checked_weights,
    fit_linear,
    folds_of,
    losses_at,
    temperature_of,
)
from streamclr.views import StrongViews

# Of fine-tuning.
LR = 2e-3
MIN_STEPS, MAX_STEPS, EPOCHS = 420, 840, 20  # as many steps as there are in these epochs of the given labels
WARM_UP_STEPS = 10
BATCH_SIZE = 64  # images
WEIGHT_DECAY = 1e-4
SCALE = (0.5, 1.0)  # smallest and largest share of the image in a view
STRENGTH, JITTER = 0.4, 0.8  # of the colour jitter, and its probability

# Of self-training.
CONFIDENT = 0.8  # a scene counts as labelled if its frames together give its class this probability
MAX_GUESS_WEIGHT = 0.5  # of such a label, beside 1 of one that a person gave

# The simplest first, and what people call them.
KINDS = {"linear": "linear", "finetuned": "fine-tuned", "selftrained": "self-trained"}
CLASSIFIERS = ("auto", *KINDS, "paper")  # the option of a run
ImagesByNumber = Callable[[np.ndarray], np.ndarray | Tensor]  # row numbers in, uint8 images out


def check_classifier(name: str) -> None:
    if name not in CLASSIFIERS:
        raise UserError(f"no classifier {name!r}: {one_of(name, CLASSIFIERS)}")


# ----------------------------------------------------------------------------------------------------------------------
# Fine-tuning.


def fine_tune(
    model: ContrastiveModel,
    images: Tensor | ImagesByNumber,
    labels: Tensor,
    n_classes: int,
    weights: Tensor | None = None,
    steps: int | None = None,
    lr: float = LR,
    seed: int = 0,
    quiet: bool = False,
    train: str = "all",
    head: str = "zeros",
    flip: bool = False,
    smoothing: float = 0.0,
) -> tuple[ContrastiveModel, Head]:
    """A copy of the model and a head, trained end to end on views of the labelled images; the model stays as it is.

    images: uint8, n x 3 x H x W; or a function that gives those of row numbers, if they do not fit into memory.
    weights: an image is drawn as often as its weight says. As factors of the loss they would give the same gradient on
        average, from batches that are filled with images that hardly count.
    steps: updates; default: more of them with more labels that a person gave.
    train: the part of the encoder that learns, see `set_trained`.
    head: `zeros`, or `linear` to begin with `fit_linear` on the features of the model.
    flip: whether views may be mirrored, which changes the meaning of signs and text.
    smoothing: of the labels, 0 to 1.

    >>> import torch
    >>> from streamclr import Learner, features_of, fine_tune, resnet18
    >>> learner = Learner(resnet18(width=4), buffer=8)
    >>> images, labels = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), torch.arange(8) % 2
    >>> tuned, head = fine_tune(learner.model, images, labels, n_classes=2, steps=2)
    >>> head(features_of(tuned, images)).shape
    torch.Size([8, 2])
    """
    model = model_of(model)
    labels = checked_labels(labels, n_classes, len(images) if isinstance(images, Tensor) else None)
    weights = checked_weights(weights, labels)
    if head not in ("zeros", "linear"):
        raise UserError(f"head is {head!r}: use 'zeros' or 'linear'")
    if steps is None:
        steps = min(MAX_STEPS, max(MIN_STEPS, EPOCHS * int((weights >= 1).sum()) // BATCH_SIZE))
    if steps < 1:
        raise UserError(f"steps is {steps}: use at least 1")
    device = model.mean.device
    tuned = copy.deepcopy(model)
    set_trained(tuned, train)
    tuned.train()
    layer = Head(model.n_features, n_classes)
    if head == "linear":
        layer = fit_linear(features_of(model, images, len(labels)), labels, n_classes, weights).requires_grad_()
    layer = layer.to(device).train()
    learning = [p for p in [*tuned.encoder.parameters(), *layer.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=lr, weight_decay=WEIGHT_DECAY)
    views = StrongViews(SCALE, STRENGTH, JITTER, grey=0.0, blur=0.0, flip=flip)
    generator, on_device = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed)
    drawn = _drawn(weights, steps * BATCH_SIZE, generator)
    # The global generator is that of dropout.
    with seeded(seed), Progress(f"fine-tuning on {len(labels):,} labels, steps", steps, quiet=quiet) as bar:
        for step, rows in enumerate(drawn.split(BATCH_SIZE)):
            optimizer.param_groups[0]["lr"] = lr * _schedule(step, steps)
            pixels = views(_rows_of(images, rows).to(device), on_device)
            loss = F.cross_entropy(layer(tuned.features(pixels)), labels[rows].to(device), label_smoothing=smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.advance(1, f"loss {float(loss.detach()):.3f}")
    return tuned.eval().requires_grad_(False), layer.cpu().eval().requires_grad_(False)


class Unlabelled(NamedTuple):
    """Frames of the stream that have no label."""

    images: Tensor | ImagesByNumber
    scenes: Tensor  # the number of the scene of each frame; the frames of a scene have one class


def self_train(
    model: ContrastiveModel,
    teacher: tuple[ContrastiveModel, Head],
    images: Tensor | ImagesByNumber,
    labels: Tensor,
    unlabelled: Unlabelled,
    weights: Tensor | None = None,
    **tuning: Any,
) -> tuple[ContrastiveModel, Head]:
    """Fine-tune a copy of the model on the labels and on what the teacher, fine-tuned on the labels, is sure of.

    A single frame fools a classifier more easily than all frames of a scene do: their probabilities are averaged. The
    guesses of a class count together at most as much as its labels, or the classes that are easy would win over the
    others.
    """
    n_classes, n = teacher[1].linear.out_features, len(labels)
    labels = checked_labels(labels, n_classes)
    rows, guesses = guess_labels(*teacher, unlabelled)

    def image_of(numbers: np.ndarray) -> Tensor:
        parts = torch.from_numpy(numbers)
        is_given = parts < n
        found = [_rows_of(images, parts[is_given])] if is_given.any() else []
        if not is_given.all():
            found.append(_rows_of(unlabelled.images, rows[parts[~is_given] - n]))
        return torch.cat(found)[torch.cat([is_given.nonzero(), (~is_given).nonzero()])[:, 0].argsort()]

    weights = checked_weights(weights, labels)
    of_labels = torch.zeros(n_classes).index_add_(0, labels, weights)  # the weight of each class
    n_guesses = guesses.bincount(minlength=n_classes)
    weights = torch.cat([weights, (of_labels / n_guesses)[guesses].clamp(max=MAX_GUESS_WEIGHT)])
    return fine_tune(model, image_of, torch.cat([labels, guesses]), n_classes, weights, **tuning)


def guess_labels(model: ContrastiveModel, head: Head, unlabelled: Unlabelled) -> tuple[Tensor, Tensor]:
    """The frames of all scenes that the classifier is sure of, and the class of each."""
    _, scene = unlabelled.scenes.unique(return_inverse=True)
    probabilities = head(features_of(model, unlabelled.images, len(scene))).softmax(1)
    sums = torch.zeros(len(scene.unique()), probabilities.shape[1]).index_add_(0, scene, probabilities)
    confidence, label = (sums / sums.sum(1, keepdim=True)).max(1)
    rows = (confidence >= CONFIDENT)[scene].nonzero()[:, 0]
    return rows, label[scene[rows]]


def _schedule(step: int, steps: int) -> float:
    """The share of the learning rate: a linear warm-up, and half a cosine to zero."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * step / steps)) / 2


def _drawn(weights: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n row numbers in random order, each row as often as its weight says, rounded up or down."""
    points = (torch.arange(n, dtype=torch.float64) + torch.rand(1, generator=generator, dtype=torch.float64)) / n
    ends = (weights.double() / weights.double().sum()).cumsum(0)
    rows = torch.searchsorted(ends, points).clamp(max=len(weights) - 1)
    return rows[torch.randperm(n, generator=generator)]


def _rows_of(images: Tensor | ImagesByNumber, rows: Tensor) -> Tensor:
    return checked_images(images[rows] if isinstance(images, Tensor) else images(rows.numpy()), "a labelled image")


def features_of(model: Any, images: Tensor | np.ndarray | ImagesByNumber, n: int | None = None) -> Tensor:
    """Features of images, n x d on the CPU, the encoder frozen in eval mode.

    model: a Learner, its model or its extractor().
    images: uint8, n x 3 x H x W; or a function that gives those of row numbers, and n.

    >>> import torch
    >>> from streamclr import Learner, features_of, resnet18
    >>> learner = Learner(resnet18(width=4), buffer=8)
    >>> features_of(learner, torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)).shape
    torch.Size([8, 32])
    """
    own = model_of(model)
    if not callable(images):
        images = checked_images(images, "the batch")
        n = len(images)
    if n is None:
        raise UserError("n is missing: say how many images the function gives")
    chunks = torch.arange(n).split(256)
    return torch.cat([infer(own, _rows_of(images, rows), own.features).cpu() for rows in chunks])


# ----------------------------------------------------------------------------------------------------------------------
# Which of them.


class Candidate(NamedTuple):
    """A way to train a classifier from labels."""

    kind: str  # of KINDS
    model: ContrastiveModel
    is_public: bool = False  # the encoder as it was before it learned from the stream

    @property
    def name(self) -> str:
        return f"public encoder {KINDS[self.kind]}" if self.is_public else KINDS[self.kind]


class Chosen(NamedTuple):
    """The classifier that was chosen."""

    kind: str  # of KINDS, or "paper"
    head: Head
    why: str  # one sentence
    model: ContrastiveModel | None = None  # an encoder of its own; None: the one that was given
    is_public: bool = False  # that encoder has learned nothing from the stream
    right: int = 0  # of the labels that were held back
    n_held_back: int = 0
    tried: tuple[tuple[str, int], ...] = ()  # each candidate, and how many of them it had right

    def __repr__(self) -> str:
        return f"Chosen({self.why})"

    @property
    def accuracy(self) -> float | None:
        return self.right / self.n_held_back if self.n_held_back else None


def choose_classifier(
    model: ContrastiveModel,
    images: Tensor | ImagesByNumber,
    labels: Tensor,
    n_classes: int,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    public: ContrastiveModel | None = None,
    kinds: Sequence[str] = tuple(KINDS),
    features: Tensor | None = None,
    unlabelled: Unlabelled | None = None,
    **tuning: Any,
) -> Chosen:
    """Train each candidate on four fifths of the labels, test it on the others, and train the best on all of them.

    The groups of labels stay whole, and only labels that a person gave are tested. Of equally good candidates the
    simplest is taken: linear before fine-tuned before self-trained, the adapted encoder before the public one.

    weights, groups, images: see `fit_linear` and `fine_tune`.
    public: the encoder before it learned from the stream, as a further candidate.
    features: those of the images by the model, if they are known.
    unlabelled: other frames of the stream, for self-training; none of a scene that has a label.
    tuning: other options of `fine_tune`.

    >>> import torch
    >>> from streamclr import Learner, choose_classifier, resnet18
    >>> learner = Learner(resnet18(width=4), buffer=8)
    >>> images, labels = torch.randint(256, (20, 3, 16, 16), dtype=torch.uint8), torch.arange(20) % 2
    >>> chosen = choose_classifier(learner.model, images, labels, 2, kinds=("linear", "finetuned"), steps=2)
    >>> chosen.kind in ("linear", "finetuned"), chosen.n_held_back, [name for name, right in chosen.tried]
    (True, 4, ['linear', 'fine-tuned'])
    """
    model = model_of(model)
    labels = checked_labels(labels, n_classes, len(images) if isinstance(images, Tensor) else None)
    weights, groups = checked_weights(weights, labels), checked_groups(groups, labels)
    models = [model] if public is None else [model, public]
    has_others = unlabelled is not None and len(unlabelled.scenes) > 0
    candidates = [Candidate(kind, one, one is public) for kind in KINDS if kind in kinds for one in models]
    # Without other frames to learn from, self-training is fine-tuning; the public encoder never saw the stream.
    candidates = [one for one in candidates if one.kind != "selftrained" or (has_others and not one.is_public)]
    if not candidates and "selftrained" in kinds:
        raise UserError("selftrained needs other frames of the stream, and there are none: use finetuned")
    if not candidates:
        raise UserError(f"kinds is {kinds}: use some of {', '.join(KINDS)}")
    known_features = {} if features is None else {id(model): features}
    done: dict[tuple[Candidate, int], tuple[ContrastiveModel, Head]] = {}  # a teacher may have been a candidate itself

    def trained(one: Candidate, rows: Tensor) -> tuple[ContrastiveModel, Head]:
        if (one, len(rows)) not in done:
            done[one, len(rows)] = train(one, rows)
        return done[one, len(rows)]

    def train(one: Candidate, rows: Tensor) -> tuple[ContrastiveModel, Head]:
        if one.kind == "linear":
            if id(one.model) not in known_features:
                known_features[id(one.model)] = features_of(one.model, images, len(labels))
            own = known_features[id(one.model)][rows]
            return one.model, fit_linear(own, labels[rows], n_classes, weights[rows], groups[rows])
        pixels = images[rows] if isinstance(images, Tensor) else lambda n: images(rows.numpy()[n])
        if one.kind == "finetuned":
            return fine_tune(one.model, pixels, labels[rows], n_classes, weights[rows], **tuning)
        assert unlabelled is not None
        teacher = trained(Candidate("finetuned", one.model), rows)
        return self_train(one.model, teacher, pixels, labels[rows], unlabelled, weights[rows], **tuning)

    held_back = folds_of(labels, groups) == 0
    tested = (held_back & (weights >= 1)).nonzero().flatten()
    tried: dict[str, int] = {}
    temperatures: dict[str, float | None] = {}
    best = candidates[0]
    why = f"{best.name}: {int((weights >= 1).sum())} labels are too few to hold some back"
    if are_enough(labels[weights >= 1]) and len(groups.unique()) >= N_FOLDS and len(tested):
        comparable = torch.isin(labels[tested], labels[~held_back])
        for one in candidates:
            own, head = trained(one, (~held_back).nonzero().flatten())
            logits = head(features_of(own, lambda n: _rows_of(images, tested[n]), len(tested)))
            tried[one.name] = int((logits.argmax(1) == labels[tested]).sum())
            losses = losses_at(logits[comparable], labels[tested][comparable])
            temperatures[one.name] = temperature_of(losses, int(comparable.sum()))
        best = max(candidates, key=lambda one: tried[one.name])  # the first of equals
        others = "".join(f", {name} {right}" for name, right in tried.items() if name != best.name)
        why = f"{best.name}: {tried[best.name]} of {len(tested)} held-back labels right{others}"
    own, head = trained(best, torch.arange(len(labels)))
    if best.kind != "linear":  # a linear one was cross-validated
        head.cooled(temperatures.get(best.name))
    is_given = own is model
    right, n = (tried[best.name], len(tested)) if tried else (0, 0)
    return Chosen(best.kind, head, why, None if is_given else own, best.is_public, right, n, tuple(tried.items()))
