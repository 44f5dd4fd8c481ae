import errno
import itertools
import json
import os
import threading
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamclr.base.errors import UserError
from streamclr.base.files import json_line
from streamclr.records import journal as module
from streamclr.records.journal import N_PARTS, Journal, Tail, cut, files_of, last_number, lines_of, parse_limit

LIMIT = 4000  # of a test: about ten lines in each of the files


def line(number, **more):
    return {"number": number, "text": "x" * (60 + number % 7)} | more


def write(path, numbers, limit=LIMIT):
    with closing(Journal(path, limit=limit)) as journal:
        for number in numbers:
            assert journal.write(line(number))


def numbers(lines):
    return [json.loads(one)["number"] for one in lines]


def n_bytes(path):
    return sum(file.stat().st_size for file in path.parent.iterdir())


@pytest.fixture(scope="module", autouse=True)
def _without_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


# ----------------------------------------------------------------------------------------------------------------------
# One file


def test_a_full_disk_costs_lines_of_the_journal_not_the_run(tmp_path, monkeypatch, capsys):
    real, full = os.write, [False]

    def write(fd, content):
        if full[0] and "journal.jsonl" in os.readlink(f"/proc/self/fd/{fd}"):
            real(fd, bytes(content)[:10])  # a part of it still fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, content)

    monkeypatch.setattr("streamclr.records.journal.os.write", write)
    journal = Journal(tmp_path / "journal.jsonl")
    for number in range(1, 6):
        full[0] = number in (2, 3)
        journal.write({"number": number})
    full[0] = True
    journal.write({"number": 6})
    journal.sync()
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [1, 4, 5]
    assert journal.size == (tmp_path / "journal.jsonl").stat().st_size
    assert capsys.readouterr().err.count("cannot be written") == 2


def test_several_lines_are_written_together_or_not_at_all(tmp_path, monkeypatch, capsys):
    journal, real, n_left = Journal(tmp_path / "predictions.jsonl", "predictions.jsonl"), os.write, [1]

    def write(fd, content):
        n_left[0] -= 1
        return real(fd, content if n_left[0] >= 0 else bytes(content)[:15])  # the disk takes a line and a half

    monkeypatch.setattr("streamclr.records.journal.os.write", write)
    assert journal.write({"image": 0}, {"image": 1})
    assert not journal.write({"image": 2}, {"image": 3})
    n_left[0] = 1
    assert journal.write({"image": 4})
    journal.close()
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["image"] for line in lines] == [0, 1, 4]
    assert "predictions.jsonl cannot be written (the disk is full): going on" in capsys.readouterr().err


