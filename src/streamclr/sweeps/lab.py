"""Where experiments run: each job is done once and its result is kept under its key, so that all can be resumed."""

import shutil
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, zip_longest
from pathlib import Path
from statistics import median
from typing import IO, Any, TypeVar

import torch

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.files import held, read_json
from streamclr.base.options import option
from streamclr.base.plugins import KINDS
from streamclr.base.progress import Progress, say
from streamclr.base.table import Table
from streamclr.encoders.architecture import Architecture
from streamclr.learner import PRECISIONS
from streamclr.policy import listed_policies
from streamclr.recipe import LOSSES, PAPER, build_loss
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import RunPlan, open_run_stream, resolve
from streamclr.runs.assemble import make_learner
from streamclr.runs.run import run
from streamclr.streams.datasets.folder import listed_classes
from streamclr.streams.datasets.registry import DATASETS
from streamclr.streams.spec import split_source
from streamclr.streams.stream import Stream
from streamclr.sweeps.job import RESULT, USUAL, Job, Result, begun_by, bring_dataset
from streamclr.sweeps.origin import Origin, difference, is_by, origin, origin_of
from streamclr.sweeps.places import ON, open_place, work
from streamclr.views import VIEWS, build_views

# The paper's settings for CIFAR-10 (Sec. IV-A), and smaller ones for two CPU cores, chosen by `reproduce sweep` with
# the policy Random. The contrast score is exact in both, so that no table depends on what is fast on a machine.
ON_CIFAR = RunOptions(source="cifar10", stc=500, recipe="paper", encoder="resnet18", classifier="paper")
SCALES = {
    "paper": replace(ON_CIFAR, width=64, stem="small", lr=1e-4, images=25_000_000, probes=50),
    "cpu": replace(ON_CIFAR, width=8, stem="half", lr=3e-3, images=500_000, probes=20, checkpoint_minutes=1),
}
OF_EVERY_RUN = ("precision", "loss", "views")  # of which an experiment may be done with another
BUFFER = 256  # images in the buffer, unless an experiment says otherwise
# What the time of a step depends on.
KIND_FIELDS = (
    "encoder init width stem norm projection train size policy buffer batch segment rescore_every fresh positives "
    "optimizer precision device loss views weak_view"
).split()
T = TypeVar("T")


@dataclass(frozen=True)
class LabOptions:
    """What an experiment is done with."""

    scale: str = option(
        "cpu", f"{' or '.join(SCALES)}: the paper's settings, for GPUs, or smaller ones for two CPU cores"
    )
    seeds: int = option(3, "how many seeds, from 0 on")
    policies: str | None = option(
        None, "further policies, with commas between, as package.module:Class: a row of each [those of the table]"
    )
    images: int | None = option(None, "images in each run, for a quick look [the scale's own]")
    workers: int | None = option(
        None, "runs at the same time [one for each GPU, or each core; on Ray, as many as there is room for]"
    )
    device: str | None = option(None, "cpu or cuda [GPUs if there are any]")
    on: str | None = option(None, ON)
    data: str | None = option(None, "directory with official files of datasets that are not in the cache")
    out: str = option(
        "runs/reproduce", "the directory, shared by experiments: a job with a result there is not done again"
    )
    precision: str = option(
        "fp32", "of the encoder's arithmetic in training: fp32 as in the paper, or bf16, which is faster on a GPU"
    )
    loss: str = option(USUAL["loss"], f"of every run: {', '.join((*LOSSES, KINDS['loss'].form))}?option=value")
    views: str = option(USUAL["views"], f"of every run: {', '.join((*VIEWS, KINDS['views'].form))}?option=value")
    classes: str | None = option(
        None, "file with class folders of ImageNet, one a line: a subset of 20 has the first 20 [by the folders' names]"
    )
    plan: bool = option(False, "only print what would run and how long it should take; needs no GPU")
    redo: bool = option(False, "do jobs again whose results were measured by other code, another torch or machine")


