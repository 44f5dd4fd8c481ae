"""Files in the run directory that the dashboard reads. A run writes them only while somebody watches."""

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.files import json_line
from streamclr.base.options import redacted
from streamclr.base.tensors import safetensors_parts
from streamclr.compute.memory import resident
from streamclr.learner import Learner
from streamclr.records.directory import RunDirectory
from streamclr.streams.stream import Stream

WATCHED_SECONDS = 15.0  # a run counts as watched this long after the last look
NEWEST = "newest.safetensors"  # the newest frame of each source
STATUS_EVERY, BUFFER_EVERY = 1.0, 3.0  # seconds, at least
MAX_BUFFER_SHARE = 0.005  # share of the time that may go into writing the buffer


def look(path: Path) -> None:
    """Mark the run in this directory as watched."""
    with suppress(OSError):  # a read-only directory shows what was written before
        file = os.open(path / "looked-at", os.O_WRONLY | os.O_CREAT, 0o644)
        os.utime(file)
        os.close(file)


def memory() -> int | None:
    """Resident bytes of this process; None if the system does not report them."""
    with suppress(UserError):
        return resident()
    return None


class Window:
    """Writes `status.json` and the newest frames about every second, and `buffer.safetensors` less often, while
    `looked-at` is recent."""

    def __init__(self, directory: RunDirectory, learner: Learner, stream: Stream):
        self.directory, self.learner, self.stream = directory, learner, stream
        self._status_due = self._buffer_due = 0.0  # seconds on the monotonic clock
        self._newest: dict[str, tuple[float, Tensor]] = {}  # by source: when its last frame came, and the frame

    def saw(self, images: Tensor, source: str, files: list[str]) -> None:
        """Images that have just come, n x 3 x H x W; another thread may call it."""
        if len(images):
            self._newest[source] = time.time(), images[-1].clone()  # a view would keep all of them in memory

    def update(self, at_once: bool = False, **facts: Any) -> None:
        """Call it after each step and while waiting for images. The facts go into the status."""
        now = time.monotonic()
        if not at_once and (now < self._status_due or not self._looked_at()):
            return
        self._status_due = now + STATUS_EVERY
        with suppress(OSError, UserError):  # a full disk must not stop the run
            self._write_status(facts)
            if self._looked_at():
                self._write_newest()
            if not at_once and now >= self._buffer_due and len(self.learner.buffer):
                self.directory.save_buffer(self.learner, self.stream)
                took = time.monotonic() - now
                self._buffer_due = now + max(BUFFER_EVERY, took / MAX_BUFFER_SHARE)

    def _looked_at(self) -> bool:
        with suppress(OSError):
            return abs(time.time() - (self.directory.path / "looked-at").stat().st_mtime) < WATCHED_SECONDS
        return False

    def _write_status(self, facts: dict[str, Any]) -> None:
        status = {
            "time": time.time(),
            "step": self.learner.n_steps,
            "seen": self.learner.buffer.n_seen,
            "memory": memory(),
            "account": self.stream.account.state_dict(),
            "sources": {n: {"connected": up, "lost": lost} for n, (up, lost) in self.stream.connections().items()},
            **facts,
        }
        self._write("status.json", [json_line(status).encode()])

    def _write_newest(self) -> None:
        newest = list(self._newest.items())
        if newest:
            about = [{"name": redacted(name), "time": when} for name, (when, _) in newest]
            tensors = {str(i): image for i, (_, (_, image)) in enumerate(newest)}
            self._write(NEWEST, safetensors_parts(tensors, {"about": json.dumps(about)}))

    def _write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Without waiting for the disk: nothing of it is needed after a power cut."""
        part = self.directory.path / f".{name}.{os.getpid()}"
        with part.open("wb") as file:
            file.writelines(parts)
        part.replace(self.directory.path / name)
