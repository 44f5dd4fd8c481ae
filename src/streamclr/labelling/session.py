"""Questions to a person about a run: which images, in which order, and the head that is trained on the answers."""

import io
import json
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.statistics import wilson
from streamclr.encoders.inference import infer
from streamclr.encoders.projection import ContrastiveModel
from streamclr.guards import unusable
from streamclr.labelling.candidates import Candidate, key_of, middle, read_clips
from streamclr.labelling.order import asking_order
from streamclr.labelling.spread import find_companions, same_scene
from streamclr.labelling.store import Answer, Labels, Question
from streamclr.models.heads import PUBLIC, Heads
from streamclr.records.directory import FINISHED, RunDirectory
from streamclr.records.label_budget import N_ASKED, LabelBudget
from streamclr.scenes import SPREAD_WEIGHT
from streamclr.stage_two import KINDS, Chosen, Unlabelled, choose_classifier, cross_validate, fit_linear

N_AHEAD, N_ALIKE = 12, 11  # questions that a page gets in advance, and similar images for each


@dataclass
class Training:
    """The result of training on the answers; the classifier itself is in the run directory."""

    classes: list[int]  # the number of each class in labels.sqlite
    probabilities: Tensor  # n questions x classes
    n_labels: int  # that a person gave
    n_spread: int  # of other frames of the same scenes
    kind: str  # of KINDS
    why: str  # this kind was chosen; empty if it was not tried against another
    accuracy: float | None = None  # on labels that were held back; None while there are too few
    interval: tuple[float, float] = (0.0, 1.0)  # of 95 %


class Labelled(NamedTuple):
    """What a classifier is trained on: images that a person labelled, then frames that their labels spread to."""

    features: Tensor  # n x d
    targets: Tensor
    weights: Tensor
    groups: Tensor