class Lab:
    """The jobs of one experiment at one scale, in a directory that experiments share."""

    def __init__(self, options: LabOptions):
        if options.scale not in SCALES:
            raise UserError(f"no scale {options.scale!r}: {opts.one_of(options.scale, SCALES)}")
        for name, least in (("seeds", 1), ("images", BUFFER), ("workers", 1)):
            value = getattr(options, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}: use at least {least}")
        if options.precision not in PRECISIONS:
            raise UserError(f"precision is {options.precision!r}: use {' or '.join(PRECISIONS)}")
        build_loss(options.loss)
        build_views(options.views, PAPER.crop, PAPER.flip, PAPER.side)
        self.options, self.scale, self.images = options, options.scale, options.images
        self.out, self.data_dir = Path(options.out), None if options.data is None else Path(options.data).expanduser()
        self.place = open_place(options.on, options.workers, options.device, plan=options.plan)
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise UserError(f"no directory {options.data!r}: give --data a directory with official files of datasets")
        self.policies = listed_policies(options.policies or "")
        self.classes = None if options.classes is None else self._listed(options.classes)
        self.left_out: list[str] = []  # datasets that were not found
        self.seconds = 0.0  # of work for the results, whenever it was done
        self.origins: list[Origin] = []  # of the results

    def pick(self, *, paper: T, cpu: T) -> T:
        """The value for this scale."""
        return {"paper": paper, "cpu": cpu}[self.scale]

    def runs(self, **settings: Any) -> list[Job]:
        """A run with the scale's settings and these instead (see `_asked`): a job for each seed."""
        wanted = self._asked(**settings)
        if self.images is not None:
            wanted = replace(wanted, images=self.images, epochs=None)
        plan = _resolve(wanted, self.data_dir)
        policy, jobs = opts.split(plan.policy)[0], []
        for seed in range(self.options.seeds):
            arguments = asdict(replace(plan, seed=seed, device=self.place.device))
            arguments["guards"] = wanted.guards  # as asked: the keys of results that exist depend on it
            arguments.pop("out")
            jobs.append(Job(f"{policy}-{seed}", "run", f"{__name__}:run_job", arguments))
        return jobs

    def at_hand(self, dataset: str, **settings: Any) -> bool:
        """Whether the dataset of a run can be read; if not, say so and leave it out."""
        try:
            _open(self._asked(**settings), self.data_dir)
        except UserError as error:
            self.left_out.append(dataset)
            reason = " ".join(str(error).split())
            source = "imagenet:" if "n_imagenet" in settings else settings.get("source", SCALES[self.scale].source)
            say(f"{dataset} is left out ({reason}): {how_to_get(source)}")
            return False
        return True

    def _asked(self, n_imagenet: int | None = None, **settings: Any) -> RunOptions:
        """The scale's settings with these instead; n_imagenet: the source is so many classes of ImageNet."""
        if n_imagenet is not None:
            settings["source"] = f"imagenet:{self.data_dir or ''}?classes={self._of_imagenet(n_imagenet)}"
        of_every_run = {name: getattr(self.options, name) for name in OF_EVERY_RUN}
        return replace(SCALES[self.scale], **of_every_run | settings)

    def _of_imagenet(self, n: int) -> str:
        """Its classes by name where they were listed, so that a job is known by them; else how many."""
        if self.classes is None:
            return str(n)
        if len(self.classes) < n:
            raise UserError(f"{self.options.classes} lists {len(self.classes)} classes: list {n} or more")
        return ",".join(self.classes[:n])

    def _listed(self, file: str) -> list[str]:
        if self.data_dir is None or not (train := self.data_dir / "train").is_dir():
            raise UserError("classes is for ImageNet: say with --data where its train/ and val/ are")
        if not Path(file).is_file():
            raise UserError(f"no file {file!r}: give --classes a file with a class folder on each line")
        return listed_classes(file, train)

    def do(self, jobs: dict[str, list[Job]]) -> dict[str, list[Result]]:
        """The results of all jobs; those without a result are done now."""
        # The first seed of all rows first, so that a table of one seed is there early.
        by_key = {job.key: job for seed in zip_longest(*jobs.values()) for job in seed if job}
        with _alone(self.out):
            done = self._done(by_key)
            missing = [job for key, job in by_key.items() if key not in done]
            if self.options.plan:
                what_runs(jobs, done).print()
            say(f"{len(by_key)} jobs, {len(done)} of them done; {self._expected(missing)}")
            if self.options.plan:
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
        now = {key: self._origin_now(jobs[key]) for key in found}
        if self.options.redo:
            return {key for key, one in found.items() if is_by(now[key], one)}
        if line := difference(list(now.values()), list(found.values())):
            say(line)
        return set(found)

    def _origin_now(self, job: Job) -> Origin:
        """What would measure a job now."""
        now = origin(self.place.device, job.plugins)
        unknown = ("date", "machine") if self.place.name else ("date",)  # which machine of a cluster will do a job
        return {name: value for name, value in now.items() if name not in unknown}

    def _directory(self, job: Job) -> Path:
        """Where it runs; not needed once there is a result."""
        return self.out / "runs" / job.key

    def _result(self, job: Job) -> Path:
        return self.out / "jobs" / f"{job.key}.json"

    def _work(self, jobs: dict[Path, Job]) -> None:
        (self.out / "jobs").mkdir(exist_ok=True)
        if self.options.redo:
            for directory, job in jobs.items():
                if (begun := begun_by(directory)) and not is_by(self._origin_now(job), begun):
                    shutil.rmtree(directory)
        work(jobs, self.place, lambda directory: (directory / RESULT).replace(self._result(jobs[directory])))

    def _expected(self, jobs: list[Job]) -> str:
        """How long the jobs should take, estimated from one step of each kind of run on this device."""
        learned = [job.arguments for job in jobs if job.arguments["images"]]
        if not learned:
            return "nothing to learn"
        if self.place.device == "cuda" and not torch.cuda.is_available():
            return "how long they take is unknown: this machine has no GPU to time a step on"
        if self.place.device == "cpu" and self.scale == "paper":
            return "how long they take is unknown: a step of this scale, which is for GPUs, is not timed on a CPU"
        with Progress("timing a step of each kind", None):
            seconds = 0.0
            for plan in learned:
                if "seconds" in plan:  # it learns for so long, however many images these are
                    seconds += max(plan["seconds"])
                    continue
                kind = RunPlan(**{name: plan[name] for name in KIND_FIELDS}, guards="off", lr=1e-4, temperature=0.5)
                seconds += -(-plan["images"] // plan["segment"]) * _step_seconds(kind)
        torch.cuda.empty_cache()  # the job on the first GPU needs the memory
        n_workers = min(self.place.workers, len(learned))
        hours = seconds / n_workers / 3600
        how_long = f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"
        return f"about {how_long} of learning on {n_workers} x {self.place.device}, evaluation not counted"


def what_runs(jobs: dict[str, list[Job]], done: set[str]) -> Table:
    """The plan: what each row learns from, and how many of its jobs have a result.

    done: keys.
    """
    rows = []
    for row, own in jobs.items():
        plan, n_done = own[0].arguments, sum(job.key in done for job in own)
        name, _, options = split_source(plan["source"])
        if name == "imagenet":
            name += f", {len(listed) if len(listed := options['classes'].split(',')) > 1 else listed[0]} classes"
        architecture = Architecture(*(plan[field] for field in Architecture._fields))
        images = f"{plan['images']:,}" if plan["images"] else "–"
        seeds = ", ".join(str(job.arguments["seed"]) for job in own)
        data = f"{name}, {plan['size']} px"
        rows.append([row, str(len(own)), str(n_done), data, str(architecture).removeprefix("a "), images, seeds])
    return Table("What would run", ["row", "jobs", "done", "dataset", "encoder", "images", "seeds"], rows)


def how_to_get(source: str) -> str:
    """What a person can do about a dataset that is not here."""
    name = split_source(source)[0]
    if name not in DATASETS:
        return "unpack ImageNet (image-net.org) as DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG, and give --data DIR"
    files = ", ".join(url.rsplit("/", 1)[1] for url in DATASETS[name].urls) or DATASETS[name].places[0]
    return f"give --data DIR with {files}"


def _alone(out: Path) -> IO[bytes]:
    """Lock the directory: a second lab would take the running jobs of the first for interrupted ones."""
    out.mkdir(parents=True, exist_ok=True)
    (out / ".lock").touch()
    return held(out / ".lock", f"another process is working in {out}: wait for it, or give another --out")


@cache
def _step_seconds(kind: RunPlan) -> float:
    """The time of one step; on a CPU it is extrapolated from a step with fewer images."""
    part = 1.0 if kind.device == "cuda" else min(1.0, 32 / kind.segment)
    few = {name: max(2, round(part * getattr(kind, name))) for name in ("buffer", "segment", "batch")}
    learner = make_learner(replace(kind, **few))
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
    bring_dataset(options.source, data_dir)
    return open_run_stream(options)


# ----------------------------------------------------------------------------------------------------------------------
# In the process of a job


def run_job(directory: Path, stage_two: bool = True, **config: Any) -> Result:
    """A run: its results, and summaries of its journal."""
    own = RunDirectory(directory / "run")
    results = own.results or run(RunOptions(**config, out=str(own.path)), stage_two)[1]
    steps = own.steps()
    seconds = accumulate(step["seconds_scoring"] + step["seconds_training"] for step in steps)
    curve = [
        {"seen": step["seen"], "seconds": spent, "knn": step["accuracy"]}
        for step, spent in zip(steps, seconds, strict=True)
        if "accuracy" in step
    ]
    full = [step for step in steps if step["kept"] + step["replaced"] == config["buffer"]][1:]
    scoring, training = (median(step[f"seconds_{what}"] for step in steps) for what in ("scoring", "training"))
    return results | {
        "curve": curve,
        "rescored": sum(step["rescored"] for step in full) / max(1, len(full)),
        "replaced": sum(step["replaced"] for step in full) / max(1, len(full)) / config["buffer"],
        "relative_time": 1 + scoring / training,
    }
