"""What a run shows to whoever looks into it: files that are written only while somebody does, and seldom enough."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from streamclr.base.errors import UserError
from streamclr.base.files import json_line
from streamclr.compute.memory import resident

if TYPE_CHECKING:
    from pathlib import Path

    from streamclr.learner import Learner
    from streamclr.records.directory import RunDirectory
    from streamclr.streams.stream import Stream

LOOKED_AT = 15.0  # seconds after which nobody looks any more
STATUS_EVERY, BUFFER_EVERY = 1.0, 3.0  # seconds, at least
SHARE = 0.005  # of the time, at most, goes into pictures of the buffer


def look(path: "Path") -> None:
    """Say that somebody looks at the run in this directory."""
    with suppress(OSError):  # a directory that may only be read shows what is there
        file = os.open(path / "looked-at", os.O_WRONLY | os.O_CREAT, 0o644)
        os.utime(file)
        os.close(file)


def memory() -> int | None:
    """Bytes that this process has; None on a system that does not tell."""
    try:
        return resident()
    except UserError:
        return None


class Window:
    """`status.json` about every second and `buffer.safetensors` now and then, while `looked-at` is young."""

    def __init__(self, directory: "RunDirectory", learner: "Learner", stream: "Stream"):
        self.directory, self.learner, self.stream = directory, learner, stream
        self._status_due = self._buffer_due = 0.0  # by the monotonic clock

    def update(self, at_once: bool = False, **facts: Any) -> None:
        """To be called after each step and while waiting for images; the facts go into the status."""
        now = time.monotonic()
        if not at_once and (now < self._status_due or not self._looked_at()):
            return
        self._status_due = now + STATUS_EVERY
        with suppress(OSError, UserError):  # a full disk is no reason to stop
            self._write_status(facts)
            if not at_once and now >= self._buffer_due and len(self.learner.buffer):
                self.directory.save_buffer(self.learner, self.stream)
                took = time.monotonic() - now
                self._buffer_due = now + max(BUFFER_EVERY, took / SHARE)

    def _looked_at(self) -> bool:
        try:
            return abs(time.time() - (self.directory.path / "looked-at").stat().st_mtime) < LOOKED_AT
        except OSError:
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
        part = self.directory.path / f".status.json.{os.getpid()}"
        part.write_text(json_line(status))  # not forced onto the disk: the learner does not wait for that
        part.replace(self.directory.path / "status.json")


class Server:
    """The dashboard of a run, in a process of its own that ends with this one."""

    def __init__(self, path: "Path"):
        check_can_serve()
        command = [sys.executable, "-m", "streamclr", "serve", str(path), "--port", "0", "--until-eof"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def check_can_serve() -> None:
    if not all(find_spec(name) for name in ("fastapi", "uvicorn")):
        raise UserError("pages need FastAPI and uvicorn: pip install -c constraints.txt -e '.[serve]'")
