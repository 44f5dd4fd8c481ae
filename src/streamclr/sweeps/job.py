"""A job of a sweep: a function with its arguments, in its own process and directory."""

import hashlib
import importlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from streamclr.base import options as opts
from streamclr.base.errors import Stopped, UserError
from streamclr.base.files import read_json, write_json
from streamclr.base.plugins import Plugin, bring, plugins_of
from streamclr.base.progress import say
from streamclr.records.directory import NOT_THE_RUNS
from streamclr.records.journal import Tail
from streamclr.streams.datasets import registry as data
from streamclr.sweeps.origin import Origin, origin, origin_of

Result = dict[str, Any]
DESCRIPTION, RESULT, LOG = "job.json", "result.json", "log.txt"  # in the directory of a job


# The arguments that the key of a job leaves out. They never change, or results that exist would not be found. An option
# that is added later gets here the value that it had before, if that is not None.
USUAL: Result = {
    "source": "synthetic:",
    "policy": "contrast",
    "buffer": 256,
    "guards": "auto",
    "encoder": "resnet18",
    "width": 64,
    "norm": "batch",
    "projection": "plain",
    "init": "random",
    "optimizer": "adam",
    "lr": 1e-4,
    "lr_half": 0,
    "weight_decay": 1e-4,
    "loss": "nt-xent",
    "temperature": 0.5,
    "views": "strong",
    "weak_view": "flip",
    "positives": "views",
    "train": "all",
    "crop": 0.2,
    "flip": "on",
    "side": 1.0,
    "fresh": 0.0,
    "seed": 0,
    "updates": 1,
    "precision": "fp32",
    "kept_views": 0,
    "compile": False,
    "fractions": "0.01,0.1,1",
    "classifier": "paper",
    "spread": "on",
    "probes": 10,
    "supervised": False,
    "label_disk": "64M",
    "norm_over": "all",
}


@dataclass(frozen=True)
class Job:
    """A function and its arguments: those of a RunOptions and its own."""

    title: str  # the beginning of its key, for people
    name: str  # what it measures; part of the key, so it stays the same when the function moves or is renamed
    function: str  # `module:function`: gets a directory and the arguments, returns JSON; its run, if any, is in `run`
    arguments: Result
    needs: tuple[str, ...] = ()  # names of files beside its directory that it reads
    keeps_run: bool = False  # whether the files of its run are wanted too, not only the result

    @property
    def key(self) -> str:
        """The file name of its result: a hash of its name and of the arguments that are not the usual ones."""
        special = {
            name: value
            for name, value in self.arguments.items()
            if name not in NOT_THE_RUNS and value != USUAL.get(name)
        }
        content = json.dumps([self.name, special], sort_keys=True)
        return opts.file_name(f"{self.title}-{hashlib.sha256(content.encode()).hexdigest()[:10]}")

    def doing(self, name: str, function: Callable[..., Result], **own: Any) -> "Job":
        """The same run for another function, which has arguments of its own."""
        path = f"{function.__module__}:{function.__name__}"
        return replace(self, name=name, function=path, arguments=self.arguments | own)

    @property
    def plugins(self) -> list[Plugin]:
        """The parts of a researcher that it uses, as this process finds them."""
        return plugins_of(self.arguments)

    def write(self, directory: Path, plugins: Sequence[Plugin] | None = None) -> None:
        """Write the job's description for its process; one that was interrupted counts as measured where it began."""
        directory.mkdir(parents=True, exist_ok=True)
        used = self.plugins if plugins is None else plugins
        measured_by = begun_by(directory) or origin(self.arguments.get("device"), used)
        content = {"function": self.function, "arguments": self.arguments, "measured_by": measured_by}
        write_json(directory / DESCRIPTION, content | ({"plugins": used} if used else {}))

    def start(
        self,
        directory: Path,
        threads: int,
        env: dict[str, str] | None = None,
        lock: IO[str] | None = None,
        plugins: Sequence[Plugin] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start its process. If the directory exists, the job was interrupted there and continues.

        lock: a locked file; the process holds the lock too, until it ends.
        plugins: as another machine has sent them [as this one finds them].
        """
        self.write(directory, plugins)
        own = {"OMP_NUM_THREADS": str(threads)} | (env or {})
        with (directory / LOG).open("wb") as log:
            # The pipe to standard input closes when this process ends, however it ends; that ends the job.
            return subprocess.Popen(
                [sys.executable, "-m", __name__, str(directory)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | own,
                pass_fds=[lock.fileno()] if lock else [],
            )


def begun_by(directory: Path) -> Origin | None:
    """What began the job of a directory, if it was begun."""
    file = directory / DESCRIPTION
    return origin_of(read_json(file)) if file.exists() else None


def n_seen(directory: Path) -> int:
    """How many images the job's run has learned from, by the last whole line of its journal."""
    lines = Tail(directory / "run" / "journal.jsonl", most=2**16).read()[1]
    return json.loads(lines[-1])["seen"] if lines and lines[-1].startswith(b"{") else 0


def last_log_line(directory: Path) -> str:
    """The last line of a job's log: if it failed, the reason."""
    return ((directory / LOG).read_text("utf-8", errors="replace").strip() or "empty log").splitlines()[-1]


def bring_dataset(source: str, data_dir: Path | None = None) -> None:
    """Get the dataset of a source if it is not in this machine's cache; from its files in `data_dir`, if they are."""
    name = opts.split(source)[0]
    if name in data.DATASETS and not data.is_cached(name):
        say(data.get(name, data_dir if data_dir and data.is_at(name, data_dir) else None))


# ----------------------------------------------------------------------------------------------------------------------
# In the process of a job


def do_job(directory: Path, clock: "Clock") -> None:
    """Do the job of a directory and write its result, with who measured it."""
    job = read_json(directory / DESCRIPTION)
    bring([Plugin(*one) for one in job.get("plugins", [])], directory / "plugins")
    bring_dataset(job["arguments"].get("source", ""))  # this may not be the machine that made the plan
    module, _, function = job["function"].partition(":")
    result = getattr(importlib.import_module(module), function)(directory, **job["arguments"])
    facts = {"seconds_in_all": clock.read(), "measured_by": job["measured_by"]}
    write_json(directory / RESULT, result | {"arguments": job["arguments"]} | facts)


class Clock:
    """The seconds that a job has taken, including those before an interruption."""

    def __init__(self, directory: Path):
        self.file = directory / "seconds.json"
        self.before = read_json(self.file) if self.file.exists() else 0.0
        self.started = time.perf_counter()
        self._lock = threading.Lock()  # the job and the thread that watches its parent both read it

    def read(self) -> float:
        with self._lock:
            seconds = self.before + time.perf_counter() - self.started
            write_json(self.file, seconds)
            return seconds


def _end_with_the_parent(clock: Clock) -> None:
    while not select.select([0], [], [], 10)[0]:  # nothing is written to the pipe: it is ready when it closes
        clock.read()
    os._exit(1)


if __name__ == "__main__":
    from streamclr.compute.allocator import keep_freed_memory

    keep_freed_memory()
    if select.select([0], [], [], 0)[0]:
        sys.exit("the process that started this job has ended")
    clock = Clock(Path(sys.argv[1]))
    threading.Thread(target=_end_with_the_parent, args=[clock], daemon=True).start()
    try:
        do_job(Path(sys.argv[1]), clock)
    except (UserError, Stopped) as error:
        sys.exit(str(error))
