import shutil
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from streamclr.encoders.inference import infer
from streamclr.labelling.candidates import png
from streamclr.labelling.session import LabelSession
from streamclr.labelling.store import Labels
from streamclr.models.versions import Score, Versions
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs import challenger as module
from streamclr.runs.challenger import (
    MIN_LABELS,
    NEVER_LABELS,
    NO_LABELS,
    Answers,
    Challenger,
    DatasetLabels,
    hold_back,
    labels_at_hand,
    right_by_class,
    score,
)
from streamclr.scenes import SPREAD_WEIGHT
from streamclr.streams.datasets.images import ArrayImages
from streamclr.streams.stream import open_stream
from support.images import random_images
from support.labelling import COLOURS, colours, encoder, make_run, make_version
from support.waiting import until

NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A run whose questions are chosen, an image of each of three colours in turn; to be copied."""
    path = make_run(tmp_path_factory.mktemp("challenger") / "asked", budget="60", width=4)
    one = LabelSession(RunDirectory(path))
    one.prepare()
    for name in NAMES:
        one.labels.add_class(name)
    one.close()
    return path


@pytest.fixture
def path(asked, tmp_path):
    return shutil.copytree(asked, tmp_path / "run")


def answer(path, n, first=0):
    """As the labelling page does, which is another process."""
    labels = Labels(path / "labels.sqlite")
    for question in labels.questions()[first : first + n]:
        labels.answer(f"answer-{question.key}", "label", [question.key], question.arrival % COLOURS + 1)
    labels.close()


@contextmanager
def challenging(path, labels=None):
    """A challenger at work in a run, and what it tells."""
    told: list[str] = []
    directory = RunDirectory(path)
    served = Versions(directory, told.append)
    served.look()
    labels = Answers(path / "labels.sqlite") if labels is None else labels
    one = Challenger(labels, served, directory.model_with, told.append)
    one.told = told
    try:
        yield one
    finally:
        one.close()


def weights(path, seed=0):
    return encoder(path, seed).state_dict()


def give(one, step, tensors):
    one.give(step, tensors)
    until(lambda: not one.is_busy)


def blinded(path):
    """An encoder made worse on purpose: it sees nothing."""
    tensors = weights(path)
    tensors["encoder.conv1.weight"].zero_()
    return tensors


# ----------------------------------------------------------------------------------------------------------------------


def classes_of(n, names=NAMES):
    return {f"{i:032x}": names[i % len(names)] for i in range(n)}


@pytest.mark.parametrize("n", [10, 30, 60, 300])
def test_about_a_fifth_of_each_class_is_held_back(n):
    classes = classes_of(n)
    held = hold_back(classes, None)
    for name in NAMES:
        own = [key for key in classes if classes[key] == name]
        assert sum(key in held for key in own) == max(1, round(len(own) / 5))


def test_with_few_labels_none_is_held_back():
    assert not hold_back(classes_of(MIN_LABELS - 1), None)
    assert hold_back(classes_of(MIN_LABELS), None)
    assert not hold_back(classes_of(12, names=[str(i) for i in range(6)]), None)  # two of each class: both are needed


def test_which_are_held_back_does_not_depend_on_the_order(path):
    classes = classes_of(40)
    assert hold_back(classes, None) == hold_back(dict(reversed(classes.items())), None)


def test_what_was_held_back_stays_so_and_what_a_rival_knows_is_never_held_back(path):
    directory, rival, few = RunDirectory(path), None, 10
    for n in (9, 10, 17, 40, 200):
        classes = classes_of(n)
        held = hold_back(classes, rival)
        if rival is not None:
            assert held >= rival.held_back
            assert not held & rival.trained_on
        trained = frozenset(classes) - held
        rival = make_version(directory)
        object.__setattr__(rival, "trained_on", trained)
        object.__setattr__(rival, "held_back", frozenset(held))
        assert len(held) >= (n >= few)
    assert len(held) == 39  # 67, 67 and 66 of a class


def test_a_score_counts_a_class_that_is_not_known_as_wrong():
    probabilities = torch.tensor([[0.8, 0.2], [0.4, 0.6], [1.0, 0.0]])
    assert score(probabilities, ["a", "b"], ["a", "b", "c"])[:2] == (2, 3)
    assert score(probabilities[:1], ["a", "b"], ["c"]).loss == pytest.approx(13.8155, abs=1e-3)
    assert score(probabilities[:2], ["a", "b"], ["a", "a"]).loss == pytest.approx(0.5697, abs=1e-3)
    assert score(torch.empty(0, 2), ["a", "b"], []) == Score(0, 0, 0.0)


def test_a_class_counts_those_that_are_right_of_it():
    probabilities = torch.tensor([[0.8, 0.2], [0.4, 0.6], [1.0, 0.0], [0.9, 0.1]])
    counted = right_by_class(probabilities, ["a", "b"], ["a", "b", "c", "b"])
    assert counted == {"a": (1, 1), "b": (1, 2), "c": (0, 1)}
    assert right_by_class(torch.empty(0, 2), ["a", "b"], []) == {}


@pytest.mark.parametrize(
    ("right", "loss", "classes", "is_taken"),
    [
        (5, 2.0, NAMES, True),
        (4, 0.1, NAMES, False),  # a tie, however sure it is
        (3, 0.1, NAMES, False),
        (4, 0.5, (*NAMES, "white"), True),
        (3, 0.5, (*NAMES, "white"), False),
        (4, 0.5, ("red", "green", "white"), False),
        (5, float("nan"), NAMES, False),
    ],
)
def test_only_a_better_one_is_taken_or_as_good_a_one_that_knows_a_class_more(path, right, loss, classes, is_taken):
    with challenging(path) as one:
        old = make_version(one.versions.directory, score=Score(4, 6, 0.4))
        new = make_version(one.versions.directory, classes=classes, score=Score(right, 6, loss))
        assert (one._refusal(new, old, old.score) == "") == is_taken


# ----------------------------------------------------------------------------------------------------------------------


def test_labels_of_another_process_become_a_head(path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY_SECONDS", 0.02)
    with challenging(path) as one:
        give(one, 1, weights(path))
        assert one.told == [NO_LABELS]
        assert one.versions.current is None
        answer(path, 40)
        until(lambda: one.wants)
        give(one, 2, weights(path))
        version = one.versions.current
        assert (version.number, version.step, version.classes) == (1, 2, sorted(NAMES))
        assert len(version.trained_on) + len(version.held_back) == 40
        assert len(version.held_back) == version.score.n in (7, 8, 9)
        assert version.score.right >= 6  # colours are easy
        truth = [("red", "green", "blue")[i % COLOURS] for i in range(30)]
        found = [version.classes[i] for i in version.probabilities(colours(30, seed=5)).argmax(1)]
        assert sum(map(str.__eq__, truth, found)) > 15  # by chance 10
        assert not one.wants  # until there are others
        answer(path, 1, first=40)
        until(lambda: one.wants)


def shuffled_head(features, labels, n_classes, **options):
    head = module_fit_linear(features, labels, n_classes, **options)
    head.linear.weight.copy_(head.linear.weight.roll(1, 0))
    head.linear.bias.copy_(head.linear.bias.roll(1, 0))
    return head


module_fit_linear = module.fit_linear


def test_a_head_made_worse_on_purpose_is_not_taken(path, monkeypatch):
    answer(path, 50)
    with challenging(path) as one:
        give(one, 1, weights(path))
        good = one.versions.current
        assert good.number == 1
        with monkeypatch.context() as patch:
            patch.setattr(module, "fit_linear", shuffled_head)
            give(one, 2, weights(path))
        assert one.versions.current is good
        assert one.told[-1].startswith("a new head of step 2 is refused: ")
        assert f"version 1 has {good.score.right} of {good.score.n}" in one.told[-1]
        assert (one.n_taken, one.n_refused) == (1, 1)
    assert Versions(RunDirectory(path)).look().number == 1  # nor is it on the disk


def test_an_encoder_made_worse_on_purpose_is_not_taken(path):
    answer(path, 50)
    with challenging(path) as one:
        give(one, 1, weights(path))
        good = one.versions.current
        give(one, 2, blinded(path))
        assert one.versions.current is good
        assert "refused" in one.told[-1]
        give(one, 3, weights(path))  # the same again is a tie
        assert one.versions.current is good
        assert one.told[-1].endswith(f"refused: {good.score} labels held back right, version 1 has {good.score}")


def test_a_better_one_replaces_a_bad_one(path):
    answer(path, 50)
    with challenging(path) as one:
        give(one, 1, blinded(path))
        bad = one.versions.current
        give(one, 2, weights(path))
        assert one.versions.current.number == 2
        assert one.versions.current.score.right > bad.score.right
        assert one.versions.current.held_back == bad.held_back  # measured with the same


def test_what_is_held_back_is_never_trained_on(path, monkeypatch):
    answer(path, 30)
    with challenging(path) as one:
        for step, n in ((1, 0), (2, 10), (3, 20)):
            answer(path, n, first=30)
            give(one, step, weights(path, seed=step))
            version = one.versions.current
            assert not version.trained_on & version.held_back


def test_the_first_head_of_a_few_labels_is_taken_and_then_one_that_knows_more(path):
    answer(path, 6)
    with challenging(path) as one:
        give(one, 1, weights(path))
        assert one.versions.current.number == 1
        assert "no label was held back to measure it" in one.told[-1]
        give(one, 2, weights(path))
        assert one.versions.current.number == 1
        assert "no label to measure it with, and it knows no more" in one.told[-1]
        answer(path, 2, first=6)
        give(one, 3, weights(path))
        assert one.versions.current.number == 2
        assert len(one.versions.current.trained_on) == 8


def test_one_class_is_no_head_yet(path):
    labels = Labels(path / "labels.sqlite")
    labels.answer("all", "label", [question.key for question in labels.questions()], 1)
    labels.close()
    with challenging(path) as one:
        give(one, 1, weights(path))
        assert one.versions.current is None
        assert one.told == [NO_LABELS]


def test_no_labels_at_all_are_told_once(path):
    directory, told = RunDirectory(path), []
    one = Challenger(None, Versions(directory), directory.model_with, told.append)
    until(lambda: told)
    one.due()
    assert not one.wants
    one.close()
    assert told == [NEVER_LABELS]


def test_what_is_pinned_stays_until_it_is_unpinned_and_then_the_better_one_comes_at_once(path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY_SECONDS", 0.02)
    answer(path, 50)
    with challenging(path) as one:
        give(one, 1, blinded(path))
        give(one, 2, weights(path))
        assert one.versions.current.number == 2
        Versions(RunDirectory(path)).rollback()
        until(lambda: one.versions.current.number == 1)
        n = one.n_taken, one.n_refused
        for step in (2, 3):
            give(one, step, weights(path))  # far better
            assert one.versions.current.number == 1
        answer(path, 5, first=50)
        one.due()
        assert not one.wants
        give(one, 4, weights(path))
        assert one.versions.current.number == 1
        assert (one.n_taken, one.n_refused) == n  # it was not even tried
        Versions(RunDirectory(path)).unpin()
        until(lambda: one.wants)
        assert one.told[-1] == "version 1 is unpinned: a better one may take its place"
        give(one, 4, weights(path))
        assert len(one.versions.current.trained_on | one.versions.current.held_back) == 55
        assert one.versions.current.number == 3
        assert "; version 1 has" in one.told[-1]


def test_a_rollback_in_the_middle_of_a_challenge_is_not_run_over(path, monkeypatch):
    answer(path, 50)
    with challenging(path) as one:
        give(one, 1, blinded(path))
        give(one, 2, weights(path))
        n_left, real = [1], Challenger._score_of

        def score_of(self, *arguments):
            found = real(self, *arguments)
            if n_left[0]:
                n_left[0] -= 1
                Versions(RunDirectory(path)).rollback()
            return found

        monkeypatch.setattr(Challenger, "_score_of", score_of)
        monkeypatch.setattr(Challenger, "_refusal", lambda *_: "")
        give(one, 3, weights(path))
        assert n_left == [0]
        assert one.versions.current.number == 1
        assert not (path / "served" / f"{3:010}").exists()


def test_a_full_disk_costs_a_head_and_not_the_run(path, monkeypatch):
    answer(path, 50)

    def full(*_):
        raise OSError(28, "No space left on device")

    with challenging(path) as one:
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", full)
            give(one, 1, weights(path))
            give(one, 2, weights(path))
        assert sum("No space left on device" in event for event in one.told) == 1
        assert one.versions.current is None
        give(one, 3, weights(path))
        assert one.versions.current.number == 1


def test_a_disk_that_cannot_be_read_does_not_hold_up_the_end(path, monkeypatch):
    answer(path, 50)

    def unreadable(*_):
        raise OSError(5, "Input/output error")

    with challenging(path) as one:
        monkeypatch.setattr(one.versions, "look", unreadable)
        give(one, 1, weights(path))  # and waits until it is busy no more
        assert sum("Input/output error" in event for event in one.told) == 1


def test_numbers_that_break_are_refused(path):
    answer(path, 50)
    tensors = weights(path)
    tensors["encoder.bn1.running_var"].fill_(float("nan"))
    with challenging(path) as one:
        give(one, 1, tensors)
        assert one.versions.current is None
        assert "refused: its probabilities are no numbers" in one.told[-1]


def test_a_bug_in_the_thread_is_the_runs_error(path, monkeypatch):
    answer(path, 50)

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(module, "fit_linear", broken)
    with challenging(path) as one, pytest.raises(ZeroDivisionError):
        give(one, 1, weights(path))


def test_a_class_that_is_new_counts_against_the_version_that_does_not_know_it(path):
    labels = Labels(path / "labels.sqlite")
    questions = labels.questions()
    for question in questions[:40]:
        if question.arrival % COLOURS < 2:
            labels.answer(f"a-{question.key}", "label", [question.key], question.arrival % COLOURS + 1)
    with challenging(path) as one:
        give(one, 1, weights(path))
        assert one.versions.current.classes == ["green", "red"]
        for question in questions:
            if question.arrival % COLOURS == 2:
                labels.answer(f"a-{question.key}", "label", [question.key], 3)
        give(one, 2, weights(path))
        assert one.versions.current.classes == ["blue", "green", "red"]
    labels.close()


def test_a_label_counts_for_the_neighbouring_frames_but_not_where_it_is_held_back(path, monkeypatch):
    answer(path, 30)
    companions, labels = {}, Labels(path / "labels.sqlite")
    questions = labels.questions()[:30]
    for question in questions:
        companions[question.key] = random_images(3, 16, seed=question.arrival)
        pictures = [*map(png, companions[question.key]), labels.picture(questions[0].key)]  # the last has its own label
        with labels._change() as db:
            values = [(question.key, 1000 + i, picture) for i, picture in enumerate(pictures)]
            db.executemany("INSERT INTO companions VALUES (?, ?, ?)", values)
    labels.close()
    shown = []

    def spy(features, labels, n_classes, weights, groups):
        shown.append((features, labels, weights, groups))
        return module_fit_linear(features, labels, n_classes, weights, groups)

    monkeypatch.setattr(module, "fit_linear", spy)
    with challenging(path) as one:
        give(one, 1, weights(path))
        version = one.versions.current
    ((features, labels, counts, groups),) = shown
    n = len(version.trained_on)
    assert 20 <= n < 30
    assert n + len(version.held_back) == 30
    assert counts.tolist() == [1.0] * n + [SPREAD_WEIGHT] * 3 * n
    assert torch.equal(groups, torch.cat([torch.arange(n), torch.arange(n).repeat_interleave(3)]))
    assert torch.equal(labels[n:], labels[:n].repeat_interleave(3))
    model = encoder(path)
    frames = torch.cat([companions[key] for key in sorted(version.trained_on)])
    assert torch.allclose(features[n:], infer(model, frames, model.features).cpu(), atol=1e-4)


def test_the_end_does_not_wait_for_a_long_challenge(path, monkeypatch):
    n_read, began = [0], threading.Event()

    class Slow(DatasetLabels):
        def images(self, keys):
            n_read[0] += 1
            began.set()
            until(lambda: one._ends)  # it goes on until then
            return super().images(keys)

    images = ArrayImages(colours(90).repeat(20, 1, 1, 1).numpy(), np.arange(1800) % COLOURS, NAMES)
    monkeypatch.setattr(module, "BATCH_SIZE", 8)
    with challenging(path, Slow(images, torch.arange(1800))) as one:
        one.give(1, weights(path))
        assert began.wait(60)
    assert n_read[0] == 1  # of 225
    assert one.versions.current is None


def test_it_is_busy_also_at_the_moment_when_it_takes_what_was_offered():
    class Taking:
        """Its thread begins when somebody has just looked whether it is at work."""

        _ends, _offered, _thread = False, (1, {}), SimpleNamespace(done=lambda: False)

        @property
        def _is_at_work(self):
            self._offered = None
            return False

    assert Challenger.is_busy.fget(Taking())


def test_the_labels_of_a_dataset(path):
    images = ArrayImages(colours(90).numpy(), np.arange(90) % COLOURS, NAMES)
    with challenging(path, DatasetLabels(images, torch.arange(60))) as one:
        give(one, 1, weights(path))
        assert (len(one.versions.current.trained_on), one.versions.current.score.n) == (48, 12)
        assert one.versions.current.score.right > 8


def test_which_labels_are_at_hand(path, monkeypatch):
    synthetic = open_stream("synthetic:?size=16")
    assert isinstance(labels_at_hand(RunOptions(label_budget="30"), path, synthetic), Answers)
    monkeypatch.setattr(module, "MAX_LABELS", 300)
    known = labels_at_hand(RunOptions(fractions="0.01,0.1"), path, synthetic)
    classes = known.read()
    assert len(classes) == 300  # of 500
    assert set(classes.values()) == set(synthetic.source.classes)
    assert labels_at_hand(RunOptions(fractions="0.01"), path, synthetic).read().keys() != classes.keys()
    (path / "flat").mkdir()
    for i, image in enumerate(colours(3)):
        (path / "flat" / f"{i}.png").write_bytes(png(image))
    assert labels_at_hand(RunOptions(), path, open_stream(path / "flat")) is None