def test_one_thread_writes_while_another_syncs(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", limit=2**16)
    writer = threading.Thread(target=lambda: [journal.write({"number": n}) for n in range(2000)])
    writer.start()
    sizes = []
    while writer.is_alive():
        journal.sync()
        sizes.append(sum(len(one) for one in lines_of(tmp_path / "journal.jsonl")))
    assert sizes == sorted(sizes)
    assert numbers(lines_of(tmp_path / "journal.jsonl")) == list(range(2000))


@pytest.mark.parametrize(
    ("content", "number", "left"),
    [
        ("", 3, []),
        ('{"image": 0}\n{"image": 1}\n{"image": 2}\n', 2, [0, 1]),
        ('{"image": 0}\n{"image": 1}\n{"ima', 5, [0, 1]),
        ('{"image": 0}\n{"image": 1}\n', 0, []),
        ('{"image": 7}\n{"image": 9}\n{"image": 12}\n', 10, [7, 9]),  # some were lost, or moved away
        ('{"image": 0}\n\x00\x00\x00\n[]\n{"image": 4}\n', 4, [0]),
        ("no line at all", 4, []),
        ("".join(f'{{"image": {n}, "text": "{"x" * 3000}"}}\n' for n in range(100)), 3, [0, 1, 2]),  # many blocks
    ],
)
def test_cut_takes_back_what_came_later(tmp_path, content, number, left):
    file = tmp_path / "predictions.jsonl"
    cut(file, number)  # none there yet
    assert not file.exists()
    file.write_text(content)
    cut(file, number)
    assert [json.loads(line)["image"] for line in file.read_text().splitlines()] == left


# ----------------------------------------------------------------------------------------------------------------------
# A limit


@pytest.mark.parametrize("text", ["255K", "0", "much"])
def test_a_limit_that_is_too_small_is_refused(text):
    with pytest.raises(UserError, match="log_disk is"):
        parse_limit(text)
    assert parse_limit("1M") == 2**20


def test_nothing_is_thinned_before_three_quarters_of_the_limit_are_taken(tmp_path):
    journal, n = Journal(tmp_path / "journal.jsonl", limit=2**16), 0
    while n_bytes(journal.path) < 3 / 4 * 2**16 - 200:
        n += 1
        journal.write(line(n))
    assert numbers(lines_of(journal.path)) == list(range(1, n + 1))
    assert all(file.exists() for file in files_of(journal.path))


@given(st.lists(st.integers(0, 700), max_size=300), st.integers(4000, 20_000))
def test_it_keeps_to_its_limit_and_has_the_last_lines_in_full(tmp_path_factory, lengths, limit):
    path = tmp_path_factory.mktemp("run") / "journal.jsonl"
    journal, sizes = Journal(path, limit=limit), []
    for number, length in enumerate(lengths):
        assert journal.write({"number": number, "text": "x" * length})
        sizes.append(len(json_line({"number": number, "text": "x" * length})))
        assert n_bytes(path) <= limit
    found = numbers(lines_of(path))
    assert found == sorted(set(found))
    n_last = next((n for n in range(len(sizes)) if sum(sizes[-n - 1 :]) > limit // N_PARTS), len(sizes))
    assert found[len(found) - n_last :] == list(range(len(sizes) - n_last, len(sizes)))
    assert last_number(path) == max(0, len(lengths) - 1)


def test_of_old_lines_every_second_fourth_and_so_on_is_left(tmp_path):
    path = tmp_path / "journal.jsonl"
    write(path, range(1, 5000), limit=5 * LIMIT)
    older = numbers(files_of(path)[2].read_bytes().splitlines())
    gaps = [b - a for a, b in itertools.pairwise(older)]
    assert older[0] <= 128  # it reaches back to the beginning
    assert len(older) > 40
    assert all(gap & (gap - 1) == 0 for gap in gaps)  # powers of two
    assert gaps == sorted(gaps, reverse=True)  # the older, the fewer


def test_lines_that_last_are_thinned_last(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", limit=20_000, lasting="accuracy")
    for number in range(1, 3001):
        journal.write(line(number, **({"accuracy": 0.5} if number % 101 == 0 else {})))
    found = numbers(lines_of(journal.path))
    assert len(found) < 300
    assert set(range(101, 3001, 101)) <= set(found)
    for number in range(3001, 9001):  # nothing but such lines: the limit holds all the same
        journal.write(line(number, accuracy=0.5))
        assert n_bytes(journal.path) <= 20_000


def test_damaged_lines_and_those_of_earlier_versions_go_first(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time": "t", "event": "of an earlier version"}\n' * 5 + b"\xff\x00\n[]\n")
    assert len(list(lines_of(path))) == 7
    write(path, range(2, 200, 2))
    assert numbers(lines_of(path))[-1] == 198


def test_a_file_of_an_earlier_version_is_brought_below_the_limit(tmp_path):
    path = tmp_path / "predictions.jsonl"
    path.write_text("".join(json_line(line(number)) for number in range(1000)))
    write(path, range(1000, 1100))
    assert n_bytes(path) <= LIMIT
    assert numbers(lines_of(path))[-20:] == list(range(1080, 1100))


def test_without_room_to_thin_them_old_lines_are_lost_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "journal.jsonl"
    write(path, range(1, 40))
    monkeypatch.setattr(module, "write_new", full)
    write(path, range(40, 80))
    assert n_bytes(path) <= LIMIT
    found = numbers(lines_of(path))
    assert found == sorted(set(found))
    assert found[-10:] == list(range(70, 80))
    assert capsys.readouterr().err == ""


def test_without_room_for_a_new_file_lines_are_lost_until_there_is(tmp_path, monkeypatch, capsys):
    path, real, is_full = tmp_path / "journal.jsonl", type(tmp_path).open, [True]
    journal = Journal(path, limit=LIMIT)

    def opening(self, mode="r", *args, **named):
        if is_full[0] and mode == "ab":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, mode, *args, **named)

    monkeypatch.setattr(type(tmp_path), "open", opening)
    written = [number for number in range(1, 31) if journal.write(line(number))]
    assert written == list(range(1, len(written) + 1))
    assert 8 < len(written) < 15
    assert capsys.readouterr().err.count("cannot be written") == 1
    is_full[0] = False
    written += [number for number in range(31, 41) if journal.write(line(number))]
    assert numbers(lines_of(path)) == written
    assert written[-10:] == list(range(31, 41))
    assert n_bytes(path) <= LIMIT


def test_nothing_is_written_to_another_file_that_took_its_place(tmp_path, capsys):
    path = tmp_path / "run" / "journal.jsonl"
    path.parent.mkdir()
    journal = Journal(path, limit=LIMIT)
    for number in range(25):
        journal.write(line(number))
    path.parent.rename(tmp_path / "moved")
    path.parent.mkdir()
    path.write_text("another run's\n")
    results = [journal.write(line(number)) for number in range(25, 50)]
    assert not all(results)
    assert "the journal cannot be written (it was moved away): going on" in capsys.readouterr().err
    assert [file.read_text() for file in path.parent.iterdir()] == ["another run's\n"]


# ----------------------------------------------------------------------------------------------------------------------
# Kills


class Killed(BaseException):
    pass


CALLS = ("write", "rename", "replace", "fsync", "unlink", "open", "truncate")  # of os, that a journal makes


def kill_at(patch, n, is_done):
    """From the nth call of the system on nothing happens any more; is_done: that one is still done."""
    left = [n]

    def killing(real):
        def call(*args, **named):
            left[0] -= 1
            if left[0] > 0 or (left[0] == 0 and is_done):
                found = real(*args, **named)
                if left[0] > 0:
                    return found
            raise Killed

        return call

    for name in CALLS:
        patch.setattr(os, name, killing(getattr(os, name)))


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("n_before", [5, 100])
def test_a_kill_at_any_moment_loses_no_line_and_doubles_none(tmp_path, monkeypatch, n_before, is_done):
    """As a file moves on for the first time, the second, and when the oldest are thinned."""
    moments = set()
    for n in itertools.count(1):
        path = tmp_path / f"{n}" / "journal.jsonl"
        path.parent.mkdir()
        write(path, range(1, n_before + 1))  # of which a checkpoint knows
        n_written = n_before
        with monkeypatch.context() as patch, closing(Journal(path, limit=LIMIT)) as journal, suppress(Killed):
            kill_at(patch, n, is_done)
            for number in range(n_before + 1, n_before + 41):
                journal.write(line(number))
                n_written = number
        moments.add(frozenset(file.name for file in path.parent.iterdir()))
        assert n_bytes(path) <= LIMIT
        found = numbers(lines_of(path))
        assert found == sorted(set(found))
        assert found[-1] in (n_written, n_written + 1)  # that one was not yet known to be written
        assert set(range(max(1, n_written - 9), n_written + 1)) <= set(found)
        cut(path, n_before + 1)  # the run goes on from its checkpoint
        assert numbers(lines_of(path)) == [number for number in found if number <= n_before]
        write(path, range(n_before + 1, 151))
        again = numbers(lines_of(path))
        assert again == sorted(set(again))
        assert again[-10:] == list(range(141, 151))
        assert again[0] <= 16
        assert n_bytes(path) <= LIMIT
        if n_written == n_before + 40:
            break
    assert n > 50
    assert any("journal.jsonl" not in names for names in moments) is is_done  # after the rename, before the new file
    assert any("journal.jsonl.2.new" in names for names in moments)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=5))
def test_cut_back_over_all_files_it_is_as_if_the_later_lines_had_never_been(tmp_path_factory, parts):
    """parts: how many lines are written, and how many of the last are taken back then."""
    path, kept = tmp_path_factory.mktemp("run") / "journal.jsonl", 0
    for n_written, n_back in parts:
        write(path, range(kept + 1, kept + n_written + 1))
        before = numbers(lines_of(path))
        kept = max(0, kept + n_written - n_back)
        cut(path, kept + 1)
        assert numbers(lines_of(path)) == [number for number in before if number <= kept]
        assert last_number(path) == max([number for number in before if number <= kept], default=0)
        assert n_bytes(path) <= LIMIT


# ----------------------------------------------------------------------------------------------------------------------
# Readers


def test_lines_after_a_number_are_found_without_the_older_files(tmp_path):
    path = tmp_path / "journal.jsonl"
    write(path, range(1, 200))
    everything = numbers(lines_of(path))
    for after in (-1, 0, 5, 150, 190, 199, 500):
        assert numbers(lines_of(path, after)) == [number for number in everything if number > after]
    for file in files_of(path)[1:]:
        file.write_text("{}\n")
    assert numbers(lines_of(path, 195)) == [196, 197, 198, 199]


@pytest.mark.parametrize("n_at", [1, 2, 3])
@pytest.mark.parametrize("n_more", [1, 12, 30, 60])
def test_a_reader_misses_nothing_while_the_writer_moves_on(tmp_path, monkeypatch, n_at, n_more):
    """The writer writes between two opens of the reader; n_more: up to several files."""
    path, real, n_opened = tmp_path / "journal.jsonl", type(tmp_path).open, [0]
    write(path, range(1, 61))

    def opening(self, *args, **named):
        n_opened[0] += 1
        if n_opened[0] == n_at:
            with monkeypatch.context() as patch:
                patch.setattr(type(tmp_path), "open", real)
                write(path, range(61, 61 + n_more))
        return real(self, *args, **named)

    monkeypatch.setattr(type(tmp_path), "open", opening)
    found = numbers(lines_of(path))
    assert found == sorted(set(found))
    assert found[-1] >= 60
    if n_more <= 12:  # of several files that are full meanwhile there are only the thinned lines
        assert found[-10:] == list(range(found[-1] - 9, found[-1] + 1))


steps = st.lists(st.tuples(st.sampled_from(["write", "look", "cut", "break"]), st.integers(1, 12)), max_size=60)


@given(steps)
def test_a_reader_that_looks_often_gets_each_line_once(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("run") / "journal.jsonl"
    tail, shown, last, n_new = Tail(path, 10**6), [], 0, 0

    def look():
        nonlocal shown, n_new
        anew, lines = tail.read()
        shown, n_new = ([] if anew else shown) + numbers(lines), 0
        everything = numbers(lines_of(path))
        assert set(everything) <= set(shown)  # which has also what was thinned since
        assert shown == sorted(set(shown))
        assert max(shown, default=0) == last
        return anew

    for what, n in steps:
        if what == "write" and n_new + n <= 12:  # it does not look away for longer than one file takes
            write(path, range(last + 1, last + n + 1))
            last, n_new = last + n, n_new + n
        elif what == "look":
            assert not look()
        elif what == "cut":
            last, was_shown = max(0, last - n), max(shown, default=0)
            cut(path, last + 1)
            assert look() or was_shown <= last
        elif what == "break" and path.exists():
            with path.open("ab") as file:
                file.write(b'{"number": 99999')  # of a line that a power cut has broken
            assert not look()
            cut(path, last + 1)


def test_a_reader_that_looked_away_for_long_begins_anew(tmp_path):
    path = tmp_path / "journal.jsonl"
    tail = Tail(path, 10**6)
    assert tail.read() == (False, [])
    write(path, range(1, 10))
    assert numbers(tail.read()[1]) == list(range(1, 10))
    write(path, range(10, 100))
    anew, lines = tail.read()
    assert anew
    assert numbers(lines) == numbers(lines_of(path))
    for file in files_of(path):
        file.unlink()
    assert tail.read() == (False, [])  # deleted: what is known is kept


def test_of_a_long_journal_the_end_is_read_and_some_lines_of_the_rest(tmp_path):
    path = tmp_path / "journal.jsonl"
    write(path, range(1, 4001), limit=50 * LIMIT)
    everything = numbers(lines_of(path))
    end, sampled = Tail(path, 60_000), Tail(path, 60_000, 20)
    last = numbers(end.read()[1])
    assert last == everything[-len(last) :]
    assert 550 < len(last) < 750
    found = numbers(sampled.read()[1])
    assert found[-len(last) :] == last
    assert 17 <= len(found) - len(last) <= 23
    assert found == sorted(set(found))
    assert found[0] < 100
    assert set(found) <= set(everything)
    write(path, [4001, 4002])
    assert numbers(end.read()[1]) == numbers(sampled.read()[1]) == [4001, 4002]
