"""Questions to a person about a run: which images, in which order, and the head that is trained on the answers."""

import json
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.statistics import wilson
from streamclr.encoders.inference import infer
from streamclr.encoders.projection import ContrastiveModel
from streamclr.labelling.candidates import Candidate, key_of, middle, pixels, png, read_clips, usable
from streamclr.labelling.order import asking_order, directions
from streamclr.labelling.people import People
from streamclr.labelling.spread import find_companions, same_scene
from streamclr.labelling.store import Answer, Labels, Question
from streamclr.labelling.trust import USUAL_SIMILARITY, Settled, least_similarity, look_alikes, settled
from streamclr.linear import MIN_LABELS_OF_TEMPERATURE, cross_validate, fit_linear
from streamclr.models.heads import PUBLIC, Heads
from streamclr.records.directory import FINISHED, RunDirectory
from streamclr.records.label_budget import N_ASKED, LabelBudget
from streamclr.scenes import SPREAD_WEIGHT
from streamclr.stage_two import KINDS, Chosen, Unlabelled, choose_classifier

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
    is_calibrated: bool = False  # whether held-back labels were enough to tell how certain it may be
    held_back: dict[str, int] = field(default_factory=dict)  # the classes of labelled questions, without their labels
    settled: Settled | None = None  # whether more labels would help
    least_similarity: float = USUAL_SIMILARITY  # of look-alikes

    @property
    def guesses(self) -> Tensor:
        """The place in `classes` of the class of each question."""
        return self.probabilities.argmax(1)


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
        self.features = self.directions = torch.empty(0, 0)  # n questions x d
        self._model: ContrastiveModel | None = None  # that the features are from
        self._companions: dict[str, Tensor] = {}  # features of a labelled question's companions, n x d, by its key
        self.trained: Training | None = None
        self.model_of = ""  # the state of the encoder that the features are from
        self.trained_on: tuple[int, dict[int, str]] | None = None  # the number of the last answer, and the class names
        self._explanation = self._note = ""  # the message while nothing is under way; the note is of the last training
        self.people = People()
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
            self.directions = directions(features)
            self._model, self._companions = model, {}
            self.message = self._explanation = explanation

    def _choose(self, model: ContrastiveModel, model_of: str) -> None:
        config = self.directory.config
        clips = read_clips(self.directory.path / "candidates.bin")
        if config.guards not in ("auto", "off") and clips:
            clips = usable(clips) or clips  # a person may know better than the guards
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
        place = {number: i for i, number in enumerate(classes)}
        if len(classes) < 2:
            self.heads.forget_labelled()
            return None
        targets = torch.tensor([place[answer.class_id or 0] for answer in given])
        # Similar images that were answered in one go are one group; imported answers are one each.
        imported = self.labels.imported()
        group = [(a.number, keys[row] if a.number in imported else "") for row, a in zip(rows, given, strict=True)]
        number_of = {one: number for number, one in enumerate(sorted(set(group)))}
        groups = torch.tensor([number_of[one] for one in group])
        companions = self._companions_of([keys[row] for row in rows]) if spread else []
        # The label that each row has: its own, or that of the question which it is a companion of.
        whose = torch.tensor([*range(len(rows)), *(i for i, own in enumerate(companions) for _ in own)])
        weights = torch.ones(len(whose))
        weights[len(rows) :] = SPREAD_WEIGHT
        labelled = Labelled(torch.cat([self.features[rows], *companions]), targets[whose], weights, groups[whose])
        if classifier == "linear":
            chosen, trained = self._linear(rows, labelled, classes)
        else:
            chosen, trained = self._chosen(classifier, public, rows, labelled, classes)
        if chosen.n_held_back:
            trained.accuracy = chosen.accuracy
            trained.interval = wilson(chosen.right, chosen.n_held_back)
        self._save(trained, chosen, [names[number] for number in classes], is_asked=classifier != "linear")
        return trained

    def _linear(self, rows: list[int], labelled: Labelled, classes: list[int]) -> tuple[Chosen, Training]:
        """A linear classifier from these labels, and how far it can be trusted."""
        features, targets, weights, groups = labelled
        found = cross_validate(features, targets, len(classes), weights, groups)
        head = fit_linear(features, targets, len(classes), weights, decay=found.decay).cooled(found.temperature)
        probabilities = head(self.features).softmax(1)
        others = sorted(set(range(len(self.questions))) - set(rows))
        trained = Training(classes, probabilities, len(rows), len(targets) - len(rows), "linear", "")
        trained.is_calibrated = found.temperature is not None
        trained.held_back = {
            self.questions[row].key: classes[guess]
            for row, guess in zip(rows, found.guesses.tolist(), strict=False)  # neighbouring frames come behind
            if guess >= 0
        }
        trained.settled = settled(*labelled, found.decay, self.features[others], trained.guesses[others])
        trained.least_similarity = least_similarity(self.directions[rows], targets[: len(rows)])
        return Chosen("linear", head, "", right=found.right, n_held_back=found.n), trained

    def _chosen(
        self, classifier: str, public: ContrastiveModel | None, rows: list[int], labelled: Labelled, classes: list[int]
    ) -> tuple[Chosen, Training]:
        """The classifier that was asked for from these labels, or the best one."""
        features, targets, weights, groups = labelled
        model, model_of = self.directory.newest_model()
        if model_of != self.model_of:
            raise UserError(f"the run has learned on meanwhile, to {model_of}: try again")
        images = torch.stack([self._image(question.key) for question in self.questions])
        shown = images[rows]
        if len(targets) > len(rows):
            neighbours = self._companion_images([self.questions[row].key for row in rows]).values()
            shown = torch.cat([shown, torch.stack([image for own in neighbours for image in own])])
        kinds = tuple(KINDS) if classifier == "auto" else (classifier,)
        unlabelled = self._other_frames() if len(targets) > len(rows) else None
        chosen = choose_classifier(
            model, shown, targets, len(classes), weights, groups, public, kinds, features, unlabelled
        )
        own = self.features if chosen.model is None else self._features(chosen.model, images, "features")
        n_spread = len(targets) - len(rows)
        return chosen, Training(
            classes,
            chosen.head(own).softmax(1),
            len(rows),
            n_spread,
            chosen.kind,
            chosen.why,
            is_calibrated=chosen.n_held_back >= MIN_LABELS_OF_TEMPERATURE,
        )

    def _companions_of(self, keys: list[str]) -> list[Tensor]:
        """The features of the companions of questions, n x d each; those of an answered question are kept."""
        missing = self._companion_images([key for key in keys if key not in self._companions])
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

    def _companion_images(self, keys: list[str]) -> dict[str, list[Tensor]]:
        """Without images that are asked about themselves, as in a second pass: they have answers of their own."""
        asked = {question.key for question in self.questions}
        images = {key: [pixels(picture) for picture in self.labels.companions(key)] for key in keys}
        return {key: [image for image in own if key_of(image) not in asked] for key, own in images.items()}

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
            point = [n_labels, accuracy, *(round(bound, 4) for bound in trained.interval)]
            self.labels.note("history", json.dumps([*history, point][-1000:]))

    def is_behind(self) -> bool:
        """Whether answers or class names have changed since the last training."""
        return bool(self.questions) and self.trained_on != (_last(self.labels.answers()), self.labels.classes())

    def history(self) -> list[list[float]]:
        """The number of labels, the accuracy and its interval; points of 0.1.0 have no interval."""
        return json.loads(self.labels.fact("history") or "[]")

    def state(self, page: str = "") -> dict[str, Any]:
        """Everything that a page shows.

        page: the name of the one that asks; several pages get different questions.
        """
        with self._lock:
            questions, trained, answers = self.questions, self.trained, self.labels.answers()
            asked = {question.key for question in questions}
            kinds = Counter(answer.kind for key, answer in answers.items() if key in asked)
            counts = {"labelled": kinds["label"], "skipped": kinds["skip"], "unsure": kinds["unsure"]}
            to_ask = self._to_ask(answers)
            low, high = trained.interval if trained else (0.0, 1.0)
            is_known = self.trained_on is not None and self.trained_on[0] == _last(answers)
            unanswered = [row for row in to_ask if questions[row].key not in answers]
            row_of = {questions[row].key: row for row in to_ask}
            shared = [row_of[key] for key in self.people.share(page, list(row_of), N_AHEAD)]
            enough = trained.settled if trained else None
            return {
                "ready": bool(questions),
                "message": self.message,
                "classes": self._classes(answers),
                "progress": {"asked": len(questions), **counts, "left": len(to_ask)},
                "people": len(self.people),
                "saved": self.labels.n_answers(),
                "accuracy": {
                    "value": trained.accuracy if trained else None,
                    "low": low,
                    "high": high,
                    "n": trained.n_labels if trained else 0,
                    "training": bool(questions) and not is_known,
                    "history": self.history(),
                },
                "enough": {"same": enough.same, "n": enough.n} if enough and enough.is_enough else None,
                "last": self.labels.last(page),
                "next": self._tasks(shared, unanswered),
            }

    def _classes(self, answers: dict[str, Answer]) -> list[dict[str, Any]]:
        """The classes, with how many labels each has, and how many of those that were held back are right."""
        n_of = Counter(answer.class_id for answer in answers.values())
        held_back = self.trained.held_back if self.trained else {}
        tested = [(answers[key].class_id, guess) for key, guess in held_back.items() if key in answers]
        n_tested, right = Counter(own for own, _ in tested), Counter(own for own, guess in tested if own == guess)
        return [
            {"id": n, "name": name, "n": n_of[n], "tested": n_tested[n], "right": right[n]}
            for n, name in self.labels.classes().items()
        ]

    def review(self) -> list[dict[str, Any]]:
        """The answers that were given: first those that the classifier doubts, then the newest.

        It doubts a label if it says another class when it has not learned from this label.
        """
        with self._lock:
            answers, held_back = self.labels.answers(), self.trained.held_back if self.trained else {}
            found = []
            for question in self.questions:
                answer = answers.get(question.key)
                if answer is None or answer.kind == "skip":
                    continue
                guess = held_back.get(question.key, answer.class_id)
                doubt = guess if answer.kind == "label" and guess != answer.class_id else None
                one = {"id": question.key, "arrival": question.arrival, "kind": answer.kind, "class": answer.class_id}
                found.append((doubt is None, -answer.number, one | {"doubt": doubt}))
            return [one for *_, one in sorted(found, key=lambda entry: entry[:2])]

    def _to_ask(self, answers: dict[str, Answer]) -> list[int]:
        """The rows that are not answered, in the order of questions; then those that were skipped."""
        keys = [question.key for question in self.questions]
        unanswered = [row for row, key in enumerate(keys) if key not in answers]
        skipped = [row for row, key in enumerate(keys) if key in answers and answers[key].kind == "skip"]
        return unanswered + sorted(skipped, key=lambda row: answers[keys[row]].number)

    def _tasks(self, rows: list[int], unanswered: list[int]) -> list[dict[str, Any]]:
        """Each with the unanswered images that are so similar to it that they should be of its class."""
        trained = self.trained
        guesses, least = (trained.guesses, trained.least_similarity) if trained else (None, USUAL_SIMILARITY)
        tasks = []
        for row in rows:
            alike = look_alikes(row, unanswered, self.directions, guesses, least)[:N_ALIKE]
            more = {"arrival": self.questions[row].arrival, "alike": [self._picture(other) for other in alike]}
            tasks.append(self._picture(row) | more)
        return tasks

    def _picture(self, row: int) -> dict[str, Any]:
        return {"id": self.questions[row].key, "guess": self.guess(row)}

    def guess(self, row: int) -> dict[str, Any] | None:
        """The class that the head predicts, by its number, and its probability, if enough labels tell that."""
        if self.trained is None:
            return None
        best = int(self.trained.guesses[row])
        probability = round(float(self.trained.probabilities[row, best]), 4)
        return {"class": self.trained.classes[best], "probability": probability if self.trained.is_calibrated else None}


def _last(answers: dict[str, Answer]) -> int:
    return max((answer.number for answer in answers.values()), default=0)
