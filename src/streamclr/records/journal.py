"""Files of JSON lines within a limit of bytes: a process adds lines, others read them meanwhile.

Each line begins with its number, which grows from line to line. NAME has the newest lines. When it is full it becomes
NAME.1, and the lines that were there go to NAME.2. When that is full too, every second line is left of it, then every
4th, 8th and so on: all of a long run stays, its last part in full.
"""

import errno
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import compress, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from streamclr.base.errors import UserError
from streamclr.base.files import json_line, sync, write_new
from streamclr.base.options import parse_size
from streamclr.base.progress import say

USUAL_LIMIT, MIN_LIMIT = "64M", "256K"
N_PARTS = 4  # of the limit: three files, and the last of them while it is written anew
LASTING_RANKS = 16  # how many times the other lines are halved before those that last
MAX_RANK = 63
LINES_AT_ONCE, BLOCK_BYTES = 1000, 2**16  # that are written, and read, together
_NUMBER = re.compile(rb'\{"\w+": (\d+)')


def parse_limit(text: str) -> int:
    """The limit of one journal in bytes."""
    if (limit := parse_size(text, "log_disk")) < parse_size(MIN_LIMIT):
        raise UserError(f"log_disk is {text}: use at least {MIN_LIMIT}")
    return limit


def files_of(path: Path) -> list[Path]:
    """The files that a journal may have, the newest first."""
    return [path, path.with_name(f"{path.name}.1"), path.with_name(f"{path.name}.2")]


def number_of(line: bytes) -> int | None:
    """None of a damaged line, or of one that an earlier version wrote without a number."""
    found = _NUMBER.match(line)
    return int(found[1]) if found else None


class Journal:
    """For several threads: one may write while another brings it onto the disk. A full disk costs lines, not the run,
    and no line is ever broken.

    what: its name, for the line that says that it cannot be written; None: nobody is told.
    limit: bytes that its files take together; None: it is one file without a limit.
    lasting: an entry, such as "accuracy"; lines that have it are the last to be thinned.
    """

    def __init__(self, path: Path, what: str | None = "the journal", limit: int | None = None, lasting: str = ""):
        self.path, self.what, self.limit = path, what, limit
        self._lasting = f'"{lasting}": '.encode() if lasting else None
        self._fails = False
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._file = self.path.open("ab", buffering=0)
        self.size = self.path.stat().st_size  # of the newest file

    def write(self, *lines: dict[str, Any]) -> bool:
        """All of these lines, or none of them if the disk does not take them: False."""
        content = "".join(map(json_line, lines)).encode()
        with self._lock:
            try:
                if self._fails:
                    os.truncate(self._file.fileno(), self.size)  # what was left of the line before
                if self.limit is not None and self.size and self.size + len(content) > self.limit // N_PARTS:
                    self._move_on()
                if os.write(self._file.fileno(), content) < len(content):
                    raise OSError(errno.ENOSPC, "the disk is full")
                self.size += len(content)
                self._fails = False
            except OSError as error:
                if not self._fails and self.what is not None:
                    say(f"streamclr: {self.what} cannot be written ({error.strerror}): going on")
                self._fails = True
        return not self._fails

    def _move_on(self) -> None:
        """Begin a new file. A kill at any moment loses no line but those that are thinned; lines that are in two files
        then are found by `_opened`."""
        newest, before, older = files_of(self.path)
        if not self._is(before):  # else only a new file is missing, for which there was no room
            if not self._is(newest):
                raise FileNotFoundError(errno.ENOENT, "it was moved away")  # nothing is written to what is there now
            os.fsync(self._file.fileno())
            if before.exists():
                with suppress(OSError):  # no room for it on the disk: the lines of `before` are lost
                    new = older.with_name(f"{older.name}.new")
                    new.unlink(missing_ok=True)  # left by a killed process
                    write_new(new, self._thinned())
                    os.replace(new, older)
                    sync(self.path.parent)
            os.rename(newest, before)
        full = self._file
        self._open()
        full.close()
        sync(self.path.parent)

    def _is(self, path: Path) -> bool:
        """Whether this file is open for writing."""
        return path.exists() and os.path.samestat(os.fstat(self._file.fileno()), path.stat())

    def _thinned(self) -> Iterator[bytes]:
        """What the two older files become: lines of which the numbers are multiples of 1, 2, 4, …, until they fit."""
        assert self.limit is not None
        ranks, n_bytes = bytearray(), Counter[int]()
        for line in self._older():
            ranks.append(rank := self._rank(line))
            n_bytes[rank] += len(line)
        least = 0
        while sum(n for rank, n in n_bytes.items() if rank >= least) > self.limit // N_PARTS:
            least += 1
        left = compress(self._older(), (rank >= least for rank in ranks))
        while lines := list(islice(left, LINES_AT_ONCE)):
            yield b"".join(lines)

    def _older(self) -> Iterator[bytes]:
        with ExitStack() as stack:
            for part in _opened(stack, files_of(self.path)[1:]):
                yield from part.file

    def _rank(self, line: bytes) -> int:
        """How often its number can be halved; a damaged line is as an odd one."""
        number = number_of(line)
        if not number:
            return 0 if number is None else MAX_RANK
        halves = (number & -number).bit_length() - 1
        return halves + LASTING_RANKS if self._lasting and self._lasting in line else halves

    def sync(self) -> None:
        """All lines so far are on the disk when this returns."""
        with self._lock:
            if self._fails:
                os.truncate(self._file.fileno(), self.size)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def lines_of(path: Path, after: int = -1) -> Iterator[bytes]:
    """The whole lines of a journal, the oldest first; those with numbers up to `after` are left out."""
    with ExitStack() as stack:
        parts = _opened(stack, files_of(path))
        begins = [number_of(part.first) for part in parts]
        first = max((n for n, number in enumerate(begins) if number is not None and number <= after), default=0)
        for part in parts[first:]:
            for line in part.file:
                number = number_of(line)
                if line.endswith(b"\n") and (number is None or number > after):
                    yield line


