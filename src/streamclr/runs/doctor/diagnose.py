"""The doctor: what this machine has, whether a run keeps up with its camera here, and what to change if not."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import option, redacted, split
from streamclr.base.progress import Progress
from streamclr.compute.memory import peak
from streamclr.records.checkpoints import MAX_BYTES_PER_HOUR
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream, resolved
from streamclr.runs.assemble import make_learner, policy_options
from streamclr.runs.doctor.diagnosis import Diagnosis, Measured, Suggestion
from streamclr.runs.doctor.machine import Machine


@dataclass(frozen=True)
class DoctorOptions(RunOptions):
    """Say what this machine has, and whether a run with these options keeps up with its camera. Exit code 1: no."""

    fps: float | None = option(None, "frames a second of the camera [what it sends, else 30]")
    json: bool = option(False, "print JSON, for machines")


def diagnose(asked: DoctorOptions) -> Diagnosis:
    if asked.fps is not None and not 0 < asked.fps < math.inf:
        raise UserError(f"fps is {asked.fps:g}: use a number above 0")
    with ExitStack() as stack:
        stream = open_run_stream(asked)
        config = resolved(asked, stream)
        seen = stream.measured_fps()
        fps = asked.fps or stream.fps or seen or 30.0
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


def measured(config: RunOptions, bar: Progress, what: str, training: float | None = None, n_steps: int = 3) -> Measured:
    """A few steps on noise, in the state of a run that has gone on for a while.

    training: its seconds, where they are known already; then the images are only scored.
    """
    assert config.segment is not None
    bar.advance(0, what)
    learner, generator = make_learner(config), torch.Generator().manual_seed(config.seed)

    def noise(n: int) -> Tensor:
        return torch.randint(256, (n, 3, _size(config), _size(config)), dtype=torch.uint8, generator=generator)

    def step() -> tuple[float, float]:
        assert config.segment is not None
        images = noise(config.segment)
        if training is None:
            made = learner.learn_many(images)
            return made.seconds_scoring, made.seconds_training
        started = time.perf_counter()
        pool = learner.buffer.pool(images)
        learner.buffer.replace(pool, learner.policy.keep(pool, config.buffer, learner.model))
        return time.perf_counter() - started, training

    pool = learner.buffer.pool(noise(config.buffer))
    learner.buffer.replace(pool, torch.arange(config.buffer, device=learner.device))
    step()  # the first loads and compiles
    ages = learner.buffer.ages
    ages.copy_(torch.arange(len(ages)))  # of all ages, so that lazy scoring has its share to do in each step
    steps: list[tuple[float, float]] = []
    while len(steps) < n_steps and sum(map(sum, steps)) < MOST_SECONDS:
        steps.append(step())
    bar.advance(1, what)
    scoring, trained = (median(times) for times in zip(*steps, strict=True))
    return Measured(scoring, trained, config.segment, _n_bytes(learner.state_dict(copy=False)))


MOST_SECONDS = 10.0  # after which no further step is begun


def suggested(config: RunOptions, step: Measured, fps: float, bar: Progress) -> Iterator[Suggestion]:
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
    config: RunOptions, name: str, values: list[int], step: Measured, fps: float, bar: Progress
) -> Iterator[Suggestion]:
    """The mildest value that keeps up, or the last that still helped."""
    best, ratio = None, step.ratio(fps)
    training = step.training if name in ("rescore_every", "segment") else None  # these two change the scoring alone
    for value in values:
        change = f"--{name.replace('_', '-')} {value}"
        changed: dict[str, Any] = {name: value}
        try:
            other = measured(replace(config, **changed), bar, change, training, n_steps=2)
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


def checkpoint_hours(config: RunOptions, step: Measured, fps: float) -> float | None:
    """Between two checkpoints: what the run's pace makes of its options."""
    waits = []
    if config.checkpoint_minutes:
        waits.append(max(config.checkpoint_minutes / 60, step.checkpoint / MAX_BYTES_PER_HOUR))
    if config.checkpoint_steps:
        waits.append(config.checkpoint_steps * max(step.seconds, step.n_frames / fps) / 3600)
    return min(waits, default=None)


def _halved(value: int, least: int) -> list[int]:
    values = []
    while (value := value // 2) >= least:
        values.append(value)
    return values


def _size(config: RunOptions) -> int:
    assert config.size is not None
    return config.size


def _n_bytes(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    return sum(map(_n_bytes, tree.values())) if isinstance(tree, dict) else 0
