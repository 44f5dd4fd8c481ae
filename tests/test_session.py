import dataclasses
import errno
import os
import shutil
import signal
import sqlite3
import threading
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from streamclr.base.errors import Stopped, UserError
from streamclr.base.files import write_json
from streamclr.labelling import session as session_module
from streamclr.labelling import worker as worker_module
from streamclr.labelling.candidates import read_clips
from streamclr.labelling.order import directions
from streamclr.labelling.session import N_AHEAD, N_ALIKE, LabelSession, wilson
from streamclr.labelling.store import Labels
from streamclr.labelling.worker import Worker
from streamclr.learner import Learner
from streamclr.models.heads import Heads
from streamclr.records.checkpoints import Pace
from streamclr.records.directory import FINISHED, RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.next_step import next_step
from streamclr.runs.run import run
from support.images import make_folder
from support.labelling import COLOURS, SIZE, colours, encoder, finish, keys, make_run, opened, reach
from support.waiting import until


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """A finished run whose questions are chosen; to be copied."""
    path = make_run(tmp_path_factory.mktemp("session") / "chosen")
    one = LabelSession(RunDirectory(path))
    one.prepare()
    for name in ("red", "green", "blue"):
        one.labels.add_class(name)
    one.close()
    return path


@pytest.fixture
def session(chosen, tmp_path):
    one = opened(shutil.copytree(chosen, tmp_path / "run"))
    yield one
    one.close()


def answer_all(one, n=None, class_of=lambda question: question.rank % 3 + 1):
    for i, question in enumerate(one.questions[:n]):
        one.labels.answer(f"answer-{i}", "label", [question.key], class_of(question))


@pytest.fixture
def working(monkeypatch):
    """Workers that look again at once, and end with the test."""
    monkeypatch.setattr(worker_module, "LOOK_EVERY_SECONDS", 0.02)
    workers = []
    yield lambda one: workers.append(Worker(one)) or workers[-1]
    for worker in workers:
        worker.close()


# ----------------------------------------------------------------------------------------------------------------------


def test_a_run_without_a_label_queue_says_how_to_have_one(tmp_path):
    with pytest.raises(UserError, match="has no label queue: run with --label-budget"):
        LabelSession(RunDirectory(make_run(tmp_path / "run", budget=None)))


@pytest.mark.parametrize(("budget", "n"), [("30", 30), ("1", 1), ("90", 90), ("200", 90), ("60%", 54), ("0.1%", 50)])
def test_as_many_are_asked_about_as_the_budget_says(tmp_path, budget, n):
    """A share is of what was seen so far, in a stream without an end."""
    one = opened(make_run(tmp_path / "run", budget=budget))
    assert len(one.questions) == len(one.features) == len(set(keys(one))) == n
    assert one.state()["progress"] == {"asked": n, "labelled": 0, "skipped": 0, "unsure": 0, "left": n}


def test_the_budget_grows_with_a_stream_that_has_no_end(tmp_path):
    path = make_run(tmp_path / "run", images=colours(40), budget="80%", finished=False, step=1)
    one = opened(path)
    assert len(keys(one)) == 40
    one.labels.answer("answer-1", "unsure", keys(one)[:3])
    make_run(path, budget="80%", finished=False, step=2)
    one.prepare()
    assert len(keys(one)) == 72
    assert one.labels.answers().keys() < set(keys(one))


def test_the_pictures_are_the_images_of_the_stream(session):
    images = colours(90)
    for question in session.questions:
        assert torch.equal(session._image(question.key), images[question.arrival])


def test_questions_are_the_same_after_everything_was_started_again(session):
    before, features, state = keys(session), session.features, session.state()
    session.close()
    again = opened(session.directory.path)
    assert keys(again) == before
    assert torch.equal(again.features, features)
    assert again.state() == state
    again.close()


