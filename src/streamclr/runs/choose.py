"""What a run chooses by itself: how many new frames a step takes, so that it keeps up with its camera."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from streamclr.base.options import redacted
from streamclr.compute.memory import MIB
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import RunPlan
from streamclr.runs.doctor.diagnose import Measured, measure, predicted_peak, slow_down
from streamclr.streams.stream import CameraStream, DatasetStream

MEASURE_SECONDS = 1.0  # of steps, after as many to warm up
LOOK_SECONDS = 1.0  # at a camera that does not say how many frames it sends
USUAL_FPS = 30.0  # of a camera that cannot be looked at


@dataclass(frozen=True)
class Choice:
    """The plan of a run, and why it is so."""

    plan: RunPlan
    fps: float | None = None  # None: the images wait for the learner
    step: Measured | None = None  # None: not measured
    peak: int | None = None  # bytes of memory, where known

    @property
    def load(self) -> float | None:
        """Share of the time that learning takes; above 1 frames are passed over."""
        return None if self.step is None or self.fps is None else self.step.ratio(self.fps)

    def lines(self) -> list[str]:
        """What is done, whether it keeps up, and the command that says the same."""
        plan = self.plan
        start = "public weights" if plan.init == "pretrained" else f"{plan.init} weights"
        whole = {"all": "all of it learns", "norms": "its norms learn"}
        parts = whole.get(plan.train or "all", f"its last {plan.train} stages learn")
        threads = torch.get_num_threads()
        model = f"{plan.encoder} ({start}, {parts}), {plan.size}x{plan.size} px, {threads} threads"
        return [f"{redacted(plan.source)}: {model}", self._pace(), f"the same: {command(plan)}"]

    def _pace(self) -> str:
        plan = self.plan
        pace = f"an update of {plan.batch} images for every {plan.segment} new ones"
        if self.step is not None:
            pace += f" takes {_seconds(self.step.seconds)}"
        if self.fps is None:
            pace += ", which wait for it"
        elif self.load is not None:
            arrive = f"they arrive in {_seconds(plan.segment / self.fps)}"
            verdict = (
                f"keeps up, {100 * (1 - self.load):.0f} % of the time is left"
                if self.load <= 1
                else f"too slow, {100 * (1 - 1 / self.load):.0f} % of the frames are passed over: use a lower fps="
            )
            pace += f", {arrive}: {verdict}"
        return pace + (f"; about {self.peak / MIB:,.0f} MiB of memory" if self.peak else "")


def choose(asked: RunOptions, plan: RunPlan, stream: DatasetStream | CameraStream, look: bool = False) -> Choice:
    """The plan with a segment that this machine keeps up with, where frames do not wait and nobody gave one.

    A run that goes on keeps what was chosen at its start.
    look: measure though there is nothing to choose.
    """
    begun = RunDirectory.begun(plan)
    if begun is not None and asked.segment is None:
        plan = replace(plan, segment=begun.segment)
    waits = stream.overload == "wait"
    is_open = not waits and asked.segment is None and begun is None
    if not (is_open or look):
        return Choice(plan, None if waits else stream.fps)
    fps = None if waits else stream.fps or stream.measured_fps(LOOK_SECONDS) or USUAL_FPS
    step = measure(plan, "a step on this machine", seconds=MEASURE_SECONDS)
    if is_open and fps is not None:
        plan, step = slow_down(plan, step, fps)
    return Choice(plan, fps, step, predicted_peak(plan))


def command(plan: RunPlan) -> str:
    """The command line that asks for this plan by its options."""
    return " ".join(["streamclr run", shlex.quote(redacted(plan.source)), *_flags(plan)])


def _flags(plan: RunPlan) -> Iterator[str]:
    for name in ("encoder", "init", "size", "train", "policy", "buffer", "batch", "segment"):
        yield f"--{name} {shlex.quote(str(getattr(plan, name)))}"
    for name in ("loss", "views", "weak_view"):
        if (value := getattr(plan, name)) != getattr(RunOptions, name):
            yield f"--{name.replace('_', '-')} {shlex.quote(value)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"
