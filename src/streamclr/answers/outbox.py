"""Answers on the disk until they are delivered: numbered, in order, within bounds, since the oldest are deleted."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from streamclr.records.journal import Journal

FILE_BYTES = 4 * 2**20
NAME = "the outbox of answers"
N_FILES = 16  # 64 MiB: 300,000 answers without snapshots


class Entry(NamedTuple):
    """An answer as it is sent."""

    number: int
    line: bytes  # JSON without a line break
    answer: dict[str, Any]


class Outbox:
    """A directory of files `NUMBER.jsonl`, named by their first answer; one process writes and reads it.

    last: the number of the last answer. Numbers are never used twice.
    """

    def __init__(self, directory: Path, file_bytes: int = FILE_BYTES, n_files: int = N_FILES):
        self.directory, self.file_bytes, self.n_files = directory, file_bytes, n_files
        directory.mkdir(exist_ok=True)
        self._lock, self._changing = Lock(), Lock()
        names = [path.stem for path in directory.glob("*.jsonl")]
        self._firsts = deque(sorted(int(name) for name in names if name.isdecimal()))
        self.last = 0
        if self._firsts:
            _cut_broken_line(self._path(self._firsts[-1]))
            numbers = [entry.number for entry in self._entries_of(self._firsts[-1])]
            self.last = max(numbers, default=self._firsts[-1] - 1)
        self._journal: Journal | None = None  # of the last file, once something is written

    def _path(self, first: int) -> Path:
        return self.directory / f"{first:010}.jsonl"

    @property
    def oldest(self) -> int:
        """The number of the oldest answer that is still there, or will be."""
        with self._lock:
            return self._firsts[0] if self._firsts else self.last + 1

    def backwards(self) -> Iterator[dict[str, Any]]:
        """All answers that are there, the last one first."""
        for number in reversed(list(self._firsts)):
            for entry in reversed(self._entries_of(number)):
                yield entry.answer

    def _entries_of(self, first: int) -> list[Entry]:
        return _entries(self._path(first).read_bytes(), 0)

    def put(self, answers: list[dict[str, Any]]) -> bool:
        """Give them numbers and write them. False if the disk takes none: their numbers stay without answers."""
        lines = [{"id": number} | answer for number, answer in enumerate(answers, self.last + 1)]
        try:
            return self._open().write(*lines)
        except OSError:  # no new file
            return False
        finally:
            with self._lock:
                self.last += len(lines)

    def _open(self) -> Journal:
        """The last file or, if it is full, a new one; then the oldest is deleted."""
        if self._journal is None and self._firsts:
            self._journal = Journal(self._path(self._firsts[-1]), NAME)
        if self._journal is not None and self._journal.size < self.file_bytes:
            return self._journal
        journal = Journal(self._path(self.last + 1), NAME)
        with self._changing, self._lock:
            if self._journal is not None:
                self._journal.close()
            self._journal = journal
            self._firsts.append(self.last + 1)
            gone = [self._firsts.popleft() for _ in range(len(self._firsts) - self.n_files)]
        for number in gone:
            self._path(number).unlink(missing_ok=True)
        return journal

    def read(self, after: int, offset: tuple[int, int], n: int) -> tuple[list[Entry], tuple[int, int]]:
        """Up to `n` answers after a number, and where to go on reading: file and byte; begin at (0, 0)."""
        found: list[Entry] = []
        while len(found) < n:
            with self._lock:
                left = [first for first in self._firsts if first >= offset[0]]
                if not left:
                    break
                current, is_last = left[0], len(left) == 1
                following = None if is_last else left[1]
                whole = self._journal.size if is_last and self._journal is not None else None
            start = offset[1] if current == offset[0] else 0
            if following is not None and following <= after + 1:  # nothing of it is needed
                offset = (following, 0)
                continue
            with suppress(FileNotFoundError), self._path(current).open("rb") as file:
                file.seek(start)
                while len(found) < n and (whole is None or file.tell() < whole):
                    line = file.readline()
                    if not line.endswith(b"\n"):
                        break
                    start += len(line)
                    found += _entries(line, after)
            offset = (current, start)
            if len(found) < n:
                if following is None:
                    break
                offset = (following, 0)
        return found, offset

    def sync(self) -> None:
        """Bring what was written onto the disk."""
        with self._changing:  # readers and writers do not wait for the disk
            if self._journal is not None:
                self._journal.sync()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _entries(content: bytes, after: int) -> list[Entry]:
    """The answers in these lines with numbers above `after`; damaged lines are left out."""
    found = []
    for line in content.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            answer = json.loads(line)
            if answer["id"] > after:
                found.append(Entry(int(answer["id"]), line, answer))
    return found


def _cut_broken_line(path: Path) -> None:
    """Remove what a power cut has left at the end."""
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