class LabelSession:
    """The questions about one run, for a page or a command; features are computed once."""

    def __init__(self, directory: RunDirectory):
        if directory.config.label_budget is None:
            raise UserError(f"{directory.path} has no label queue: run with --label-budget {N_ASKED}")
        self.directory, self.heads = directory, Heads(directory)
        self.labels = Labels(directory.path / "labels.sqlite")
        self.message = ""  # what is under way, or why nothing can be asked
        self.questions: list[Question] = []
        self.features = torch.empty(0, 0)  # n questions x d
        self._model: ContrastiveModel | None = None  # that the features are from
        self._companions: dict[str, Tensor] = {}  # features of a labelled question's companions, n x d, by its key
        self.trained: Training | None = None
        self.model_of = ""  # the state of the encoder that the features are from
        self.trained_on: tuple[int, dict[int, str]] | None = None  # the number of the last answer, and the class names
        self._explanation = self._note = ""  # the message while nothing is under way; the note is of the last training
        self._lock = threading.Lock()  # a page reads while the worker writes

    def close(self) -> None:
        self.labels.close()

    @property
    def is_short(self) -> bool:
        """Whether fewer questions were chosen than the budget allows: the run may have seen more frames since."""
        budget = LabelBudget.parse(self.directory.config.label_budget or "1").images
        return budget is not None and len(self.labels.questions()) < budget

    @property
    def runs_out(self) -> bool:
        """Whether all questions are answered though the budget allows more, and the run may have seen more frames."""
        answers = self.labels.answers()
        left = any(question.key not in answers for question in self.questions)
        return not left and self.is_short and self.directory.newest_encoder() != FINISHED

    def prepare(self, choose_anew: bool = True) -> None:
        """Choose the questions with the newest encoder and compute their features.

        choose_anew: also if there are questions already, chosen with an earlier encoder or from fewer images.
        """
        model, model_of = self.directory.newest_model()
        explanation = ""
        if choose_anew or not self.labels.questions():
            try:
                self._choose(model, model_of)
            except UserError as error:
                if not self.labels.questions():
                    raise
                explanation = str(error)  # the earlier questions can still be answered
        questions = self.labels.questions()
        features = self._features(model, torch.stack([self._image(q.key) for q in questions]), "features")
        with self._lock:
            self.trained, self.trained_on = None, None  # first: who asks without the lock is told that it is behind
            self.questions, self.features, self.model_of = questions, features, model_of
            self._model, self._companions = model, {}
            self.message = self._explanation = explanation

    def _choose(self, model: ContrastiveModel, model_of: str) -> None:
        config = self.directory.config
        clips = read_clips(self.directory.path / "candidates.bin")
        if config.guards not in ("auto", "off") and clips:
            clips = _usable(clips) or clips  # a person may know better than the guards
        if not clips:
            raise UserError("no images to ask about yet: the run has only begun")
        newest = clips[-1][-1].arrival
        made_from = f"{model_of}, {len(clips)} candidates up to image {newest}"
        if self.labels.fact("made_from") == made_from:
            return
        stay = self.labels.lasting()  # exported to others, or answered
        pool = [Candidate(key, question.arrival, 0.0, self._image(key)) for key, question in stay.items()]
        clip_of = {middle(clip).key: clip for clip in clips if not any(frame.key in stay for frame in clip)}
        pool += [middle(clip) for clip in clip_of.values()]
        assert config.label_budget is not None
        n_asked = min(max(LabelBudget.parse(config.label_budget).of(newest + 1), len(stay)), len(pool))
        features = self._features(model, torch.stack([one.image for one in pool]), "choosing what to ask")
        order = asking_order(features, n_asked, config.seed, known=torch.arange(len(pool)) < len(stay))
        ranked = enumerate(pool[row] for row in order.tolist())
        chosen = [(Question(one.key, one.arrival, rank), png(one.image)) for rank, one in ranked]
        new = [row for row in order.tolist() if row >= len(stay)]
        asked, mean = [pool[row] for row in new], features.mean(0)
        features_of = partial(self._features, model, what="neighbouring frames")
        found = find_companions(asked, [clip_of[one.key] for one in asked], features[new], mean, features_of)
        pictures = {key: [(one.arrival, png(one.image)) for one in own] for key, own in found.items()}
        thumbnails = {one.key: one.thumbnail for one in pool if one.thumbnail}
        self.labels.ask(chosen, n_asked, pictures, thumbnails)  # others may have been answered meanwhile
        self.labels.note("made_from", made_from)
        if not self.labels.classes():
            for name in self.heads.class_names():
                with suppress(UserError):  # a folder may have a name that is too long for a button
                    self.labels.add_class(name)

    def _image(self, key: str) -> Tensor:
        picture = self.labels.picture(key)
        if picture is None:
            raise UserError("other questions were chosen meanwhile: try again")
        return pixels(picture)

    def _features(self, model: ContrastiveModel, images: Tensor, what: str) -> Tensor:
        parts: list[Tensor] = []
        for part in images.split(256):
            self.message = f"{what}: {256 * len(parts):,} of {len(images):,} images"
            parts.append(infer(model, part, model.features).cpu())
        return torch.cat(parts)

    def train(
        self, classifier: str = "linear", public: ContrastiveModel | None = None, spread: bool | None = None
    ) -> Training | None:
        """Train a classifier on all labels so far and save it in the run; None while there are fewer than two classes.

        classifier: one of KINDS, or `auto` for the better one on labels held back.
        public: the encoder before it learned from the stream, as a further candidate.
        spread: whether a label counts for the neighbouring frames of the same scene too; default: as the run says.
        """
        answers, names = self.labels.answers(), self.labels.classes()
        self._note = ""
        spread = self.directory.config.spread == "on" if spread is None else spread
        trained = self._train(answers, names, classifier, public, spread)
        with self._lock:
            self.trained, self.trained_on = trained, (_last(answers), names)
            self.message = self._explanation or self._note
        return trained

    def _train(
        self,
        answers: dict[str, Answer],
        names: dict[int, str],
        classifier: str,
        public: ContrastiveModel | None,
        spread: bool,
    ) -> Training | None:
        keys = [question.key for question in self.questions]
        rows = [row for row, key in enumerate(keys) if key in answers and answers[key].kind == "label"]
        given = [answers[keys[row]] for row in rows]
        classes = sorted({answer.class_id for answer in given if answer.class_id is not None})
        if len(classes) < 2:
            self.heads.forget_labelled()
            return None
        targets = torch.tensor([classes.index(answer.class_id or 0) for answer in given])
        # Similar images that were answered in one go are one group; imported answers are one each.
        imported = self.labels.imported()
        group = [(a.number, keys[row] if a.number in imported else "") for row, a in zip(rows, given, strict=True)]
        groups = torch.tensor([sorted(set(group)).index(one) for one in group])
        companions = self._companions_of([keys[row] for row in rows]) if spread else []
        # The label that each row has: its own, or that of the question which it is a companion of.
        whose = torch.tensor([*range(len(rows)), *(i for i, own in enumerate(companions) for _ in own)])
        weights = torch.ones(len(whose))
        weights[len(rows) :] = SPREAD_WEIGHT
        labelled = Labelled(torch.cat([self.features[rows], *companions]), targets[whose], weights, groups[whose])
        chosen, probabilities = self._chosen(classifier, public, rows, labelled, len(classes))
        trained = Training(classes, probabilities, len(rows), len(whose) - len(rows), chosen.kind, chosen.why)
        if chosen.n_held_back:
            trained.accuracy = chosen.accuracy
            trained.interval = wilson(chosen.right, chosen.n_held_back)
        self._save(trained, chosen, [names[number] for number in classes], is_asked=classifier != "linear")
        return trained

    def _chosen(
        self, classifier: str, public: ContrastiveModel | None, rows: list[int], labelled: Labelled, n_classes: int
    ) -> tuple[Chosen, Tensor]:
        """The classifier from these labels, and its probabilities for all questions."""
        features, targets, weights, groups = labelled
        if classifier == "linear":
            found = cross_validate(features, targets, n_classes, weights, groups)
            head = fit_linear(features, targets, n_classes, weights, decay=found.decay)
            return Chosen("linear", head, "", right=found.right, n_held_back=found.n), head(self.features).softmax(1)
        model, model_of = self.directory.newest_model()
        if model_of != self.model_of:
            raise UserError(f"the run has learned on meanwhile, to {model_of}: try again")
        images = torch.stack([self._image(question.key) for question in self.questions])
        shown = images[rows]
        if len(targets) > len(rows):
            keys = [self.questions[row].key for row in rows]
            shown = torch.cat([shown, torch.stack([one for key in keys for one in self._companion_images(key)])])
        kinds = tuple(KINDS) if classifier == "auto" else (classifier,)
        unlabelled = self._other_frames() if len(targets) > len(rows) else None
        chosen = choose_classifier(
            model, shown, targets, n_classes, weights, groups, public, kinds, features, unlabelled
        )
        own = self.features if chosen.model is None else self._features(chosen.model, images, "features")
        return chosen, chosen.head(own).softmax(1)

    def _companions_of(self, keys: list[str]) -> list[Tensor]:
        """The features of the companions of questions, n x d each; those of an answered question are kept."""
        missing = {key: self._companion_images(key) for key in keys if key not in self._companions}
        images = [image for own in missing.values() for image in own]
        if images:
            assert self._model is not None
            found = self._features(self._model, torch.stack(images), "neighbouring frames")
        else:
            found = self.features[:0]
        self._companions |= dict(zip(missing, found.split([len(own) for own in missing.values()]), strict=True))
        return [self._companions[key] for key in keys]

    def _other_frames(self) -> Unlabelled | None:
        """The frames of the clips without an answer, scene by scene."""
        answered = self.labels.answers().keys()
        clips = read_clips(self.directory.path / "candidates.bin")
        clips = [clip for clip in clips if not any(frame.key in answered for frame in clip)]
        frames: list[Candidate] = []
        scenes: list[int] = []
        for number, clip in enumerate(clips):
            one = middle(clip)
            frames += [one, *same_scene(clip, one)]
            scenes += [number] * (len(frames) - len(scenes))
        if not frames:
            return None
        return Unlabelled(torch.stack([frame.image for frame in frames]), torch.tensor(scenes))

    def _companion_images(self, key: str) -> list[Tensor]:
        """Without images that are asked about themselves, as in a second pass: they have answers of their own."""
        asked = {question.key for question in self.questions}
        images = [pixels(picture) for picture in self.labels.companions(key)]
        return [image for image in images if key_of(image) not in asked]

    def _save(self, trained: Training, chosen: Chosen, classes: list[str], is_asked: bool) -> None:
        """Save the classifier, unless nobody asked for it and a fine-tuned one of the same classes is better."""
        accuracy = None if trained.accuracy is None else round(trained.accuracy, 4)
        before = self.heads.labelled()
        may_stay = before is not None and before.has_encoder and before.classes == classes and not is_asked
        if before and may_stay and (accuracy is None or (before.accuracy or 0.0) >= accuracy):
            again = f"streamclr label train {self.directory.path} trains it again"
            self._note = f"{before.name} is fine-tuned, and better than a new linear one: {again}"
            return
        encoder = PUBLIC if chosen.is_public else self.model_of
        n_labels = trained.n_labels
        n_tested = chosen.n_held_back if is_asked else None
        if chosen.model is None and self._model is not None:
            self.heads.keep_encoder(self._model, encoder)
        parts = chosen.head, classes, encoder, n_labels, accuracy, n_tested, chosen.kind, chosen.model, trained.n_spread
        self.heads.save_labelled(*parts)
        if accuracy is not None:
            history = [point for point in self.history() if point[0] < n_labels]
            self.labels.note("history", json.dumps([*history, [n_labels, accuracy]][-1000:]))

    def is_behind(self) -> bool:
        """Whether answers or class names have changed since the last training."""
        return bool(self.questions) and self.trained_on != (_last(self.labels.answers()), self.labels.classes())

    def history(self) -> list[list[float]]:
        """Pairs of the number of labels and the accuracy."""
        return json.loads(self.labels.fact("history") or "[]")

    def state(self) -> dict[str, Any]:
        """Everything that a page shows."""
        with self._lock:
            questions, trained, answers = self.questions, self.trained, self.labels.answers()
            asked = {question.key for question in questions}
            kinds = Counter(answer.kind for key, answer in answers.items() if key in asked)
            counts = {"labelled": kinds["label"], "skipped": kinds["skip"], "unsure": kinds["unsure"]}
            n_of = Counter(answer.class_id for answer in answers.values())
            to_ask = self._to_ask(answers)
            low, high = trained.interval if trained else (0.0, 1.0)
            is_known = self.trained_on is not None and self.trained_on[0] == _last(answers)
            unanswered = [row for row in to_ask if questions[row].key not in answers]
            return {
                "ready": bool(questions),
                "message": self.message,
                "classes": [{"id": n, "name": name, "n": n_of[n]} for n, name in self.labels.classes().items()],
                "progress": {"asked": len(questions), **counts, "left": len(to_ask)},
                "saved": self.labels.n_answers(),
                "accuracy": {
                    "value": trained.accuracy if trained else None,
                    "low": low,
                    "high": high,
                    "n": trained.n_labels if trained else 0,
                    "training": bool(questions) and not is_known,
                    "history": self.history(),
                },
                "last": self.labels.last(),
                "next": self._tasks(to_ask[:N_AHEAD], unanswered),
            }

    def _to_ask(self, answers: dict[str, Answer]) -> list[int]:
        """The rows that are not answered, in the order of questions; then those that were skipped."""
        keys = [question.key for question in self.questions]
        unanswered = [row for row, key in enumerate(keys) if key not in answers]
        skipped = [row for row, key in enumerate(keys) if key in answers and answers[key].kind == "skip"]
        return unanswered + sorted(skipped, key=lambda row: answers[keys[row]].number)

    def _tasks(self, rows: list[int], unanswered: list[int]) -> list[dict[str, Any]]:
        """Each with the unanswered images that are most similar to it."""
        directions = F.normalize(self.features, dim=1)
        similarity = directions[unanswered] @ directions[rows].T  # len(unanswered) x len(rows)
        nearest = similarity.topk(min(N_ALIKE + 1, len(unanswered)), dim=0).indices.T.tolist()
        tasks = []
        for row, places in zip(rows, nearest, strict=True):
            alike = [unanswered[place] for place in places if unanswered[place] != row][:N_ALIKE]
            more = {"arrival": self.questions[row].arrival, "alike": [self._picture(other) for other in alike]}
            tasks.append(self._picture(row) | more)
        return tasks

    def _picture(self, row: int) -> dict[str, Any]:
        return {"id": self.questions[row].key, "guess": self.guess(row)}

    def guess(self, row: int) -> dict[str, Any] | None:
        """The class that the head predicts, by its number."""
        if self.trained is None:
            return None
        probability, best = self.trained.probabilities[row].max(0)
        return {"class": self.trained.classes[int(best)], "probability": round(float(probability), 4)}


def _last(answers: dict[str, Answer]) -> int:
    return max((answer.number for answer in answers.values()), default=0)


def _usable(clips: list[list[Candidate]]) -> list[list[Candidate]]:
    """Without frames that are black, noise or smears; a clip may end up without any."""
    bad = unusable(torch.stack([frame.image for clip in clips for frame in clip])).tolist()
    is_bad = iter(bad)
    kept = [[frame for frame in clip if not next(is_bad)] for clip in clips]
    return [clip for clip in kept if clip]


def png(image: Tensor) -> bytes:
    data = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(data, "PNG")
    return data.getvalue()


def pixels(picture: bytes) -> Tensor:
    """The image of a PNG, 3 x H x W."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(picture)).convert("RGB"))).permute(2, 0, 1).contiguous()
