"""Where the jobs of a sweep run: processes of this machine, or tasks of a Ray cluster, behind one protocol."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from streamclr.base.errors import UserError
from streamclr.base.progress import Progress
from streamclr.compute.device import find_device
from streamclr.sweeps.job import LOG, RESULT, Job, last_log_line, n_seen

ON = (
    "where the runs are done: cores (a process for each core of this machine), ray (a new Ray cluster of this machine) "
    "or ray:ADDRESS (a running one) [no Ray]"
)


class Place(Protocol):
    """Runs jobs. When a job has ended, its directory has its log and, if it succeeded, its result."""

    name: str  # empty for this machine
    device: str  # what the jobs learn on
    workers: int  # how many jobs run at the same time

    def has_room(self) -> bool: ...  # for one more job now

    def start(self, job: Job, directory: Path) -> None: ...

    def ended(self) -> list[tuple[Path, str]]:
        """The directories of the jobs that ended since the last call, with where they ran or what killed them."""

    @property
    def n_running(self) -> int: ...

    @property
    def n_seen(self) -> int: ...  # images that the running jobs have learned from

    def stop(self) -> None: ...  # the running jobs


def open_place(
    on: str | None, workers: int | None, device: str | None, threads: int | None = None, plan: bool = False
) -> Place:
    """The place that `--on` names.

    threads: of each job [this machine's cores, divided among the workers].
    plan: nothing will be started.
    """
    if on in (None, "cores"):
        return Processes(workers, device, plan)
    name, _, address = on.partition(":")
    if name != "ray" or on == "ray:":
        raise UserError(
            f"on is {on!r}: use cores, ray for a cluster of this machine, or ray:ADDRESS for a running one (ray:auto)"
        )
    from streamclr.sweeps.on_ray import OnRay

    return OnRay(address or None, workers, device, threads)


def work(jobs: dict[Path, Job], place: Place, keep: Callable[[Path], object]) -> None:
    """Do all jobs, each in its directory; `keep` is called with the directory of each that succeeded."""
    images = {directory: job.arguments["images"] or 0 for directory, job in jobs.items()}
    left = [directory for directory in jobs if not (directory / RESULT).exists()]
    for directory in jobs:
        if directory not in left:  # it ended after the process that started it, which did not keep it
            keep(directory)
    waiting = list(left)
    with Progress(f"{len(jobs)} jobs, images", sum(images.values())) as bar:
        try:
            while left:
                while waiting and place.has_room():
                    directory = waiting.pop(0)
                    place.start(jobs[directory], directory)
                time.sleep(0.2)
                for directory, where in place.ended():
                    left.remove(directory)
                    if not (directory / RESULT).exists():
                        key, reason = jobs[directory].key, last_log_line(directory)
                        raise UserError(f"{key} failed{where} ({reason}): see {directory / LOG}")
                    keep(directory)
                n_done = sum(images.values()) - sum(images[directory] for directory in left)
                note = f"{len(left) - place.n_running} waiting, {place.n_running} running"
                bar.advance(n_done + place.n_seen - bar.done, note)
        finally:
            place.stop()


class Processes:
    """A process of this machine for each job, each on a GPU or with its share of the cores.

    workers: jobs at a time [one for each GPU, or each core].
    plan: nothing will be started, so that the jobs may be for GPUs which this machine lacks.
    """

    name = ""

    def __init__(self, workers: int | None = None, device: str | None = None, plan: bool = False):
        found = torch.device("cuda") if plan and device == "cuda" else find_device(device)
        if found.index is not None:
            raise UserError(f"device is {device!r}: use {found.type}, and CUDA_VISIBLE_DEVICES to choose GPUs")
        self.device: str = found.type
        self.workers: int = workers or (torch.cuda.device_count() if self.device == "cuda" else os.cpu_count()) or 1
        self.threads: int = max(1, (os.cpu_count() or 1) // self.workers)
        self._free: list[int] = list(range(self.workers))
        self._running: dict[Path, tuple[int, subprocess.Popen[bytes]]] = {}

    def has_room(self) -> bool:
        return bool(self._free)

    def start(self, job: Job, directory: Path) -> None:
        worker, env = self._free.pop(), dict[str, str]()
        if self.device == "cuda":
            given = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpus = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
            env["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
        self._running[directory] = worker, job.start(directory, self.threads, env)

    def ended(self) -> list[tuple[Path, str]]:
        endings = []
        for path, (worker, process) in list(self._running.items()):
            if process.poll() is not None:
                del self._running[path]
                self._free.append(worker)
                killed = f", killed by signal {-process.returncode}" if process.returncode < 0 else ""
                endings.append((path, killed))
        return endings

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_seen(self) -> int:
        return sum(n_seen(directory) for directory in self._running)

    def stop(self) -> None:
        for worker, process in self._running.values():
            process.kill()
            process.wait()
            self._free.append(worker)
        self._running.clear()
