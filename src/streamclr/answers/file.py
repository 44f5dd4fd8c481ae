"""Answers as lines of a file."""

import json
import os
from contextlib import suppress
from pathlib import Path

from streamclr.answers.address import Address
from streamclr.answers.delivery import Away, Destination, Waker
from streamclr.answers.outbox import Entry

TAIL_BYTES = 2**20  # of the file that are searched for its last answer


class LinesOfFile(Destination):
    """Appends a line for each answer; the file may be moved away at any time.

    A line that a power cut has broken is removed, and a line that is there already is not written again.
    run: only its lines count.
    """

    at_once = 100

    def __init__(self, address: Address, run: str):
        self.name, self.path, self.run = address.name, Path(address.target), run
        self._waker = Waker()
        self._last: int | None = None  # number of the last answer of this run in the file

    def open(self) -> None:
        if self._last is None:
            try:
                self._last = self._look()
            except OSError as error:
                raise Away(f"it cannot be read ({error.strerror})") from None

    def _look(self) -> int:
        if not self.path.exists():
            return 0
        with self.path.open("r+b") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            content = file.read()
            if content and not content.endswith(b"\n"):
                file.truncate(start + content.rfind(b"\n") + 1)
        last = 0
        for line in content.splitlines():
            with suppress(ValueError, KeyError, TypeError):
                answer = json.loads(line)
                if answer["run"] == self.run:
                    last = max(last, answer["id"])
        return last

    def send(self, entries: list[Entry]) -> None:
        assert self._last is not None
        new = b"".join(entry.line + b"\n" for entry in entries if entry.number > self._last)
        try:
            with self.path.open("ab", buffering=0) as file:
                size = file.tell()
                if new and (file.write(new) or 0) < len(new):
                    file.truncate(size)
                    raise OSError(28, "the disk is full")
        except OSError as error:
            raise Away(f"it cannot be written ({error.strerror})") from None
        self._last = max(self._last, entries[-1].number)

    def idle(self, seconds: float) -> None:
        self._waker.wait(seconds)

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        pass
