"""Trains a new head on the newest encoder while the run learns; it is served only if it is better than the last."""

import hashlib
import math
import os
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.statistics import evenly_spaced
from streamclr.classifier import Classifier, draw_labelled
from streamclr.encoders.inference import infer
from streamclr.encoders.projection import ContrastiveModel
from streamclr.labelling.candidates import key_of, pixels
from streamclr.labelling.store import Labels
from streamclr.linear import fit_linear
from streamclr.models.versions import Score, Version, Versions
from streamclr.records.plan import RunPlan
from streamclr.scenes import SPREAD_WEIGHT
from streamclr.streams.datasets.images import Images, readable
from streamclr.streams.stream import Stream

MIN_LABELS, MIN_LABELS_OF_CLASS = 10, 3  # with fewer, none is held back
HOLD_BACK_EVERY = 5  # of each class every fifth label is held back
MAX_LABELS = 5000  # of a dataset; the learning curve takes as many
LOOK_EVERY_SECONDS = 1.0  # for new labels, and for a rollback
BATCH_SIZE = 64  # images
NICE = 10  # about a tenth of a busy core; with 19 a head would take an hour
NEVER_LABELS = "no labels at hand, so the frames get no class: with --label-budget a person can give some"
NO_LABELS = "labels of fewer than two classes so far, so the frames get no class yet: streamclr label, or label import"
FAILURES = (UserError, OSError, sqlite3.Error)  # that are reported; the next encoder is tried again


class Answers:
    """A person's labels, from labels.sqlite of a run; other processes write it.

    spread: a label counts for the neighbouring frames of the same scene too.
    """

    def __init__(self, path: Path, spread: bool = True):
        self.path, self.spread = path, spread
        self._labels: Labels | None = None
        self._change: int | None = None  # at the last read

    def changed(self) -> bool:
        """Whether there may be new ones; cheap enough to call every second."""
        labels = self._opened()
        return labels is not None and labels.change() != self._change

    def _opened(self) -> Labels | None:
        """None until somebody opens the labelling page."""
        if self._labels is None and self.path.exists():
            self._labels = Labels(self.path)
        return self._labels

    def read(self) -> dict[str, str]:
        """Class names by key."""
        labels = self._opened()
        if labels is None:
            return {}
        self._change = labels.change()
        answers, names = labels.answers(), labels.classes()  # in this order, so that every answer's class is known
        return {key: names[one.class_id] for key, one in answers.items() if one.class_id is not None}

    def images(self, keys: list[str]) -> tuple[Tensor, list[str]]:
        """Those that can be read, and their keys."""
        assert self._labels is not None
        pictures = {key: self._labels.picture(key) for key in keys}
        found = {key: pixels(picture) for key, picture in pictures.items() if picture is not None}
        return torch.stack(list(found.values())) if found else torch.empty(0), list(found)

    def companions(self, key: str) -> list[Tensor]:
        """The frames of the same scene, which have the same label."""
        assert self._labels is not None
        return [pixels(picture) for picture in self._labels.companions(key)] if self.spread else []

    def close(self) -> None:
        if self._labels is not None:
            self._labels.close()


class DatasetLabels:
    """The labels of a dataset, as `Answers` gives those of a person."""

    def __init__(self, images: Images, numbers: Tensor):
        self._source, self._numbers = images, numbers
        self._is_read = False

    def changed(self) -> bool:
        return not self._is_read

    def read(self) -> dict[str, str]:
        self._is_read = True
        return {str(n): self._source.classes[int(self._source.labels[n])] for n in self._numbers.tolist()}

    def images(self, keys: list[str]) -> tuple[Tensor, list[str]]:
        images, good, _ = readable(self._source, np.array([int(key) for key in keys]))
        return torch.from_numpy(images), [str(number) for number in good.tolist()]

    def companions(self, key: str) -> list[Tensor]:
        """None: a label of a dataset counts for its image alone."""
        return []

    def close(self) -> None:
        pass


def labels_at_hand(plan: RunPlan, path: Path, stream: Stream) -> Answers | DatasetLabels | None:
    """A person's labels, if one is asked; else those of the source, by the run's largest label fraction."""
    if plan.label_budget is not None:
        return Answers(path / "labels.sqlite", plan.spread == "on")
    train = stream.train
    if train is None:
        return None
    numbers = draw_labelled(train.labels, max(plan.label_fractions), train.classes, plan.seed)
    return DatasetLabels(train, numbers[evenly_spaced(len(numbers), MAX_LABELS)])


