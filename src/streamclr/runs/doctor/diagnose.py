"""The doctor: what this machine has, whether a run keeps up with its camera here, and what to change if not."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import option, redacted, split
from streamclr.base.progress import Progress
from streamclr.compute.memory import MIB
from streamclr.learner import Learner
from streamclr.policy import policy_options
from streamclr.records.checkpoints import MAX_BYTES_PER_HOUR
from streamclr.records.directory import RunDirectory
from streamclr.records.options import KeepingOptions, LearnerOptions, PolicyOptions, StreamOptions, as_run
from streamclr.records.plan import RunPlan, open_run_stream, resolve
from streamclr.runs.assemble import make_learner
from streamclr.runs.doctor.machine import GIB, Machine

N_FIRST_IMAGES = 8  # of the first steps, which say how many images fit into the time
STEPS_SECONDS = 3.0  # for the steps that are measured after them, the same again to warm up
N_STEPS = 3  # at most, of which the median counts
MOST_TIMES = 16  # the recipe's segment: with fewer updates nearly nothing is learned
LOAD = 0.8  # share of the time that learning may take: frames are decoded and classified too


@dataclass(frozen=True)
class DoctorOptions(LearnerOptions, PolicyOptions, KeepingOptions, StreamOptions):
    out: str | None = option(None, "the run directory, whose disk is checked [runs]")
    fps: float | None = option(None, "frames a second of the camera [what it sends, else 30]")
    json: bool = option(False, "print JSON, for machines")


@dataclass(frozen=True)
class Measured:
    """A step of a run, as this machine made it just now."""

    scoring: float  # seconds, median
    training: float
    n_frames: int  # of one step
    checkpoint: int  # bytes
    n_measured: int = 1  # images of the measurement, the times scaled from them to those of a step
    n_images: int = 1

    @property
    def seconds(self) -> float:
        return self.scoring + self.training

    def of(self, n_frames: int) -> "Measured":
        """The same update after so many new frames: these are scored, and checked by the guards."""
        return replace(self, scoring=self.scoring * n_frames / self.n_frames, n_frames=n_frames)

    def ratio(self, fps: float) -> float:
        """Seconds of a step for each second in which its frames arrive; up to 1 it keeps up."""
        return self.seconds * fps / self.n_frames


@dataclass(frozen=True)
class Suggestion:
    change: str
    seconds: float  # of a step
    ratio: float

    def __str__(self) -> str:
        does = "keeps up" if self.ratio <= 1 else "better, but still too slow"
        return f"{self.change}: a step takes {_seconds(self.seconds)}, {does}"


@dataclass(frozen=True)
class Diagnosis:
    machine: Machine
    source: str
    size: int
    fps: float
    step: Measured
    peak: int | None  # bytes of memory, predicted; None: not known
    checkpoint_hours: float | None  # between two checkpoints; None: only the last
    waits: bool = False  # its images wait for the learner; the verdict is for a camera that sends as many

    @property
    def ratio(self) -> float:
        return self.step.ratio(self.fps)

    @property
    def keeps_up(self) -> bool:
        return self.ratio <= 1

    @property
    def fits_on_disk(self) -> bool:
        return self.machine.disk_free >= self._disk_needed

    @property
    def _disk_needed(self) -> int:
        return (RunDirectory(Path()).checkpoints.keep + 1) * self.step.checkpoint  # one more while it is written

    @property
    def bytes_an_hour(self) -> float:
        return self.step.checkpoint / self.checkpoint_hours if self.checkpoint_hours else 0.0

    @property
    def is_well(self) -> bool:
        return self.keeps_up and self.fits_on_disk

    def as_dict(self) -> dict[str, Any]:
        names = ("ratio", "keeps_up", "fits_on_disk", "bytes_an_hour", "is_well")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def rows(self) -> list[tuple[str, str]]:
        """A name and what is said about it; the verdict last."""
        step = self.step
        some = f", measured on {step.n_measured} of {step.n_images} images" if step.n_measured < step.n_images else ""
        arrive = f"{step.n_frames} frames arrive every {_seconds(step.n_frames / self.fps)}"
        verdict = f"{arrive}, a step takes {_seconds(step.seconds)}"
        rows = [
            *self.machine.rows(),
            ("source", f"{self.source}, {self.size}x{self.size} px, {self._rate}"),
            ("step", f"scoring {_seconds(step.scoring)}, training {_seconds(step.training)}{some}"),
            ("peak", "not known for this model" if self.peak is None else f"about {self.peak / MIB:.0f} MiB of memory"),
            ("checkpoint", self._checkpoint()),
            ("verdict", f"{'keeps up' if self.keeps_up else 'too slow'}: {verdict}"),
        ]
        if not self.keeps_up:
            lost = self.fps * (1 - 1 / self.ratio)
            rows.append(("skipped", f"{lost:,.1f} of {self.fps:g} frames a second, {lost * 86400:,.0f} a day"))
        return rows

    @property
    def _rate(self) -> str:
        rate = f"{self.fps:g} frames a second"
        return f"as if a camera sent {rate} (its own images wait for the learner)" if self.waits else rate

    def _checkpoint(self) -> str:
        size = f"{self.step.checkpoint / MIB:.1f} MiB"
        how = "only at the end"
        if self.checkpoint_hours:
            minutes, hourly = 60 * self.checkpoint_hours, self.bytes_an_hour / GIB
            how = f"one every {minutes:.3g} minutes, {hourly:.2g} GiB an hour"
        if self.bytes_an_hour > 1.001 * MAX_BYTES_PER_HOUR:
            how += " (more than 1 wears out a memory card: use a larger --checkpoint-steps)"
        if not self.fits_on_disk:
            how += f"; they need {self._disk_needed / MIB:,.0f} MiB, and the disk has less: free some space"
        return f"{size}, {how}"


def diagnose(options: DoctorOptions) -> tuple[RunPlan, Diagnosis]:
    """Measure a step of the run that is asked for; `suggest` says what to change if it does not keep up."""
    if options.fps is not None and not 0 < options.fps < math.inf:
        raise UserError(f"fps is {options.fps:g}: use a number above 0")
    asked = as_run(options)
    stream = open_run_stream(asked)
    plan = resolve(asked, stream)
    seen = stream.measured_fps()
    fps = options.fps or stream.fps or seen or 30.0
    peak = predicted_peak(plan)  # before the measurement, whose memory is not the run's
    step = measure(plan, "a step of this run")
    if options.segment is None and stream.overload != "wait":
        plan, step = slow_down(plan, step, fps)
    return plan, Diagnosis(
        machine=Machine.here(Path(options.out or "runs")),
        source=redacted(options.source),
        size=plan.size,
        fps=fps,
        step=step,
        peak=peak,
        checkpoint_hours=checkpoint_hours(plan, step, fps),
        waits=stream.overload == "wait",
    )


def measure(plan: RunPlan, what: str, training: float | None = None, seconds: float = STEPS_SECONDS) -> Measured:
    """The time of a step on noise, in the state of a run that has gone on for a while.

    A few images are measured first, then as many as the time allows; the rest is scaled.
    training: its seconds if they are known already; then the images are only scored.
    seconds: for the steps that count, after as many to warm up.
    """
    learner = make_learner(plan)
    with Progress(f"measuring {what}", None, at_once=True) as bar:
        if learner.memory is not None:
            learner.fit((plan.segment, 3, plan.size, plan.size))
        learner.buffer.replace(
            learner.buffer.pool(_noise(plan, plan.buffer)), torch.arange(plan.buffer, device=learner.device)
        )
        n_bytes = _n_bytes(learner.state_dict(copy=False))
        whole = max(plan.buffer, plan.segment, plan.batch)
        n = min(whole, N_FIRST_IMAGES)
        steps = _timed(_part(plan, n / whole), learner, training, 1, seconds, bar)
        affordable = int(n * seconds / max(1e-9, sum(steps[0])))
        if n < whole and affordable >= 2 * n:
            n = min(whole, affordable)
            steps = _timed(_part(plan, n / whole), learner, training, N_STEPS, seconds, bar)
    part = _part(plan, n / whole)
    scoring, trained = (median(times) for times in zip(*steps, strict=True))
    scoring *= (plan.buffer + plan.segment) / (part.buffer + part.segment)
    trained = trained * plan.batch / part.batch if training is None else training
    return Measured(scoring, trained, plan.segment, n_bytes, n, whole)


def slow_down(plan: RunPlan, step: Measured, fps: float) -> tuple[RunPlan, Measured]:
    """More new frames for each update, until updates and scores take no more than their share of the time."""
    times = 1
    while times < MOST_TIMES and step.of(times * plan.segment).ratio(fps) > LOAD:
        times *= 2
    return replace(plan, segment=times * plan.segment), step.of(times * plan.segment)


def _part(plan: RunPlan, share: float) -> RunPlan:
    """The same with fewer images in everything."""
    buffer, batch, segment = (max(2, round(share * n)) for n in (plan.buffer, plan.batch, plan.segment))
    if share == 1:
        return plan
    return replace(plan, buffer=buffer, batch=min(batch, buffer), segment=segment)


def _timed(
    plan: RunPlan, whole: Learner, training: float | None, n_steps: int, seconds: float, bar: Progress
) -> list[tuple[float, float]]:
    """Seconds of scoring and training in some steps. whole: the learner of the run, whose chunks are used."""
    learner = make_learner(plan)
    learner.plan, learner.model.max_chunk = whole.plan, whole.model.max_chunk

    def step() -> tuple[float, float]:
        images = _noise(plan, plan.segment)
        bar.advance(1, f"{len(images)} images")
        if training is None:
            made = learner.learn_many(images)
            return made.seconds_scoring, made.seconds_training
        started = time.perf_counter()
        pool = learner.buffer.pool(images)
        learner.buffer.replace(pool, learner.policy.keep(pool, plan.buffer, learner.model))
        return time.perf_counter() - started, 0.0

    learner.buffer.replace(
        learner.buffer.pool(_noise(plan, plan.buffer)), torch.arange(plan.buffer, device=learner.device)
    )
    step()  # the first loads and compiles
    ages = learner.buffer.ages
    ages.copy_(torch.arange(len(ages)))  # of all ages, so that lazy scoring has its share to do in each step
    steps: list[tuple[float, float]] = []
    while len(steps) < n_steps and sum(map(sum, steps)) < seconds:
        steps.append(step())
    return steps


def _noise(plan: RunPlan, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(plan.seed)
    return torch.randint(256, (n, 3, plan.size, plan.size), dtype=torch.uint8, generator=generator)


def predicted_peak(plan: RunPlan) -> int | None:
    """Bytes of memory that the process of the run takes; None if that is not known for this model or device."""
    with suppress(UserError):
        return make_learner(plan).peak((plan.segment, 3, plan.size, plan.size))
    return None


def suggest(plan: RunPlan, step: Measured, fps: float) -> Iterator[Suggestion]:
    """Changes that make a run keep up, the mildest first. Each is measured; one that does not help is left out."""
    takes_lazy = "rescore_every" in policy_options(plan.policy)
    lazy = plan.rescore_every or int(split(plan.policy)[1].get("rescore_every", "1"))
    # Below 64 px the stem of a ResNet would be another; at 32 px MobileNetV2 ends with a single pixel.
    least_size = 64 if plan.stem == "imagenet" else 16 if plan.width else 32
    n_stages = 5 if plan.train in (None, "all") else int(plan.train) if plan.train.isdecimal() else 0
    for name, values in (
        ("rescore_every", [50] if takes_lazy and lazy < 50 else []),
        ("train", [str(n) for n in (3, 1) if n < n_stages and plan.encoder == "mobilenet_v2"]),  # has public weights
        ("width", [] if plan.width is None else _halved(plan.width, 8)),
        ("size", _halved(plan.size, least_size)),
    ):
        yield from _first_that_keeps_up(plan, name, values, step, fps)
    possible, every = step.n_frames / step.seconds, math.ceil(step.ratio(fps))
    how = f"fps={int(possible)} or every={every}" if possible >= 1 else f"every={every}"
    used = int(possible) if possible >= 1 else fps / every
    yield Suggestion(f"fewer frames, with {how} in the source", step.seconds, step.ratio(used))
    yield from _first_that_keeps_up(plan, "segment", [plan.segment * n for n in (2, 4, 8)], step, fps)


def _first_that_keeps_up(
    plan: RunPlan, name: str, values: Sequence[int | str], step: Measured, fps: float
) -> Iterator[Suggestion]:
    """The mildest value that keeps up, or the last that still helped."""
    best, ratio = None, step.ratio(fps)
    training = step.training if name in ("rescore_every", "segment") else None  # these two change the scoring alone
    for value in values:
        change = f"--{name.replace('_', '-')} {value}"
        changed: dict[str, Any] = {name: value}
        try:
            other = measure(replace(plan, **changed), change, training)
        except UserError:  # not possible, for instance within --memory
            break
        if other.ratio(fps) > 0.95 * ratio:
            break
        ratio = other.ratio(fps)
        best = Suggestion(change, other.seconds, ratio)
        if ratio <= 1:
            break
    if best:
        yield best


def checkpoint_hours(plan: RunPlan, step: Measured, fps: float) -> float | None:
    """Hours between two checkpoints, as the run paces them."""
    waits = []
    if plan.checkpoint_minutes:
        waits.append(max(plan.checkpoint_minutes / 60, step.checkpoint / MAX_BYTES_PER_HOUR))
    if plan.checkpoint_steps:
        waits.append(plan.checkpoint_steps * max(step.seconds, step.n_frames / fps) / 3600)
    return min(waits, default=None)


def _halved(value: int, least: int) -> list[int]:
    return [value >> i for i in range(1, value.bit_length()) if value >> i >= least]


def _n_bytes(tree: Any) -> int:
    """Of all tensors in a state."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return sum(map(_n_bytes, parts))


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
