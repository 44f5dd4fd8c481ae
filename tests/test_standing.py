from contextlib import closing

import pytest

from streamclr.base.statistics import wilson
from streamclr.labelling.store import Labels
from streamclr.models.versions import Score, Versions
from streamclr.records.directory import RunDirectory
from streamclr.web.standing import Standing
from support.labelling import finish, make_run, make_version, opened


@pytest.fixture
def path(tmp_path):
    return make_run(tmp_path / "run", finished=False, step=3)


@pytest.fixture
def standing(path):
    with closing(Standing(RunDirectory(path))) as one:
        yield one


def test_a_run_that_has_only_begun_has_neither(standing, path):
    standing.update()
    assert standing.classifier is standing.labels is None
    assert not (path / "labels.sqlite").exists()  # it only looks


def test_the_version_in_use_with_its_accuracy_overall_and_by_class(standing, path):
    versions = Versions(RunDirectory(path))
    versions.take(make_version(versions.directory, score=Score(4, 5, 0.3)), None)
    versions.take(make_version(versions.directory, score=Score(5, 5, 0.3)), versions.current)
    standing.update()
    one = standing.classifier
    assert (one["name"], one["accuracy"], one["held_back"], one["pinned"]) == ("version 2", 1.0, 5, False)
    assert (one["low"], one["high"]) == wilson(5, 5)
    assert one["by_class"] == [["red", 5, 5]]
    Versions(RunDirectory(path)).rollback()
    standing.update()
    assert (standing.classifier["name"], standing.classifier["pinned"]) == ("version 1", True)
    Versions(RunDirectory(path)).unpin()
    standing.update()
    assert (standing.classifier["name"], standing.classifier["pinned"]) == ("version 1", False)


def test_labels_given_those_in_use_and_the_questions_that_are_open(standing, path):
    one = opened(path)
    keys = [question.key for question in one.labels.questions()]
    red, green = one.labels.add_class("red"), one.labels.add_class("green")
    one.labels.answer("first-one", "label", keys[:4], red)
    one.labels.answer("then-some", "label", keys[4:6], green)
    one.labels.answer("not-sure", "unsure", keys[6:7], None)
    standing.update()
    labels = standing.labels
    assert (labels["given"], labels["unsure"], labels["skipped"], labels["used"]) == (6, 1, 0, None)
    assert labels["open"] == len(keys) - 7
    assert labels["by_class"] == [["red", 4], ["green", 2]]
    versions = Versions(RunDirectory(path))
    version = make_version(versions.directory)
    object.__setattr__(version, "trained_on", frozenset(keys[:4]))
    versions.take(version, None)
    standing.update()
    assert standing.labels["used"] == 4
    one.labels.undo("undo-that")
    one.labels.undo("undo-more")
    standing.update()
    assert (standing.labels["given"], standing.labels["used"]) == (4, 4)
    one.close()


def test_without_versions_the_classifier_from_answers_counts(standing, path):
    finish(path)
    with closing(opened(path)) as one:
        for name in ("red", "green", "blue"):
            one.labels.add_class(name)
        for question in one.labels.questions():
            one.labels.answer(f"answer-{question.key}", "label", [question.key], question.arrival % 3 + 1)
        trained = one.train()
    standing.update()
    assert standing.classifier["accuracy"] == pytest.approx(trained.accuracy, abs=1e-4)
    assert standing.classifier["n_labels"] == trained.n_labels
    assert standing.classifier["classes"] == ["red", "green", "blue"]


def test_damaged_files_are_as_if_there_were_none(standing, path):
    (path / "labelled.safetensors").write_bytes(b"half a")
    (path / "served" / f"{1:010}").mkdir(parents=True)
    (path / "served" / f"{1:010}" / "manifest.json").write_text("{")
    (path / "labels.sqlite").write_bytes(b"no database at all, but long enough to be taken for one" * 30)
    standing.update()
    assert standing.classifier is standing.labels is None


def test_answers_of_a_person_are_seen_as_they_come(standing, path):
    opened(path).close()
    standing.update()
    assert standing.labels["given"] == 0
    with closing(Labels(path / "labels.sqlite")) as labels:
        labels.answer("a-request", "label", [labels.questions()[0].key], labels.add_class("red"))
    standing.update()
    assert standing.labels["given"] == 1