def hold_back(classes: Mapping[str, str], rival: Version | None) -> set[str]:
    """The keys of the labels to measure with, not to train on: about a fifth of each class.

    Labels held back from the rival stay held back, and labels that the rival was trained on are never held back: it
    knows their classes. Among the others a hash of the key decides, not the order in which they came.
    """
    if len(classes) < MIN_LABELS:
        return set()
    before, known = (rival.held_back, rival.trained_on) if rival else (frozenset[str](), frozenset[str]())
    held: set[str] = set()
    for name in set(classes.values()):
        own = {key for key in classes if classes[key] == name}
        if len(own) >= MIN_LABELS_OF_CLASS:
            free = sorted(own - before - known, key=lambda key: hashlib.blake2b(key.encode()).digest())
            still, n = own & before, max(1, round(len(own) / HOLD_BACK_EVERY))
            held |= still | set(free[: max(0, n - len(still))])
    return held


def score(probabilities: Tensor, classes: Sequence[str], truth: Sequence[str]) -> Score:
    """Of probabilities, n x classes. A true class that is not among them counts as wrong, with the probability 0."""
    if not truth:
        return Score(0, 0, 0.0)
    place = {name: i for i, name in enumerate(classes)}
    column = torch.tensor([place.get(name, len(classes)) for name in truth])
    of_truth = torch.nn.functional.pad(probabilities, (0, 1))[torch.arange(len(truth)), column]
    right = int((probabilities.argmax(1) == column).sum())
    return Score(right, len(truth), float(-of_truth.clamp(min=1e-6).log().mean()))