def test_another_encoder_chooses_anew_and_what_was_answered_stays(tmp_path):
    path = make_run(tmp_path / "run", finished=False, step=1)
    one = opened(path)
    first = keys(one)
    one.labels.add_class("red")
    one.labels.answer("answer-1", "label", first[-2:], 1)
    one.labels.answer("answer-2", "skip", first[-3:-2])
    one.labels.answer("answer-3", "unsure", first[-4:-3])
    one.labels.undo("undo-1")  # it was seen, and may be answered again
    reach(path, 2)
    one.prepare(choose_anew=False)
    assert keys(one) == first
    assert one.model_of == "the encoder of step 2"
    one.prepare()
    assert len(keys(one)) == 30
    assert set(first[-4:]) < set(keys(one))
    assert set(keys(one)) != set(first)
    assert {one.labels.answers()[key].class_id for key in first[-2:]} == {1}


def test_questions_in_other_hands_stay(tmp_path):
    path = make_run(tmp_path / "run", finished=False, step=1)
    one = opened(path)
    first = set(keys(one))
    one.labels.note("given", "tasks.json")
    reach(path, 2)
    one.prepare()
    assert set(keys(one)) == first


def test_what_is_answered_while_others_are_chosen_counts_for_the_budget(tmp_path, monkeypatch):
    path = make_run(tmp_path / "run", finished=False, step=1)
    one = opened(path)
    late, real = one.questions[::3], LabelSession._features

    def features(self, model, images, what):
        if what != "features":
            for i, question in enumerate(late):
                self.labels.answer(f"answer-{i}", "unsure", [question.key])
        return real(self, model, images, what)

    monkeypatch.setattr(LabelSession, "_features", features)
    reach(path, 7)
    one.prepare()
    assert len(one.questions) == 30
    assert {question.key for question in late} < set(keys(one))


def test_frames_that_lie_are_not_asked_about_where_guards_are_on(tmp_path):
    images = colours(60)
    images[::2] = 17  # a covered lens
    images[1::4] = torch.randint(256, (15, 3, SIZE, SIZE), dtype=torch.uint8)  # a broken cable
    images[::2, 0, 0, 0] = torch.arange(30, dtype=torch.uint8)  # not all of them the same picture
    on, off = (opened(make_run(tmp_path / name, images, budget="40", guards=name)) for name in ("on", "off"))
    assert {question.arrival % 4 for question in on.questions} == {3}
    assert len(on.questions) == 15
    assert len(off.questions) == 40


def test_where_the_guards_take_all_frames_for_lies_a_person_is_asked(tmp_path):
    images = torch.full((10, 3, SIZE, SIZE), 17, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(10, dtype=torch.uint8)
    assert len(opened(make_run(tmp_path / "run", images, budget="4", guards="on")).questions) == 4


def test_a_run_that_is_still_learning_is_asked_about_with_its_last_checkpoint(tmp_path):
    path = make_run(tmp_path / "run", finished=False)
    one = LabelSession(RunDirectory(path))
    with pytest.raises(UserError, match=r"/run has no encoder yet, [^\n]*: start it again[^\n]*$"):
        one.prepare()
    assert not one.state()["ready"]
    reach(path, 3)
    one.prepare()
    assert one.state()["ready"]
    assert one.model_of == "the encoder of step 3"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.unlink(), "cannot be read"),
        (lambda file: file.write_bytes(b"nothing of it" * 1000), "holds no candidates"),
        (lambda file: os.truncate(file, 4500), "no images to ask about"),
        (lambda file: os.truncate(file, 0), "holds no candidates"),
    ],
)
def test_candidates_that_are_gone_are_said_and_what_was_asked_can_be_answered(tmp_path, damage, told):
    damage(make_run(tmp_path / "never asked") / "candidates.bin")
    with pytest.raises(UserError, match=told):
        opened(tmp_path / "never asked")
    path = make_run(tmp_path / "asked", finished=False, step=1)
    before = keys(opened(path))
    damage(path / "candidates.bin")
    finish(path)
    one = opened(path)
    assert keys(one) == before
    assert one.model_of == FINISHED
    assert told in one.state()["message"]
    assert one.state()["ready"]


def test_classes_of_the_source_are_there_at_once(tmp_path):
    path = make_run(tmp_path / "run")
    write_json(path / "classes.json", ["ant", "a" * 300, "bee"])
    one = opened(path)
    assert one.labels.classes() == {1: "ant", 2: "bee"}  # whoever needs the other gives it a shorter name


# ----------------------------------------------------------------------------------------------------------------------


