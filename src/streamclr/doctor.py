"""The doctor: what this machine has, whether a run keeps up with its camera here, and what to change if not."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from streamclr.budget import MIB, peak
from streamclr.checkpoint import MOST_AN_HOUR
from streamclr.errors import UserError
from streamclr.learner import Step
from streamclr.machine import GIB, Machine
from streamclr.options import redacted, split
from streamclr.progress import Progress
from streamclr.run import RunConfig, RunDirectory, make_learner, open_run_stream, option, policy_options, resolved


@dataclass(frozen=True)
class DoctorConfig(RunConfig):
    """Say what this machine has, and whether a run with these options keeps up with its camera. Exit code 1: no."""

    fps: float | None = option(None, "frames a second of the camera [the source's own rate, else 30]")
    json: bool = option(False, "print JSON, for machines")


@dataclass(frozen=True)
class Measured:
    """Steps of a configuration, as this machine made them just now."""

    scoring: float  # seconds, median
    training: float
    n_frames: int  # of one step
    checkpoint: int  # bytes

    @property
    def seconds(self) -> float:
        return self.scoring + self.training

    def ratio(self, fps: float) -> float:
        """Seconds of a step for each second in which its frames come; up to 1 it keeps up."""
        return self.seconds * fps / self.n_frames


@dataclass(frozen=True)
class Suggestion:
    change: str
    seconds: float  # of a step
    ratio: float


@dataclass(frozen=True)
class Diagnosis:
    machine: Machine
    source: str
    size: int
    fps: float
    step: Measured
    peak: int | None  # bytes of memory; None: this system does not tell
    checkpoint_hours: float | None  # between two checkpoints; None: only the last
    suggestions: list[Suggestion]

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
        """A name and what is to be said of it."""
        step = self.step
        parts = f"scoring {_seconds(step.scoring)}, training {_seconds(step.training)}"
        has = f"{_seconds(step.n_frames / self.fps)} in which its frames come at {self.fps:g} a second"
        verdict = f"a step takes {self.ratio:.2f} of the {has}"
        rows = [
            *self.machine.rows(),
            ("source", f"{self.source}, {self.size}x{self.size} px"),
            ("step", f"{step.n_frames} images in {_seconds(step.seconds)}: {parts}"),
            ("peak", "not told by this system" if self.peak is None else f"{self.peak / MIB:.0f} MiB of memory"),
            ("checkpoint", self._checkpoint()),
            ("keeps up", f"{'yes' if self.keeps_up else 'no'}: {verdict}"),
        ]
        if not self.keeps_up:
            lost = self.fps * (1 - 1 / self.ratio)
            daily = f"{lost * 86400:,.0f} a day"
            rows.append(("as it is", f"{lost:,.1f} of {self.fps:g} frames a second are passed over, {daily}"))
        for number, suggestion in enumerate(self.suggestions, 1):
            does = "keeps up" if suggestion.ratio <= 1 else "better, not enough"
            figure = f"{suggestion.ratio:.2f}, a step of {_seconds(suggestion.seconds)}"
            rows.append((f"change {number}", f"{suggestion.change}: {figure}, {does}"))
        return rows

    def _checkpoint(self) -> str:
        size = f"{self.step.checkpoint / MIB:.1f} MiB"
        how = "only at the end"
        if self.checkpoint_hours:
            minutes, hourly = 60 * self.checkpoint_hours, self.bytes_an_hour / GIB
            how = f"one in {minutes:.3g} minutes is {hourly:.2g} GiB an hour of 1 at most"
        if self.bytes_an_hour > 1.001 * MOST_AN_HOUR:
            how += ", too much for a memory card: use a larger --checkpoint-steps"
        if not self.fits_on_disk:
            how += f"; {self._disk_needed / MIB:,.0f} MiB are needed and the disk has less: make room"
        return f"{size}, {how}"


def diagnose(asked: DoctorConfig) -> Diagnosis:
    if asked.fps is not None and not 0 < asked.fps < math.inf:
        raise UserError(f"fps is {asked.fps:g}: use a number above 0")
    with ExitStack() as stack:
        stream = open_run_stream(asked)
        if hasattr(stream, "close"):  # a camera
            stack.callback(stream.close)
        config = resolved(asked, stream)
        fps = asked.fps or getattr(stream, "fps", None) or 30.0
        bar = stack.enter_context(Progress("measuring", None))
        step = measured(config, bar, "the step as it is")
        used = None
        with suppress(OSError):
            used = peak()  # before anything else is measured
        suggestions = [] if step.ratio(fps) <= 1 else list(suggested(config, step, fps, bar))
    return Diagnosis(
        machine=Machine.here(Path(asked.out or "runs")),
        source=redacted(asked.source),
        size=_size(config),
        fps=fps,
        step=step,
        peak=used,
        checkpoint_hours=checkpoint_hours(config, step, fps),
        suggestions=suggestions,
    )


def measured(config: RunConfig, bar: Progress, what: str, n_steps: int = 3, most_seconds: float = 20) -> Measured:
    """A few steps on noise, in the state of a run that has gone on for a while."""
    assert config.segment is not None
    bar.advance(0, what)
    learner, generator = make_learner(config), torch.Generator().manual_seed(config.seed)

    def noise(n: int) -> Tensor:
        return torch.randint(256, (n, 3, _size(config), _size(config)), dtype=torch.uint8, generator=generator)

    pool = learner.buffer.pool(noise(config.buffer))
    learner.buffer.replace(pool, torch.arange(config.buffer, device=learner.device))
    learner.learn_many(noise(config.segment))  # the first loads and compiles
    ages = learner.buffer.ages
    ages.copy_(torch.arange(len(ages)))  # of all ages, so that lazy scoring has its share to do in each step
    steps: list[Step] = []
    started = time.monotonic()
    while len(steps) < n_steps and (not steps or time.monotonic() - started < most_seconds):
        steps.append(learner.learn_many(noise(config.segment)))
    bar.advance(1, what)
    return Measured(
        scoring=median(step.seconds_scoring for step in steps),
        training=median(step.seconds_training for step in steps),
        n_frames=config.segment,
        checkpoint=_n_bytes(learner.state_dict(copy=False)),
    )


def suggested(config: RunConfig, step: Measured, fps: float, bar: Progress) -> Iterator[Suggestion]:
    """What makes a run keep up, the least loss first; each was measured, and what does not help is not told."""
    assert config.segment is not None
    takes_lazy = "rescore_every" in policy_options(config.policy)
    lazy = config.rescore_every or int(split(config.policy)[1].get("rescore_every", "1"))
    least_size = 64 if config.stem == "imagenet" else 16  # below 64 px the stem would be another
    for name, values in (
        ("rescore_every", [50] if takes_lazy and lazy < 50 else []),
        ("width", _halved(config.width, 8)),
        ("size", _halved(_size(config), least_size)),
    ):
        yield from _first_that_keeps_up(config, name, values, step, fps, bar)
    possible, every = step.n_frames / step.seconds, math.ceil(step.ratio(fps))
    how = f"fps={int(possible)} or every={every}" if possible >= 1 else f"every={every}"
    used = int(possible) if possible >= 1 else fps / every
    yield Suggestion(f"fewer frames, with {how} in the source", step.seconds, step.ratio(used))
    yield from _first_that_keeps_up(config, "segment", [config.segment * n for n in (2, 4, 8)], step, fps, bar)


def _first_that_keeps_up(
    config: RunConfig, name: str, values: list[int], step: Measured, fps: float, bar: Progress
) -> Iterator[Suggestion]:
    """The mildest value that keeps up, or the last that still helped."""
    best, ratio = None, step.ratio(fps)
    for value in values:
        change = f"--{name.replace('_', '-')} {value}"
        changed: dict[str, Any] = {name: value}
        try:
            other = measured(replace(config, **changed), bar, change, n_steps=2, most_seconds=5)
        except UserError:  # this one cannot be, for instance within --memory
            break
        if other.ratio(fps) > 0.95 * ratio:
            break
        ratio = other.ratio(fps)
        best = Suggestion(change, other.seconds, ratio)
        if ratio <= 1:
            break
    if best:
        yield best


def checkpoint_hours(config: RunConfig, step: Measured, fps: float) -> float | None:
    """Between two checkpoints: what the run's pace makes of its options."""
    waits = []
    if config.checkpoint_minutes:
        waits.append(max(config.checkpoint_minutes / 60, step.checkpoint / MOST_AN_HOUR))
    if config.checkpoint_steps:
        waits.append(config.checkpoint_steps * max(step.seconds, step.n_frames / fps) / 3600)
    return min(waits, default=None)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _halved(value: int, least: int) -> list[int]:
    values = []
    while (value := value // 2) >= least:
        values.append(value)
    return values


def _size(config: RunConfig) -> int:
    assert config.size is not None
    return config.size


def _n_bytes(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    return sum(map(_n_bytes, tree.values())) if isinstance(tree, dict) else 0