def right_by_class(probabilities: Tensor, classes: Sequence[str], truth: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Of each true class how many images are right, and of how many."""
    found = [classes[label] for label in probabilities.argmax(1).tolist()] if truth else []
    n, right = Counter(truth), Counter(name for name, guess in zip(truth, found, strict=True) if name == guess)
    return {name: (right[name], n[name]) for name in sorted(n)}


class Ended(Exception):
    """The run ends: stop at once."""


class Challenger:
    """Trains heads in a low-priority thread of its own, on copies of the encoder.

    It asks for a copy (`wants`) after a checkpoint and when labels have changed; the loop gives it between two steps.
    """

    def __init__(
        self,
        labels: Answers | DatasetLabels | None,
        versions: Versions,
        model_with: Callable[[dict[str, Tensor], str], ContrastiveModel],
        tell: Callable[[str], None],
    ):
        self.labels, self.versions, self.model_with, self.tell = labels, versions, model_with, tell
        self._pinned = versions.pinned  # at the last look
        self.wants = labels is not None and self._pinned is None
        self.n_taken = self.n_refused = 0
        self._offered: tuple[int, dict[str, Tensor]] | None = None
        self._lock = threading.Lock()  # wants and _offered change together
        self._is_at_work = False
        self._last: tuple[int, dict[str, str]] | None = None  # the step and the labels of the last challenge
        self._told: set[str] = set()
        self._wake, self._ends = threading.Event(), False
        self._pool = ThreadPoolExecutor(1, "challenger")
        self._thread = self._pool.submit(self._work)

    def due(self) -> None:
        """A checkpoint was written, or the run ends."""
        self.wants = self.labels is not None and self.versions.pinned is None  # what is pinned stays anyway

    def give(self, step: int, weights: dict[str, Tensor]) -> None:
        """Hand over the weights after a step; nobody may change these tensors afterwards."""
        with self._lock:
            self.wants, self._offered = False, (step, weights)
        self._wake.set()

    @property
    def is_busy(self) -> bool:
        """Whether a challenge is under way. Raises what has ended the thread, if it has ended."""
        if self._thread.done():
            self._thread.result()
        # In this order: the thread sets _is_at_work before it clears _offered, so one of them is always seen.
        return not self._ends and (self._offered is not None or self._is_at_work)

    def close(self) -> None:
        self._ends = True
        self._wake.set()
        self._pool.shutdown()
        if self.labels is not None:
            self.labels.close()

    def _work(self) -> None:
        torch.set_num_threads(1)  # for this thread only
        if sys.platform == "linux":  # where a thread has a priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._ends:
            try:
                self._look()
                if self._offered is not None:
                    self._is_at_work, (step, weights), self._offered = True, self._offered, None
                    self._challenge(step, weights)
            except FAILURES as error:
                self._offered = None
                self._tell_once(f"no new head ({error}): it is tried again with the next encoder")
            except Ended:
                return
            finally:
                self._is_at_work = False
            self._wake.wait(LOOK_EVERY_SECONDS)
            self._wake.clear()

    def _look(self) -> None:
        self.versions.look()
        was_pinned, self._pinned = self._pinned, self.versions.pinned
        if self.labels is None:
            self._tell_once(NEVER_LABELS)
        elif self._pinned is None and (was_pinned is not None or self.labels.changed()):
            with self._lock:
                if self._offered is None:  # else they will be read anyway
                    self.wants = True

    def _tell_once(self, event: str) -> None:
        if event not in self._told:
            self._told.add(event)
            self.tell(event)

    def _challenge(self, step: int, weights: dict[str, Tensor]) -> None:
        assert self.labels is not None
        if self.versions.pinned is not None:
            return  # what is pinned stays, whatever is better
        classes = self.labels.read()
        if self._last == (step, classes):
            return  # so that a version that was rolled back is not made again
        self._last = step, classes
        while True:
            rival = self.versions.current
            challenger = self._trained(step, weights, classes, rival)
            if challenger is None:
                self._tell_once(NO_LABELS)
                return
            old = self._score_of(rival, classes, challenger.held_back) if rival else None
            refusal = self._refusal(challenger, rival, old)
            if refusal:
                self.n_refused += 1
                self.tell(f"a new head of step {step} is refused: {refusal}")
                return
            taken = self.versions.take(challenger, rival)
            if taken:
                self.n_taken += 1
                against = f"; version {rival.number} has {old} of them right" if rival and old and old.n else ""
                self.tell(f"{taken} is served{against}")
                return
            if self.versions.pinned is not None:  # somebody rolled back meanwhile
                return

    def _refusal(self, new: Version, rival: Version | None, old: Score | None) -> str:
        """Why the new version is refused; empty if it is accepted."""
        if not math.isfinite(new.score.loss):
            return "its probabilities are no numbers"
        if rival is None or old is None:
            return ""  # nothing to lose
        if not new.held_back:
            more = len(new.trained_on) > len(rival.trained_on)
            return "" if more else "there is no label to measure it with, and it knows no more of them"
        if new.score.right > old.right:
            return ""
        if new.score.right == old.right and set(new.classes) > set(rival.classes):
            return ""  # no tie: it knows a class that the other never gives
        return f"{new.score} labels held back right, version {rival.number} has {old}"

    def _trained(
        self, step: int, weights: dict[str, Tensor], class_of: dict[str, str], rival: Version | None
    ) -> Version | None:
        """A head on these weights, measured on the labels held back; None with fewer than two classes."""
        held = hold_back(class_of, rival)
        if len({name for key, name in class_of.items() if key not in held}) < 2:
            return None
        model = self.model_with(weights, f"the encoder of step {step}")
        features, keys = [], list[str]()
        for images, good in self._batches(sorted(class_of)):
            features.append(infer(model, images, model.features).cpu())
            keys += good
        rows = {key: row for row, key in enumerate(keys)}
        trained_on = [key for key in keys if key not in held]
        classes = sorted({class_of[key] for key in trained_on})
        if len(classes) < 2:
            raise UserError("labelled images of fewer than two classes can be read")
        targets = torch.tensor([classes.index(class_of[key]) for key in trained_on])
        known = torch.cat(features)
        given = known[[rows[key] for key in trained_on]]
        companions, places = self._companions(model, trained_on, frozenset(class_of))
        whose = torch.tensor([*range(len(given)), *places])  # the label that each row has
        counts = torch.ones(len(whose))
        counts[len(given) :] = SPREAD_WEIGHT
        spread = torch.cat([given, *companions])
        head = fit_linear(spread, targets[whose], len(classes), weights=counts, groups=whose)
        measured = sorted(held & rows.keys())
        probabilities = head(known[[rows[key] for key in measured]]).softmax(1)
        truth = [class_of[key] for key in measured]
        found, by_class = score(probabilities, classes, truth), right_by_class(probabilities, classes, truth)
        classifier = Classifier(model, head, classes, self.versions.directory.image_size)
        return Version(classifier, step, frozenset(trained_on), frozenset(measured), found, by_class=by_class)

    def _score_of(self, version: Version, class_of: dict[str, str], held_back: frozenset[str]) -> Score:
        """The score of a version on these labels, with its own encoder."""
        parts, truth = [torch.empty(0, len(version.classes))], list[str]()
        for images, good in self._batches(sorted(held_back)):
            parts.append(version.probabilities(images))
            truth += [class_of[key] for key in good]
        return score(torch.cat(parts), version.classes, truth)

    def _companions(
        self, model: ContrastiveModel, keys: list[str], labelled: frozenset[str]
    ) -> tuple[list[Tensor], list[int]]:
        """The features of the frames that labels spread to, n x d each, and the place in `keys` of the label of each.

        labelled: frames that have labels of their own.
        """
        assert self.labels is not None
        features, places = [], list[int]()
        for place, key in enumerate(keys):
            if self._ends:
                raise Ended
            images = [image for image in self.labels.companions(key) if key_of(image) not in labelled]
            if images:
                features.append(infer(model, torch.stack(images), model.features).cpu())
                places += [place] * len(images)
        return features, places

    def _batches(self, keys: list[str]) -> Iterator[tuple[Tensor, list[str]]]:
        assert self.labels is not None
        for start in range(0, len(keys), BATCH_SIZE):
            if self._ends:
                raise Ended
            images, good = self.labels.images(keys[start : start + BATCH_SIZE])
            if good:
                yield images, good
