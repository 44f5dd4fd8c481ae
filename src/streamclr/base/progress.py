"""Progress of long work: a bar on a terminal, else a plain line every few seconds."""

import logging
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress


def say(text: str) -> None:
    """Print a line on stderr. A full disk or a closed pipe must not end a run."""
    with suppress(OSError, ValueError):
        # In one write, so that lines of several processes do not mix.
        print(text + "\n", end="", file=sys.stderr, flush=True)


@contextmanager
def passing(text: str) -> Iterator[None]:
    """Show a line on the terminal until the block ends; elsewhere nothing."""
    shows = sys.stderr.isatty()
    if shows:
        print(text, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shows:
            print("\x1b[2K", end="\r", file=sys.stderr, flush=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and log lines of other libraries, which are not for a user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class Progress:
    """`with Progress("learning", 1000) as bar: bar.advance(10, "loss 4.8")`; total is None if unknown.

    On a terminal one line with a bar, which fits 80 columns; elsewhere a line every few seconds. Both have the count
    and the time that is left.

    at_once: also say where there is no terminal that it begins.
    """

    def __init__(self, what: str, total: int | None, every: float = 10.0, quiet: bool = False, at_once: bool = False):
        self.what, self.total, self.every, self.done = what, total, math.inf if quiet else every, 0
        self._at_once = at_once and not quiet
        self._bar = _rich_bar() if sys.stderr.isatty() and not quiet else None

    def __enter__(self) -> "Progress":
        self._started = self._said = perf_counter()
        self._before = 0  # of `done`, what a run had learned before it went on
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total, count="", left="", note="")
        elif self._at_once:
            say(f"{self.what} …")
        return self

    def start_from(self, n: int) -> None:
        """So many are done already, and say nothing about the speed."""
        self.done = self._before = n

    def advance(self, n: int, note: str = "") -> None:
        self.done += n
        if self._bar:
            self._bar.update(self._task, completed=self.done, count=self._count, left=self._left, note=note)
        elif perf_counter() - self._said >= self.every:
            self._say(note)

    @property
    def _count(self) -> str:
        return f"{self.done:,} of {self.total:,}" if self.total else f"{self.done:,}"

    @property
    def _left(self) -> str:
        """How long the rest takes at the speed so far; the time so far where the end is not known."""
        spent = perf_counter() - self._started
        n = self.done - self._before
        if not self.total or not n:
            return f"{_clock(spent)} so far"
        return f"{_clock(spent * max(0, self.total - self.done) / n)} left"

    def _say(self, note: str = "") -> None:
        self._said = perf_counter()
        say(f"{self.what}: {self._count}, {self._left}{note and ' | ' + note}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        elif kind is None and self._said > self._started:  # something was printed before
            say(f"{self.what}: {self._count}, done after {_clock(perf_counter() - self._started)}")


def _clock(seconds: float) -> str:
    """As 9 s, 4:09 or 2:04:09."""
    n = round(seconds)
    if n < 60:
        return f"{n} s"
    minutes = f"{n // 60 % 60}:{n % 60:02d}"
    return minutes if n < 3600 else f"{n // 3600}:{minutes:0>5}"


def _rich_bar() -> "rich.progress.Progress | None":
    """None if rich is not installed, as on a device that only predicts; plain lines are used then."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column
    except ImportError:
        return None
    what, count, left = (TextColumn(f"{{task.{name}}}") for name in ("description", "fields[count]", "fields[left]"))
    # The note takes what is left of the line, and is cut there.
    note = TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    return Progress(what, BarColumn(bar_width=12), count, left, note, console=Console(stderr=True), expand=True)
