import sqlite3
import threading

import pytest

from streamclr.base.errors import UserError
from streamclr.labelling.store import Conflict, Labels, Missing, Question

KEYS = [f"{i:032x}" for i in range(40)]


@pytest.fixture
def labels(tmp_path):
    labels = Labels(tmp_path / "labels.sqlite")
    labels.ask((Question(key, 10 * i, i), f"picture {i}".encode()) for i, key in enumerate(KEYS))
    for name in ("cat", "dog"):
        labels.add_class(name)
    yield labels
    labels.close()


def test_questions_come_in_their_order_with_their_pictures(labels):
    assert [question.key for question in labels.questions()] == KEYS
    assert labels.picture(KEYS[7]) == b"picture 7"
    assert labels.picture("f" * 32) is None


def test_the_last_answer_holds_and_undo_goes_back_one_by_one(labels):
    labels.answer("request-1", "label", KEYS[:3], 1)
    labels.answer("request-2", "label", KEYS[1:2], 2)
    assert [labels.answers()[key].class_id for key in KEYS[:3]] == [1, 2, 1]
    assert labels.last() == {"kind": "label", "class": 2, "n": 1}
    labels.undo("undo-1111")
    assert [labels.answers()[key].class_id for key in KEYS[:3]] == [1, 1, 1]
    labels.undo("undo-2222")
    assert labels.answers() == {}
    with pytest.raises(Conflict, match="no answer"):
        labels.undo("undo-3333")


def test_undo_takes_back_the_answer_that_is_meant(labels):
    labels.answer("request-1", "label", KEYS[:1], 1)
    labels.answer("request-2", "label", KEYS[1:2], 2)  # somebody else's
    labels.undo("undo-1111", of="request-1")
    assert list(labels.answers()) == KEYS[1:2]
    with pytest.raises(Conflict, match="no answer"):
        labels.undo("undo-2222", of="request-1")
    assert labels.quiet() < 60


def test_no_answer_goes_into_a_file_that_was_deleted(labels, tmp_path):
    (tmp_path / "labels.sqlite").unlink()
    with pytest.raises(sqlite3.OperationalError, match=r"labels\.sqlite was deleted"):
        labels.answer("request-1", "skip", KEYS[:1])
    other = Labels(tmp_path / "labels.sqlite")
    with pytest.raises(sqlite3.OperationalError, match="was deleted"):
        labels.add_class("bird")
    other.close()


def test_names_of_all_scripts(labels):
    for name in ("کتاب\u200cها", "क्\u200dष", "👨\u200d👩\u200d👧", "日本"):
        number = labels.add_class(name)
        assert labels.classes()[number] == name
    for name in ("\u200d", "a\u202eb", "a\x07", ""):
        with pytest.raises(UserError, match="not allowed: use 1 to 100 printable characters"):
            labels.add_class(name)


def test_a_request_that_is_sent_twice_counts_once(labels):
    for _ in range(2):
        labels.answer("request-1", "skip", KEYS[:1])
        labels.answer("request-2", "label", KEYS[:2], 1)
    assert labels.n_answers() == 3
    for _ in range(2):
        labels.undo("undo-1111")
    assert {key: answer.kind for key, answer in labels.answers().items()} == {KEYS[0]: "skip"}
    assert labels.add_class("bird", "request-3") == labels.add_class("bird", "request-3") == 3
    with pytest.raises(Conflict, match="used for another request"):
        labels.answer("request-1", "label", KEYS[:1], 1)


@pytest.mark.parametrize(
    ("kind", "keys", "class_id", "error"),
    [
        ("label", KEYS[:1], 99, Missing),
        ("label", [KEYS[0], "f" * 32], 1, Missing),
        ("label", KEYS[:1], None, UserError),
        ("skip", KEYS[:1], 1, UserError),
        ("perhaps", KEYS[:1], None, UserError),
    ],
)
def test_what_does_not_fit_changes_nothing(labels, kind, keys, class_id, error):
    with pytest.raises(error):
        labels.answer("request-1", kind, keys, class_id)
    assert labels.answers() == {}
    labels.answer("request-1", "unsure", KEYS[:1])  # its name is still free


def test_classes_have_names_of_their_own(labels):
    with pytest.raises(Conflict):
        labels.add_class("  cat ")
    with pytest.raises(Conflict):
        labels.rename_class(1, "dog")
    labels.rename_class(1, "  small   cat ")
    labels.rename_class(1, "small cat")
    assert labels.classes() == {1: "small cat", 2: "dog"}
    with pytest.raises(Missing):
        labels.rename_class(7, "horse")
    for name in ("", "   ", "x" * 101, "a\x00b"):
        with pytest.raises(UserError, match="not allowed: use 1 to 100 printable characters"):
            labels.add_class(name)


