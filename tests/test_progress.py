import pytest

from streamclr.base import progress
from streamclr.base.progress import Progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress, "perf_counter", made)
    return made


def test_in_a_pipe_lines_have_the_count_and_the_time_left(clock, capsys):
    with Progress("learning", 1000, every=10) as bar:
        bar.start_from(500)
        clock.now += 5
        bar.advance(10, "too early to say")
        clock.now += 5
        bar.advance(90, "step 2")
        clock.now += 40
        bar.advance(400, "step 3")
    assert capsys.readouterr().err.splitlines() == [
        "learning: 600 of 1,000, 40 s left | step 2",
        "learning: 1,000 of 1,000, 0 s left | step 3",
        "learning: 1,000 of 1,000, done after 50 s",
    ]


def test_without_an_end_the_time_so_far_is_said(clock, capsys):
    with Progress("learning", None, every=10) as bar:
        clock.now += 4000
        bar.advance(64)
    assert "learning: 64, 1:06:40 so far" in capsys.readouterr().err


def test_what_keeps_a_person_waiting_says_at_once_that_it_begins(clock, capsys):
    with Progress("measuring a step", None, at_once=True):
        assert capsys.readouterr().err == "measuring a step …\n"


def test_what_is_short_says_nothing_in_a_pipe(clock, capsys):
    with Progress("learning", 10) as bar:
        bar.advance(10)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1:01"), (3599, "59:59"), (7449, "2:04:09")]
)
def test_clock(seconds, text):
    assert progress._clock(seconds) == text


def test_on_a_terminal_all_of_it_fits_a_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress("learning", 9984) as bar:
        bar.advance(640, "step 12 | loss 2.112 | 3 of 416 replaced | 0.0 % re-scored")
    shown = capsys.readouterr().err
    assert "640 of 9,984" in shown
    assert "left" in shown
    assert "step 12" in shown
    assert shown.count("\n") <= 1