def last_number(path: Path) -> int:
    """The number of the last line of a journal; 0 if there is none."""
    with ExitStack() as stack:
        parts = reversed(_opened(stack, files_of(path)))
        lines = (line for part in parts for _, line in _backwards(part.file))
        return next((number for number in map(number_of, lines) if number is not None), 0)


def cut(path: Path, number: int) -> None:
    """Remove the lines of a journal from this number on, and a broken last line."""
    for part in files_of(path):
        with suppress(FileNotFoundError), part.open("r+b") as file:
            before = ((start + len(line), number_of(line)) for start, line in _backwards(file))
            file.truncate(next((end for end, its in before if its is not None and its < number), 0))


class Tail:
    """The lines of a journal as they come, for another process than the one that writes it.

    most: bytes that are read at once; of what is more, the end.
    n_sampled: so many lines of the rest are read too, at even distances.
    """

    def __init__(self, path: Path, most: int, n_sampled: int = 0):
        self.path, self.most, self.n_sampled = path, most, n_sampled
        self._first, self._offset = b"", 0  # the file that was read last, by its first line, and up to where
        self._newest: tuple[int, int, int] | None = None  # of the newest file at the last read: inode, bytes, time

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the journal begins anew, because lines were taken back; and its new whole lines."""
        lines: list[bytes] = []
        try:
            newest = self.path.stat()
        except FileNotFoundError:  # not there yet, or deleted
            return False, lines
        if self._newest == (found := (newest.st_ino, newest.st_size, newest.st_mtime_ns)):
            return False, lines
        with ExitStack() as stack:
            parts = _opened(stack, files_of(self.path))
            known = next((n for n, part in enumerate(parts) if self._is_known(part)), None)
            anew = known is None and bool(self._first)
            if known is None:
                self._first, self._offset, known = b"", 0, 0
            new = list(zip(parts[known:], [self._offset, 0, 0], strict=False))  # and where to begin in each
            passed = max(0, sum(part.size - start for part, start in new) - self.most)
            distance = -(-passed // self.n_sampled) if self.n_sampled else 0
            for part, start in new:
                begin = min(part.size, start + passed)
                passed -= begin - start
                if distance:
                    lines += _sampled(part.file, start, begin, distance)
                part.file.seek(begin)
                if begin > start:
                    begin += len(part.file.readline())  # the rest of a line
                content = part.file.read()
                whole = content[: content.rfind(b"\n") + 1]
                lines += whole.splitlines()
                self._first, self._offset = part.first, begin + len(whole)
        self._newest = found
        return anew, lines

    def _is_known(self, part: "Part") -> bool:
        return part.first == self._first and part.size >= self._offset


def _sampled(file: IO[bytes], start: int, end: int, distance: int) -> Iterator[bytes]:
    for place in range(start, end, distance):
        file.seek(place)
        file.readline()  # the rest of a line
        if file.tell() < end:
            yield file.readline()


class Part(NamedTuple):
    """A file of a journal, for a reader."""

    file: IO[bytes]
    first: bytes  # line, by which it is known whatever its name is by now
    size: int


def _opened(stack: ExitStack, files: list[Path]) -> list[Part]:
    """Those of the files that have whole lines, the oldest first.

    The writer may move on meanwhile, or was killed as it did. The newest is opened first, so that nothing is missed;
    what is in two files is taken from the older one, which has it thinned.
    """
    found: list[Part] = []
    for path in files:
        with suppress(FileNotFoundError):
            file = stack.enter_context(path.open("rb"))
            first = file.readline()
            if first.endswith(b"\n"):
                found.append(Part(file, first, os.fstat(file.fileno()).st_size))
    parts: list[Part] = []
    last = -1
    for part in reversed(found):
        begins = number_of(part.first)
        if begins is None or begins > last:
            parts.append(part)
            if part is found[0]:
                break
            last = next((n for n in map(number_of, (line for _, line in _backwards(part.file))) if n is not None), last)
    for part in parts:
        part.file.seek(0)
    return parts


def _backwards(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a file and where each begins, the last first."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start:
        n = min(BLOCK_BYTES, start)
        start -= n
        file.seek(start)
        content = file.read(n) + rest
        lines, at = content.splitlines(keepends=True), start + len(content)
        rest = lines.pop(0) if start else b""  # the block may begin within a line
        for line in reversed(lines):
            at -= len(line)
            if line.endswith(b"\n"):  # else it is still being written
                yield at, line