def with_features(one, features):
    """As if the encoder had seen this in its questions."""
    one.features, one.directions = features, directions(features)
    return one


def test_accuracy_on_held_back_labels_is_high_where_features_tell_classes_apart(session):
    targets = torch.tensor([question.arrival % COLOURS for question in session.questions])
    with_features(session, F.one_hot(targets, COLOURS) * 5.0 + torch.randn(30, COLOURS))
    answer_all(session, class_of=lambda question: question.arrival % COLOURS + 1)
    trained = session.train()
    assert trained.accuracy > 0.9
    assert trained.interval[0] <= trained.accuracy <= trained.interval[1]
    assert (trained.probabilities.argmax(1) == targets).float().mean() > 0.9
    assert session.history() == [[30, *(pytest.approx(x, abs=1e-4) for x in (trained.accuracy, *trained.interval))]]
    accuracy = session.state()["accuracy"]
    assert (accuracy["value"], accuracy["n"], accuracy["training"]) == (trained.accuracy, 30, False)


def test_accuracy_on_held_back_labels_is_that_of_chance_where_there_is_nothing_to_know(tmp_path):
    """The classifier knows its own labels by heart in so many dimensions."""
    one = opened(make_run(tmp_path / "run", colours(120), budget="120"))
    with_features(one, torch.randn(120, 200, generator=torch.Generator().manual_seed(0)))
    classes = torch.randint(2, (120,), generator=torch.Generator().manual_seed(1))
    for name in ("a", "b"):
        one.labels.add_class(name)
    answer_all(one, class_of=lambda question: int(classes[question.rank]) + 1)
    trained = one.train()
    assert (trained.probabilities.argmax(1) == classes).float().mean() > 0.95
    assert 0.35 < trained.accuracy < 0.65
    assert trained.interval[0] < 0.5 < trained.interval[1]


def pairs_of_twins(one):
    """Rows 2i and 2i + 1 have the same features and the same class, and nothing else tells the classes."""
    features = torch.randn(15, 300, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, 0)
    classes = torch.randint(1, 3, (15,), generator=torch.Generator().manual_seed(2)).tolist()
    return with_features(one, features), classes


class Counted(list):
    """Counts how often somebody goes through it."""

    n = 0

    def __iter__(self):
        self.n += 1
        return super().__iter__()


