"""A job of a sweep: a function with its arguments, in a process and a directory of its own."""

import hashlib
import importlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from streamclr.base import options as opts
from streamclr.base.errors import Stopped, UserError
from streamclr.base.files import read_json, write_json
from streamclr.records.directory import NOT_THE_RUNS
from streamclr.records.options import RunOptions
from streamclr.streams.datasets import registry as data

Result = dict[str, Any]
RESULT, LOG = "result.json", "log.txt"  # what a job leaves in its directory


@dataclass(frozen=True)
class Job:
    """A function by its name, `module:function`, and its arguments, those of a RunOptions and its own.

    It is given a directory and returns JSON; a run of it is in `run` there.
    needs: names of files beside its directory that it reads.
    keeps_run: whether the files of its run are wanted too, not only what it returns.
    """

    title: str
    function: str
    arguments: Result
    needs: tuple[str, ...] = ()
    keeps_run: bool = False

    @property
    def key(self) -> str:
        """What tells it from others: its function, and its arguments that are not the default ones."""
        special = {
            name: value
            for name, value in self.arguments.items()
            if name not in NOT_THE_RUNS and value != getattr(RunOptions, name, None)
        }
        known_by = json.dumps([self.function, special], sort_keys=True)
        return f"{self.title}-{hashlib.sha256(known_by.encode()).hexdigest()[:10]}".replace("?", ",").replace("&", ",")

    def write(self, directory: Path) -> None:
        """What its process has to know."""
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "job.json", {"function": self.function, "arguments": self.arguments})

    def start(
        self, directory: Path, threads: int, env: dict[str, str] | None = None, lock: IO[str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Its process, in this directory; one that exists is that of the same job, interrupted: then it goes on.

        lock: which is the process's too, until it ends.
        """
        self.write(directory)
        own = {"OMP_NUM_THREADS": str(threads)} | (env or {})
        with (directory / LOG).open("wb") as log:
            # The pipe to its standard input closes when this process ends, however it ends, and so ends the job.
            return subprocess.Popen(
                [sys.executable, "-m", __name__, str(directory)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | own,
                pass_fds=[lock.fileno()] if lock else [],
            )


def n_seen(directory: Path) -> int:
    """How many images the run of a job has learned from: the last whole line of its journal says."""
    journal = directory / "run" / "journal.jsonl"
    if not journal.exists():
        return 0
    with journal.open("rb") as file:
        file.seek(max(0, journal.stat().st_size - 4096))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["seen"] if lines and lines[-1].startswith(b"{") else 0


def last_word(directory: Path) -> str:
    """The last line of a job's log, which says why it failed if it did."""
    return ((directory / LOG).read_text("utf-8", errors="replace").strip() or "no word").splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------------------
# In the process of a job


def do_job(directory: Path, clock: "Clock") -> None:
    job = read_json(directory / "job.json")
    _bring_dataset(job["arguments"])
    module, _, function = job["function"].partition(":")
    result = getattr(importlib.import_module(module), function)(directory, **job["arguments"])
    write_json(directory / RESULT, result | {"arguments": job["arguments"], "seconds_in_all": clock.read()})


def _bring_dataset(arguments: Result) -> None:
    """On another machine than that which planned the job its dataset may not be in the cache yet."""
    name = opts.split(arguments.get("source", ""))[0]
    if name in data.DATASETS and not data.is_cached(name):
        print(data.get(name), flush=True)


class Clock:
    """The seconds that a job has taken, those before an interruption included."""

    def __init__(self, directory: Path):
        self.file = directory / "seconds.json"
        self.before = read_json(self.file) if self.file.exists() else 0.0
        self.started = time.perf_counter()
        self._lock = threading.Lock()  # the job and the thread that waits for its parent's end both read it

    def read(self) -> float:
        with self._lock:
            seconds = self.before + time.perf_counter() - self.started
            write_json(self.file, seconds)
            return seconds


def _end_with_the_parent(clock: Clock) -> None:
    while not select.select([0], [], [], 10)[0]:  # nothing is ever written to the pipe: it is ready when it closes
        clock.read()
    os._exit(1)


if __name__ == "__main__":
    from streamclr.compute.allocator import keep_freed_memory

    keep_freed_memory()
    if select.select([0], [], [], 0)[0]:
        sys.exit("left alone before it began")
    clock = Clock(Path(sys.argv[1]))
    threading.Thread(target=_end_with_the_parent, args=[clock], daemon=True).start()
    try:
        do_job(Path(sys.argv[1]), clock)
    except (UserError, Stopped) as error:
        sys.exit(str(error))
