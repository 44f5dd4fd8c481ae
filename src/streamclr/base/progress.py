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
    """`with Progress("learning", 1000) as bar: bar.advance(10, "loss 4.8")`; total is None if unknown."""

    def __init__(self, what: str, total: int | None, every: float = 10.0, quiet: bool = False):
        self.what, self.total, self.every, self.done = what, total, math.inf if quiet else every, 0
        self._bar = _rich_bar() if sys.stderr.isatty() and not quiet else None

    def __enter__(self) -> "Progress":
        self._started = self._said = perf_counter()
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total, note="")
        return self

    def advance(self, n: int, note: str = "") -> None:
        self.done += n
        if self._bar:
            self._bar.update(self._task, advance=n, note=note)
        elif perf_counter() - self._said >= self.every:
            self._say(note)

    def _say(self, note: str = "") -> None:
        self._said = perf_counter()
        of = f" of {self.total:,}" if self.total else ""
        say(f"{self.what}: {self.done:,}{of}, {self._said - self._started:.0f} s{note and ' | ' + note}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        elif kind is None and self._said > self._started:  # something was printed before
            self._say("done")


def _rich_bar() -> "rich.progress.Progress | None":
    """None if rich is not installed, as on a device that only predicts; plain lines are used then."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True))