def test_the_work_of_training_does_not_grow_with_the_square_of_the_labels(tmp_path, monkeypatch):
    """100,000 labels would take hours: the questions were gone through, and the groups sorted, once for each label."""
    one = opened(make_run(tmp_path / "run", colours(120), budget="60", clip=2, tracks=torch.arange(120) // 2))
    for name in ("red", "green", "blue"):
        one.labels.add_class(name)
    answer_all(one)
    assert len(one.questions) == 60
    assert one.labels.companions(one.questions[0].key)
    n_sorted = []
    monkeypatch.setattr(session_module, "sorted", lambda *of, **how: n_sorted.append(1) or sorted(*of, **how), False)
    one.questions = Counted(one.questions)
    assert one.train().n_spread > 0
    one.close()
    assert one.questions.n < 10
    assert len(n_sorted) < 10


def test_look_alikes_that_were_answered_at_one_go_are_held_back_together(chosen, tmp_path):
    accuracies = []
    for n_at_once in (2, 1):
        one = opened(shutil.copytree(chosen, tmp_path / f"run-{n_at_once}"))
        one, classes = pairs_of_twins(one)
        for row in range(0, 30, n_at_once):
            twins = [question.key for question in one.questions[row : row + n_at_once]]
            one.labels.answer(f"answer-{row}", "label", twins, classes[row // 2])
        accuracies.append(one.train().accuracy)
    together, apart = accuracies
    assert together < 0.75
    assert apart > 0.9  # each knows its twin


def test_answers_from_a_file_are_held_back_one_by_one(session):
    """They come in one request for each class, of which nothing would be known if it were held back as a whole."""
    targets = torch.tensor([question.arrival % COLOURS for question in session.questions])
    with_features(session, F.one_hot(targets, COLOURS) * 5.0 + torch.randn(30, COLOURS))
    names = session.labels.classes()
    session.labels.bring_in([(q.key, "label", names[q.arrival % COLOURS + 1]) for q in session.questions])
    trained = session.train()
    assert trained.n_labels == 30
    assert trained.accuracy > 0.9


def test_of_few_answers_no_accuracy_is_told(session):
    answer_all(session, 4)
    assert session.train().accuracy is None
    assert session.history() == []
    assert session.state()["accuracy"] == {
        "value": None, "low": 0.0, "high": 1.0, "n": 4, "training": False, "history": [],
    }  # fmt: skip


def test_the_accuracy_of_fewer_labels_is_forgotten_when_they_are_taken_back(session):
    for n in (8, 10):
        answer_all(session, n)
        session.train()
    assert [n for n, *_ in session.history()] == [8, 10]
    session.labels.undo("undo-1")
    assert session.state()["accuracy"]["training"]
    session.train()
    assert [n for n, *_ in session.history()] == [8, 9]


def test_taken_back_to_one_class_there_is_no_classifier(session):
    keys_of = {c: [q.key for q in session.questions if q.arrival % COLOURS == c] for c in range(COLOURS)}
    session.labels.answer("answer-1", "label", keys_of[0], 1)
    assert session.train() is None
    session.labels.answer("answer-2", "label", keys_of[1], 2)
    assert session.train().classes == [1, 2]
    assert session.heads.load().classes == ["red", "green"]
    session.labels.undo("undo-1")
    assert session.train() is None
    state = session.state()
    assert state["accuracy"]["n"] == 0
    assert not state["accuracy"]["training"]
    assert all(task["guess"] is None for task in state["next"])
    with pytest.raises(UserError, match="has no classifier"):
        session.heads.load()
    session.labels.undo("undo-2")
    assert session.train() is None
    assert session.state()["last"] is None


def test_a_class_without_labels_is_none_of_the_classifiers(session):
    answer_all(session, 12, class_of=lambda question: 1 if question.arrival % 2 else 3)
    assert session.train().classes == [1, 3]
    classifier = session.heads.load()
    assert classifier.classes == ["red", "blue"]
    assert classifier.head.linear.out_features == 2
    assert {task["guess"]["class"] for task in session.state()["next"]} <= {1, 3}
    assert [c["n"] for c in session.state()["classes"]] == [
        sum(question.arrival % 2 == odd for question in session.questions[:12]) if odd is not None else 0
        for odd in (1, None, 0)
    ]


def test_a_fine_tuned_classifier_stays_until_a_better_one_is_there(session, monkeypatch):
    monkeypatch.setattr(
        session_module, "choose_classifier", partial(session_module.choose_classifier, steps=20, quiet=True)
    )
    answer_all(session, 15, lambda question: question.arrival % COLOURS + 1)
    trained = session.train("finetuned")
    assert (trained.kind, trained.n_labels, trained.why[:11]) == ("finetuned", 15, "fine-tuned:")
    info, classifier = session.heads.labelled(), session.heads.load()
    assert (info.kind, info.has_encoder, info.n_labels) == ("finetuned", True, 15)
    images = torch.stack([session._image(question.key) for question in session.questions])
    assert torch.allclose(classifier.probabilities(images), trained.probabilities, atol=1e-5)
    session.heads.save_labelled(classifier.head, info.classes, info.encoder, 15, 1.0, 3, "finetuned", classifier.model)
    answer_all(session, 18, lambda question: question.arrival % COLOURS + 1)
    assert session.train().kind == "linear"  # what the page guesses with
    assert session.heads.labelled().kind == "finetuned"  # what is served
    assert "is fine-tuned, and better than a new linear one: streamclr label train" in session.state()["message"]
    session.heads.save_labelled(classifier.head, info.classes, info.encoder, 15, 0.0, 3, "finetuned", classifier.model)
    session.train()
    assert (session.heads.labelled().kind, session.heads.labelled().n_labels) == ("linear", 18)
    assert session.state()["message"] == ""


def test_a_renamed_class_has_its_new_name_in_the_saved_classifier(session, working):
    answer_all(session, 6)
    worker = working(session)
    until(lambda: not session.is_behind())
    session.labels.rename_class(2, "grün")
    worker.wake()
    until(lambda: "grün" in session.heads.load().classes)
    assert session.heads.load().classes == ["red", "grün", "blue"]


def test_unsure_and_skipped_images_are_not_learned_from(session):
    answer_all(session, 10)
    session.labels.answer("answer-x", "unsure", [session.questions[0].key])
    session.labels.answer("answer-y", "skip", [session.questions[1].key])
    assert session.train().n_labels == 8
    assert session.state()["progress"] == {"asked": 30, "labelled": 8, "skipped": 1, "unsure": 1, "left": 21}


def test_the_order_stays_and_skipped_ones_come_last(session):
    state = session.state()
    assert [task["id"] for task in state["next"]] == keys(session)[:N_AHEAD]
    answer_all(session, 4)
    session.labels.answer("answer-x", "skip", [session.questions[5].key])
    session.labels.answer("answer-y", "skip", [session.questions[4].key])
    trained = session.train()
    order = session._to_ask(session.labels.answers())
    assert sorted(order) == list(range(4, 30))
    assert order[-2:] == [5, 4]  # in the order in which they were skipped
    assert order[:-2] == list(range(6, 30))
    shown = session.state()["next"]
    assert [task["id"] for task in shown] == [session.questions[row].key for row in order[:N_AHEAD]]
    for is_calibrated in (False, True):  # with few labels nobody knows how certain a guess may be
        trained.is_calibrated = is_calibrated
        for task in session.state()["next"]:
            probability, best = trained.probabilities[keys(session).index(task["id"])].max(0)
            shown = pytest.approx(float(probability), abs=1e-4) if is_calibrated else None
            assert task["guess"] == {"class": trained.classes[int(best)], "probability": shown}


def test_look_alikes_are_near_enough_not_answered_and_of_the_same_guess(session):
    """Ten pictures of each of three looks: of one look all are alike, of two none."""
    looks = torch.eye(COLOURS)[torch.tensor([question.rank % COLOURS for question in session.questions])]
    with_features(session, looks * 5 + 0.1 * torch.randn(30, COLOURS, generator=torch.Generator().manual_seed(0)))
    session.labels.answer("answer-x", "skip", [session.questions[6].key])
    session.labels.answer("answer-y", "unsure", [session.questions[7].key])
    place = {key: row for row, key in enumerate(keys(session))}

    def alike():
        return {place[t["id"]]: {place[one["id"]] for one in t["alike"]} for t in session.state()["next"]}

    assert alike()[0] == set(range(3, 30, 3)) - {6}
    assert alike()[1] == set(range(4, 30, 3)) - {7}
    answer_all(session, 5)
    trained = session.train()
    assert alike()[5] == set(range(8, 30, 3))
    trained.probabilities[8] = trained.probabilities[9]  # another guess
    assert alike()[5] == set(range(11, 30, 3))
    trained.least_similarity = 1.01  # the answers have shown that nothing is near enough
    assert not any(alike().values())


def test_review_begins_with_the_labels_that_the_classifier_doubts(session):
    targets = torch.tensor([question.rank % COLOURS for question in session.questions])
    with_features(session, F.one_hot(targets, COLOURS) * 5.0 + 0.5 * torch.randn(30, COLOURS))
    answer_all(session, 24, lambda question: (question.rank + (question.rank == 12)) % COLOURS + 1)  # one is wrong
    session.labels.answer("answer-s", "skip", [session.questions[24].key])
    session.labels.answer("answer-u", "unsure", [session.questions[25].key])
    session.train()
    found = session.review()
    assert found[0] == {"id": keys(session)[12], "arrival": session.questions[12].arrival, "kind": "label"} | {
        "class": 2, "doubt": 1,
    }  # fmt: skip
    assert [one["kind"] for one in found[1:3]] == ["unsure", "label"]  # then the newest; skipped ones come again anyway
    assert len(found) == 25
    session.labels.answer("answer-c", "label", [keys(session)[12]], 1)  # corrected
    session.train()
    assert session.review()[0] == found[0] | {"class": 1, "doubt": None}
    assert [(one["n"], one["tested"], one["right"]) for one in session.state()["classes"]] == [(8, 8, 8)] * 3


def test_two_pages_get_different_questions_and_undo_their_own_answers(session):
    first = [task["id"] for task in session.state("ada")["next"]]
    second = [task["id"] for task in session.state("bob")["next"]]
    assert not set(first) & set(second)
    assert [task["id"] for task in session.state("ada")["next"]] == first  # as long as it shows them
    assert session.state("ada")["people"] == 2
    session.labels.answer("ada-1", "label", [first[0]], 1)
    session.labels.answer("bob-1", "label", [second[0]], 2)
    assert session.state("ada")["last"]["class"] == 1
    session.labels.undo("ada-2", page="ada")
    assert session.labels.answers().keys() == {second[0]}
    assert session.state("ada")["last"] is None
    with pytest.raises(UserError, match="there is no answer to undo"):
        session.labels.undo("ada-3", page="ada")


def test_one_can_stop_when_half_of_the_labels_say_the_same(session):
    targets = torch.tensor([question.rank % COLOURS for question in session.questions])
    with_features(session, F.one_hot(targets, COLOURS) * 5.0 + 0.1 * torch.randn(30, COLOURS))
    answer_all(session, 24)
    trained = session.train()
    assert (trained.settled.same, trained.settled.n) == (6, 6)
    assert session.state()["enough"] is None  # six pictures prove little
    trained.settled = trained.settled._replace(same=99, n=100)
    assert session.state()["enough"] is None  # 94.6 % at least
    trained.settled = trained.settled._replace(same=100)
    assert session.state()["enough"] == {"same": 100, "n": 100}


def test_to_the_last_question_and_back(session):
    for i, question in enumerate(session.questions[:-1]):
        session.labels.answer(f"answer-{i}", "skip" if i == 3 else "label", [question.key], None if i == 3 else 1)
    last, _ = session.state()["next"]
    assert (last["id"], last["alike"]) == (session.questions[-1].key, [])
    session.labels.answer("answer-l", "unsure", [last["id"]])
    assert [task["id"] for task in session.state()["next"]] == [session.questions[3].key]
    session.labels.answer("answer-s", "label", [session.questions[3].key], 2)
    assert session.state()["next"] == []
    assert session.state()["progress"]["left"] == 0
    session.labels.undo("undo-1")
    assert [task["id"] for task in session.state()["next"]] == [session.questions[3].key]


def test_an_interval_holds_the_true_share():
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1
    assert wilson(50, 100) == pytest.approx((0.404, 0.596), abs=1e-3)  # Wilson (1927)
    assert wilson(5, 10)[1] - wilson(5, 10)[0] > wilson(500, 1000)[1] - wilson(500, 1000)[0]


# ----------------------------------------------------------------------------------------------------------------------


def test_the_state_is_never_a_mixture_while_others_are_chosen(tmp_path, working):
    path = make_run(tmp_path / "run", finished=False, step=1)
    one = opened(path)
    for name in ("red", "green", "blue"):
        one.labels.add_class(name)
    answer_all(one, 9)
    stop, wrong = threading.Event(), []

    def look():
        while not stop.wait(0.002):
            state = one.state()
            ids = [task["id"] for task in state["next"]]
            if len(set(ids)) != N_AHEAD or state["progress"] != {
                "asked": 30, "labelled": 9, "skipped": 0, "unsure": 0, "left": 21,
            }:  # fmt: skip
                wrong.append(state)
            if any(len(task["alike"]) > N_ALIKE for task in state["next"]):
                wrong.append(state)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    reach(path, 2)
    one.prepare()
    one.train()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_worker_takes_the_last_encoder_when_the_run_is_finished(tmp_path, working):
    path = make_run(tmp_path / "run", finished=False)
    one, directory = LabelSession(RunDirectory(path)), RunDirectory(path)
    working(one)
    until(lambda: "no encoder yet" in one.state()["message"])
    reach(path, 1)
    until(lambda: one.state()["ready"])
    for name in ("red", "green", "blue"):
        one.labels.add_class(name)
    answer_all(one, 9)
    until(lambda: (path / "labelled.safetensors").exists())
    assert Heads(directory).labelled().encoder == "the encoder of step 1"
    finish(path)
    until(lambda: one.model_of == FINISHED and not one.is_behind())
    classifier = Heads(directory).load()
    assert classifier.classes == ["red", "green", "blue"]
    assert torch.equal(classifier.head(one.features).softmax(1), one.trained.probabilities)
    assert len(one.questions) == 30


def test_who_opens_the_page_again_has_the_newest_encoder_and_keeps_the_questions_of_a_session(tmp_path, working):
    path = make_run(tmp_path / "run", finished=False, step=1)
    one = LabelSession(RunDirectory(path))
    worker = working(one)
    until(lambda: one.state()["ready"])
    first = keys(one)
    reach(path, 2)
    time.sleep(0.2)
    assert one.model_of == "the encoder of step 1"  # nobody asked for another
    worker.look_anew()
    until(lambda: one.model_of == "the encoder of step 2")
    second = keys(one)
    assert second != first  # nobody was answering
    for name in ("red", "green", "blue"):
        one.labels.add_class(name)
    answer_all(one, 9)
    reach(path, 3)
    worker.look_anew()
    until(lambda: one.model_of == "the encoder of step 3" and not one.is_behind())
    assert keys(one) == second
    assert one.heads.load().classes == ["red", "green", "blue"]


def test_a_classifier_is_never_told_to_be_of_an_encoder_that_it_is_not_of(tmp_path, monkeypatch, capsys):
    """The final encoder is read, and then something fails."""
    path = make_run(tmp_path / "run", finished=False, step=1)
    one = opened(path)
    for name in ("red", "green", "blue"):
        one.labels.add_class(name)
    answer_all(one, 6)
    finish(path)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(LabelSession, "_features", fail)
        with pytest.raises(OSError, match="Input/output error"):
            one.prepare()
    one.train()
    capsys.readouterr()
    earlier = one.heads.load()  # it was kept beside the classifier
    assert "classifier is for the encoder of step 1, and the run has learned on to the fini" in capsys.readouterr().err
    own = encoder(path, 1).state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in earlier.model.state_dict().items())
    one.prepare()
    one.train()
    final = encoder(path).state_dict()
    assert all(torch.equal(tensor, final[name]) for name, tensor in one.heads.load().model.state_dict().items())
    assert not one.heads.encoder_file.exists()
    assert not capsys.readouterr().err


def test_the_worker_asks_more_when_all_is_answered_and_the_run_has_seen_more(tmp_path, working):
    """The page was opened a few seconds after the start of the run."""
    path = make_run(tmp_path / "run", images=colours(4), finished=False)
    RunDirectory(path).save_first_model(encoder(path))
    one = LabelSession(RunDirectory(path))
    worker = working(one)
    until(lambda: len(one.questions) == 4)
    assert one.model_of == "the encoder of step 0"
    make_run(path, finished=False)
    answered = keys(one)
    one.labels.answer("answer-1", "unsure", answered[:3])
    worker.wake()
    until(lambda: one.trained_on == (1, {}))
    assert keys(one) == answered  # nothing is replaced under the hand of somebody who answers
    one.labels.answer("answer-2", "skip", answered[3:])
    worker.wake()
    until(lambda: len(one.questions) == 30)
    assert set(answered) < set(keys(one))
    one.labels.answer("answer-3", "unsure", keys(one))
    assert not one.runs_out  # the budget is used up


def test_a_run_that_has_only_begun_is_labelled_and_predicts(tmp_path, monkeypatch, capsys):
    """Before its first step is done, and after the run went on from there."""
    source = f"folder:{make_folder(tmp_path / 'images', 160, 8, classes=('ant',)) / 'ant'}"  # without labels
    config = RunOptions(source=source, buffer=8, width=1, out=str(tmp_path / "run"))

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn_many", killed)
        with pytest.raises(Killed):
            run(config)
    assert "questions are there while it learns: streamclr label" in capsys.readouterr().err
    directory = RunDirectory(tmp_path / "run")
    assert not directory.checkpoints.numbers()
    with pytest.raises(UserError, match="has no classifier yet: label some images, which takes about 2 minutes"):
        Heads(directory).load()
    one = opened(directory.path)
    assert len(one.questions) == 8  # of the first segment
    for row, name in enumerate(("large", "small")):
        one.labels.add_class(name)
        one.labels.answer(f"answer-{row}", "label", keys(one)[row::2], row + 1)
    one.train()
    assert one.heads.load().classes == ["large", "small"]
    one.close()
    path, _ = run(config)
    assert not (path / "first.safetensors").exists()
    capsys.readouterr()
    assert Heads(directory).load().classes == ["large", "small"]
    assert "is for the encoder of step 0, and the run has learned on" in capsys.readouterr().err
    assert next_step(directory) == f"streamclr label train {path} (the encoder has learned on since)"
    again = opened(path, choose_anew=False)
    again.train()
    assert next_step(directory) == f"streamclr predict {path} --source …"


def test_the_worker_outlives_a_full_disk(session, working, monkeypatch):
    full, real = [True], Heads.save_labelled

    def save(self, *args):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, *args)

    monkeypatch.setattr(Heads, "save_labelled", save)
    answer_all(session, 6)
    working(session)
    until(lambda: "No space left" in session.state()["message"])
    full[0] = False
    until(lambda: not session.is_behind())
    assert session.state()["message"] == ""
    assert session.heads.load()


def test_the_worker_outlives_a_database_that_others_hold(session, working, monkeypatch):
    locked, real = [True], Labels.answers

    def answers(self):
        if locked[0]:
            raise sqlite3.OperationalError("database is locked")
        return real(self)

    answer_all(session, 6)
    with monkeypatch.context() as patch:
        patch.setattr(Labels, "answers", answers)
        working(session)
        until(lambda: "database is locked" in session.message)
        locked[0] = False
        until(lambda: not session.is_behind())


def test_the_worker_trains_once_for_each_change(session, working, monkeypatch):
    n_trained, real = [0], LabelSession.train

    def train(self):
        n_trained[0] += 1
        return real(self)

    monkeypatch.setattr(LabelSession, "train", train)
    answer_all(session, 6)
    working(session)
    until(lambda: n_trained[0] == 1)
    time.sleep(0.2)
    assert n_trained[0] == 1
    other = Labels(session.labels.path)  # of another process, such as `label import`
    other.undo("undo-1")
    until(lambda: n_trained[0] == 2)
    other.close()


def test_the_worker_takes_over_what_another_process_has_chosen(tmp_path, working):
    path = make_run(tmp_path / "run", finished=False, step=1)
    one = LabelSession(RunDirectory(path))
    working(one)
    until(lambda: one.state()["ready"])
    reach(path, 2)
    other = opened(path)
    with one._lock:  # it changes them together
        assert keys(other) != [question.key for question in one.questions] or one.model_of == "the encoder of step 2"
    until(lambda: one.questions == other.questions)
    with one._lock:
        assert torch.equal(one.features, other.features)
    other.close()


# ----------------------------------------------------------------------------------------------------------------------


def test_a_run_that_was_killed_keeps_the_same_candidates(tmp_path, monkeypatch):
    source = f"folder:{make_folder(tmp_path / 'images', 160, 8, classes=('ant',)) / 'ant'}"  # without labels
    options = {"source": source, "buffer": 8, "width": 1, "label_budget": "5", "label_disk": "12K"}
    config = RunOptions(**options, checkpoint_steps=3, out=str(tmp_path / "broken"))
    whole, _ = run(dataclasses.replace(config, out=str(tmp_path / "whole")))
    n_steps = [0]

    def due(self):
        n_steps[0] += 1
        if n_steps[0] == 11:
            raise Killed
        return n_steps[0] % 3 == 0

    class Killed(BaseException):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(Pace, "due", due)
        with pytest.raises(Killed):
            run(config)  # after step 11, with step 9 saved
        patch.setattr(Pace, "due", lambda self: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped):
            run(config)
    path, _ = run(config)
    clips = [read_clips(directory / "candidates.bin") for directory in (whole, path)]
    kept = [[(frame.key, frame.arrival) for clip in own for frame in clip] for own in clips]
    assert kept[0] == kept[1]
    assert len(kept[0]) >= 30
    assert max(arrival for _, arrival in kept[0]) > 80
    assert {len(clip) for clip in clips[0]} >= {3}  # so that there are two for each question
    assert keys(opened(whole)) == keys(opened(path))