def test_new_questions_keep_the_answered_ones(labels):
    labels.answer("request-1", "label", KEYS[5:7], 1)
    labels.ask([(Question("a" * 32, 1000, 0), b"new")])
    assert {question.key for question in labels.questions()} == {"a" * 32, *KEYS[5:7]}
    assert labels.answers()[KEYS[5]].class_id == 1


def test_companions_go_with_their_question(labels):
    new, stays = "a" * 32, KEYS[5]
    companions = {new: [(1001, b"after"), (999, b"before")], stays: [(7, b"too late")], "b" * 32: [(3, b"not asked")]}
    labels.answer("request-1", "unsure", [stays])
    asked = [(Question(key, 1000 + i, i), b"new") for i, key in enumerate((new, stays, "b" * 32))]
    labels.ask(asked, at_most=2, companions=companions)
    assert labels.companions(new) == [b"before", b"after"]
    assert labels.companions(stays) == labels.companions("b" * 32) == []
    labels.ask([(Question("c" * 32, 1, 0), b"newer")])
    assert labels.companions(new) == []


def test_a_store_without_companions_gets_them(labels, tmp_path):
    labels.answer("request-1", "label", KEYS[:1], 1)
    labels._connection.execute("DROP TABLE companions")  # as version 0.1 made it
    labels.close()
    again = Labels(labels.path)
    assert again.companions(KEYS[0]) == []
    assert again.answers()[KEYS[0]].class_id == 1
    again.ask([(Question("a" * 32, 1000, 0), b"new")], companions={"a" * 32: [(1001, b"after")]})
    assert again.companions("a" * 32) == [b"after"]
    again.close()


def test_questions_in_other_hands_stay(labels):
    labels.note("given", "tasks.json")
    labels.ask([(Question("a" * 32, 1000, 0), b"new")])
    assert {question.key for question in labels.questions()} == {"a" * 32, *KEYS}


def test_answers_are_in_the_file_at_once(labels, tmp_path):
    """Another process, or this one after a power cut, finds them: the log is on the disk, not in a cache."""
    labels.answer("request-1", "label", KEYS[:2], 1)
    assert labels._read("PRAGMA journal_mode") == [("wal",)]
    assert labels._read("PRAGMA synchronous") == [(2,)]
    for name in ("labels.sqlite", "labels.sqlite-wal"):  # as they are now, nothing closed
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / name).write_bytes((tmp_path / name).read_bytes())
    other = Labels(tmp_path / "copy" / "labels.sqlite")
    assert other.answers() == labels.answers()


def test_many_threads_and_two_processes_at_once(labels, tmp_path):
    other = Labels(tmp_path / "labels.sqlite")
    for one in (labels, other):  # a slow disk would let some wait for longer than the database does
        one._connection.execute("PRAGMA synchronous = OFF")

    def answer(one, thread):
        for i, key in enumerate(KEYS):
            one.answer(f"{id(one)}-{thread}-{i}", "label", [key], 1 + i % 2)

    threads = [threading.Thread(target=answer, args=[one, t]) for one in (labels, other) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert labels.n_answers() == 8 * len(KEYS)


def test_a_file_that_is_none_is_said(tmp_path):
    (tmp_path / "labels.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(UserError, match=r"cannot use .*labels\.sqlite"):
        Labels(tmp_path / "labels.sqlite")


def test_answers_from_elsewhere_come_in_together_or_not_at_all(labels):
    labels.answer("request-1", "label", KEYS[:1], 1)
    answers = [(KEYS[0], "label", "cat"), (KEYS[1], "label", "bird"), (KEYS[2], "unsure", None)]
    assert labels.bring_in(answers) == 2
    assert labels.bring_in(answers) == 0
    assert labels.classes()[3] == "bird"
    labels.undo("undo-1111")
    assert labels.bring_in(answers) == 1  # of what was taken back
    with pytest.raises(Missing):
        labels.bring_in([(KEYS[3], "label", "horse"), ("f" * 32, "label", "horse")])
    assert "horse" not in labels.classes().values()
    assert KEYS[3] not in labels.answers()


def test_a_full_disk_is_an_error_of_the_answer(labels):
    labels._connection.execute("PRAGMA max_page_count = 1")

    def answer_for_ever():
        for i in range(1000):
            labels.answer(f"request-{i}", "label", KEYS, 1)

    with pytest.raises(sqlite3.OperationalError, match="full"):
        answer_for_ever()
    n_before = labels.n_answers()
    labels._connection.execute("PRAGMA max_page_count = 1000000")
    labels.answer("when there is room again", "label", KEYS[:1], 1)
    assert labels.n_answers() == n_before + 1
