"""Where experiments run: each job is done once and its result is kept under its key, so that all can be resumed."""

import dataclasses
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.files import held, read_json
from streamclr.base.progress import Progress
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import RunPlan, open_run_stream, resolve
from streamclr.runs.assemble import make_learner
from streamclr.runs.run import run
from streamclr.streams.datasets import registry as data
from streamclr.streams.stream import Stream
from streamclr.sweeps.job import RESULT, Job, Result, begun_by
from streamclr.sweeps.origin import Origin, difference, is_by, origin, origin_of
from streamclr.sweeps.places import open_place, work

# The paper's settings for CIFAR-10 (Sec. IV-A), and smaller ones for two CPU cores, chosen by `reproduce sweep` with
# the policy Random. The contrast score is exact in both, so that no table depends on what is fast on a machine.
SCALES = {
    "paper": RunOptions(source="cifar10", stc=500, width=64, stem="small", lr=1e-4, images=25_000_000, probes=50),
    "cpu": RunOptions(
        source="cifar10", stc=500, width=8, stem="half", lr=3e-3, images=500_000, probes=20, checkpoint_minutes=1
    ),
}
T = TypeVar("T")


class Lab:
    """The jobs of one experiment at one scale, in a directory that experiments share.

    images: of each run [the scale's own].
    workers: jobs at a time [one for each GPU, or each core; on Ray, as many as it has room for].
    data_dir: where datasets are that are not in the cache.
    only_plan: print what would be done and how long it should take, then exit.
    on: where the jobs run, see `open_place` [this machine].
    redo: do jobs again whose results were measured by other code, another torch or another machine.
    """

    def __init__(
        self,
        out: Path,
        scale: str = "cpu",
        n_seeds: int = 3,
        images: int | None = None,
        workers: int | None = None,
        device: str | None = None,
        data_dir: str | None = None,
        only_plan: bool = False,
        on: str | None = None,
        redo: bool = False,
    ):
        if scale not in SCALES:
            raise UserError(f"no scale {scale!r}: {opts.one_of(scale, SCALES)}")
        one_batch = SCALES[scale].buffer
        for name, value, least in (("seeds", n_seeds, 1), ("images", images, one_batch), ("workers", workers, 1)):
            if value is not None and value < least:
                raise UserError(f"{name} is {value}: use at least {least}")
        self.out, self.scale, self.n_seeds, self.images = out, scale, n_seeds, images
        self.only_plan, self.redo = only_plan, redo
        self.place = open_place(on, workers, device)
        self.device, self.workers = self.place.device, self.place.workers
        self.data_dir = None if data_dir is None else Path(data_dir).expanduser()
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise UserError(f"no directory {data_dir!r}: give --data a directory with official files of datasets")
        self.left_out: list[str] = []  # datasets that were not found
        self.seconds = 0.0  # of work for the results, whenever it was done
        self.origins: list[Origin] = []  # of the results
        self._now = {name: value for name, value in origin(self.device).items() if name != "date"}
        if self.place.name:  # which machine of a cluster does a job is not known before
            del self._now["machine"]

    def pick(self, *, paper: T, cpu: T) -> T:
        """The value for this scale."""
        return {"paper": paper, "cpu": cpu}[self.scale]

    def runs(self, **settings: Any) -> list[Job]:
        """A run with the scale's settings and these instead: a job for each seed."""
        wanted = dataclasses.replace(SCALES[self.scale], **settings)
        if self.images is not None:
            wanted = dataclasses.replace(wanted, images=self.images, epochs=None)
        plan = _resolve(wanted, self.data_dir)
        policy, jobs = opts.split(plan.policy)[0], []
        for seed in range(self.n_seeds):
            arguments = asdict(dataclasses.replace(plan, seed=seed, device=self.device))
            arguments["guards"] = wanted.guards  # as asked: the keys of results that exist depend on it
            arguments.pop("out")
            jobs.append(Job(f"{policy}-{seed}", "run", f"{__name__}:run_job", arguments))
        return jobs

    def at_hand(self, dataset: str, **settings: Any) -> bool:
        """Whether the dataset of a run can be read; if not, say so and leave it out."""
        try:
            _open(dataclasses.replace(SCALES[self.scale], **settings), self.data_dir)
        except UserError as error:
            self.left_out.append(dataset)
            reason = " ".join(str(error).split())
            print(f"{dataset} is left out ({reason}): give its directory with --data", file=sys.stderr)
            return False
        return True

    def do(self, jobs: dict[str, list[Job]]) -> dict[str, list[Result]]:
        """The results of all jobs; those without a result are done now."""
        by_key = {job.key: job for row in jobs.values() for job in row}
        with _alone(self.out):
            done = self._done(by_key)
            missing = [job for job in _by_seed(jobs) if job.key not in done]
            print(
                f"{len(by_key)} jobs, {len(done)} of them done; {self._expected(missing)}", file=sys.stderr, flush=True
            )
            if self.only_plan:
                raise SystemExit(0)
            self._work({self._directory(job): job for job in missing})
        results = {key: read_json(self._result(job)) for key, job in by_key.items()}
        self.origins += map(origin_of, results.values())
        # Old records can have more seconds of learning than in all, which then left out those before an interruption.
        spent = (max(result["seconds_in_all"], result.get("seconds_learning") or 0) for result in results.values())
        self.seconds += sum(spent)
        return {row: [results[job.key] for job in own] for row, own in jobs.items()}

    def _done(self, jobs: dict[str, Job]) -> set[str]:
        """The keys of the jobs that have a result, and with `redo` one that was measured as it would be now."""
        found = {key: origin_of(read_json(file)) for key, job in jobs.items() if (file := self._result(job)).exists()}
        if self.redo:
            return {key for key, one in found.items() if is_by(self._now, one)}
        if line := difference(self._now, list(found.values())):
            print(line, file=sys.stderr, flush=True)
        return set(found)

    def _directory(self, job: Job) -> Path:
        """Where it runs; not needed once there is a result."""
        return self.out / "runs" / job.key

    def _result(self, job: Job) -> Path:
        return self.out / "jobs" / f"{job.key}.json"

    def _work(self, jobs: dict[Path, Job]) -> None:
        (self.out / "jobs").mkdir(exist_ok=True)
        if self.redo:
            for directory in jobs:
                if (begun := begun_by(directory)) and not is_by(self._now, begun):
                    shutil.rmtree(directory)
        work(jobs, self.place, lambda directory: (directory / RESULT).replace(self._result(jobs[directory])))

    def _expected(self, jobs: list[Job]) -> str:
        """How long the jobs should take, estimated from one step of each kind of run on this device."""
        learned = [job.arguments for job in jobs if job.arguments["images"]]
        if not learned:
            return "nothing to learn"
        if self.device == "cuda" and not torch.cuda.is_available():
            return "how long they take is unknown: this machine has no GPU to time a step on"
        with Progress("timing a step of each kind", None):
            seconds = sum(-(-plan["images"] // plan["segment"]) * _step_seconds(_kind(plan)) for plan in learned)
        torch.cuda.empty_cache()  # the job on the first GPU needs the memory
        n_workers = min(self.workers, len(learned))
        hours = seconds / n_workers / 3600
        how_long = f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"
        return f"about {how_long} of learning on {n_workers} x {self.device}, evaluation not counted"


def _by_seed(jobs: dict[str, list[Job]]) -> Iterable[Job]:
    """Each job once, the first seed of all rows first, so that a table of one seed is there early."""
    seen = set()
    for seed in range(max((len(row) for row in jobs.values()), default=0)):
        for row in jobs.values():
            if seed < len(row) and row[seed].key not in seen:
                seen.add(row[seed].key)
                yield row[seed]


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Lock the directory: a second lab would take the running jobs of the first for interrupted ones."""
    out.mkdir(parents=True, exist_ok=True)
    (out / ".lock").touch()
    with held(out / ".lock", f"another process is working in {out}: wait for it, or give another --out"):
        yield


KIND_FIELDS = ("encoder", "width", "stem", "norm", "size", "policy", "buffer", "batch", "segment", "rescore_every")


def _kind(plan: dict[str, Any]) -> RunPlan:
    """What the time of a step depends on."""
    return RunPlan(**{name: plan[name] for name in (*KIND_FIELDS, "device")}, guards="off")


@cache
def _step_seconds(kind: RunPlan) -> float:
    """The time of one step; on a CPU it is extrapolated from a step with fewer images."""
    part = 1.0 if kind.device == "cuda" else min(1.0, 32 / kind.segment)
    few = {name: max(2, round(part * getattr(kind, name))) for name in ("buffer", "segment", "batch")}
    learner = make_learner(dataclasses.replace(kind, **few))
    images = torch.randint(256, (few["segment"], 3, kind.size, kind.size), dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = [learner.learn_many(images) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    return median(step.seconds_scoring + step.seconds_training for step in steps) / part


@cache
def _resolve(options: RunOptions, data_dir: Path | None) -> RunPlan:
    return resolve(options, _open(options, data_dir))


def _open(options: RunOptions, data_dir: Path | None) -> Stream:
    """The stream of a run; a dataset that is not in the cache is put there first."""
    name = opts.split(options.source)[0]
    if name in data.DATASETS and not data.is_cached(name):
        print(data.get(name, data_dir if data_dir and data.is_at(name, data_dir) else None), file=sys.stderr)
    return open_run_stream(options)


# ----------------------------------------------------------------------------------------------------------------------
# In the process of a job


def run_job(directory: Path, **config: Any) -> Result:
    """A run: its results, and summaries of its journal."""
    own = RunDirectory(directory / "run")
    results = own.results or run(RunOptions(**config, out=str(own.path)))[1]
    steps = own.steps()
    spent, curve = 0.0, []
    for step in steps:
        spent += step["seconds_scoring"] + step["seconds_training"]
        if "accuracy" in step:
            curve.append({"seen": step["seen"], "seconds": spent, "knn": step["accuracy"]})
    full = [step for step in steps if step["kept"] + step["replaced"] == config["buffer"]][1:]
    return results | {
        "curve": curve,
        "rescored": sum(step["rescored"] for step in full) / max(1, len(full)),
        "replaced": sum(step["replaced"] for step in full) / max(1, len(full)) / config["buffer"],
        "relative_time": 1
        + median(step["seconds_scoring"] for step in steps) / median(step["seconds_training"] for step in steps),
    }
