"""What a step costs beyond training: scores, and the other parts of a run."""

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from streamclr import ContrastScoring, Guarded, Learner, Policy, open_stream, resnet18
from streamclr.base.files import json_line
from streamclr.base.options import parse_size
from streamclr.compute.allocator import keep_freed_memory
from streamclr.labelling.candidates import Candidates
from streamclr.models.versions import Score, Version
from streamclr.policy import FIFOReplace, Reservoir
from streamclr.records.label_budget import N_ASKED, THUMBNAIL_BYTES, clips_that_fit
from streamclr.records.options import RunOptions
from streamclr.runs.serving import PredictingStream

from .measure import Ratio, in_turns, seconds
from .report import row
from .subjects import (
    COMPACT,
    MOBILENET_64,
    MOBILENET_96,
    RESNET,
    Steps,
    Subject,
    frames,
    full,
    images,
    of_the_paper,
    untrained,
)

SUBJECTS = (MOBILENET_64, MOBILENET_96, COMPACT, RESNET)
PERIODS = (1, 20, 50)  # T
USUAL_PERIOD = 50


def steps(subjects: tuple[Subject, ...] = SUBJECTS, turns: int = 4) -> None:
    """A step with the exact contrast score, and with all that a run does beside it, of the same step without a score.

    Buffer, batch, segment and recipe are the usual ones. Without a score a reservoir chooses what stays.
    """
    keep_freed_memory()
    for subject in subjects:
        with tempfile.TemporaryDirectory() as place:
            steps_of(subject, turns, Path(place))


def steps_of(subject: Subject, turns: int, place: Path) -> None:
    def stepping(policy: Policy) -> Steps:
        return Steps(subject.make(policy=policy), subject.size, turns + 1)

    scoring = {f"T = {period}": stepping(ContrastScoring(period)) for period in PERIODS}
    guards = stepping(Guarded(ContrastScoring(USUAL_PERIOD)))
    with closing(WholeSegments(subject, turns + 1, place)) as whole:
        costs = in_turns({"plain": stepping(Reservoir()), **scoring, "guards": guards, "whole": whole}, turns)
    found = {name: Ratio.of(cost, costs["plain"]) for name, cost in costs.items()}
    for period, (name, case) in zip(PERIODS, scoring.items(), strict=True):
        most = subject.most_scoring if period == USUAL_PERIOD else None
        share = f"{100 * case.rescored:.1f} % of the buffer scored again"
        at_most(f"{subject.name}: exact scores, {name}, {share}", found[name], most)
    at_most(f"{subject.name}: exact scores, T = {USUAL_PERIOD}, and guards", found["guards"], None)
    what = f"exact scores, T = {USUAL_PERIOD}, guards, predictions and label candidates"
    at_most(f"{subject.name}: {what}", found["whole"], subject.most_whole)


def at_most(figure: str, ratio: Ratio, most: float | None) -> None:
    row(figure, ratio, f"at most {most:.2f}" if most else "", ratio.at_most(most) if most else None)


class WholeSegments:
    """A case: each call is what a run does with a segment, with guards, predictions and label candidates on."""

    def __init__(self, subject: Subject, n_segments: int, place: Path):
        self.learner = full(subject.make(policy=Guarded(ContrastScoring(USUAL_PERIOD))), subject.size)
        n, shape = self.learner.batch_size, (3, subject.size, subject.size)
        version = Version(untrained(self.learner, subject.size), 0, frozenset(), frozenset(), Score(0, 0, 0.0))
        new = open_stream(frames(n * n_segments, subject.size, start=10**6))
        self.stream = PredictingStream(new, Served(version), place / "predictions.jsonl")
        n_bytes = parse_size(RunOptions.label_disk)
        n_clips, clip, thumbnail = clips_that_fit(n_bytes, subject.size, None, N_ASKED, THUMBNAIL_BYTES)
        self.candidates = Candidates(place / "candidates.bin", n_clips, shape, clip=clip, thumbnail=thumbnail)
        self._segments = self.stream.segments(n)

    def __call__(self) -> None:
        segment = next(self._segments)
        self.candidates.offer(segment, self.learner.buffer.n_seen)
        self.learner.learn_many(segment)

    def close(self) -> None:
        self._segments.close()
        self.candidates.close()


class Served:
    """A version that is served all the time, as `Versions` has it."""

    def __init__(self, version: Version):
        self.current = version

    def look(self) -> Version:
        return self.current


def scoring(widths: tuple[int, ...] = (64, 16, 8), turns: int = 5) -> None:
    """The same step of ResNet-18 with the fastest score on this machine, and with the exact one."""
    keep_freed_memory()
    for width in widths:
        make = of_the_paper(width)
        cases = {
            f"T = {period}, {precision}": Steps(make(policy=ContrastScoring(period, precision)), 32, turns + 1)
            for precision in ("auto", "fp32")
            for period in (1, USUAL_PERIOD)
        }
        costs = in_turns({"plain": Steps(make(policy=Reservoir()), 32, turns + 1), **cases}, turns)
        for name in cases:
            row(f"ResNet-18 of width {width}, 32 px: scores, {name}", Ratio.of(costs[name], costs["plain"]))


STAGES = {  # what learns, and how many views of each image are kept
    "its last 3 stages (the default)": {"train": "3"},
    "its last 2 stages": {"train": "2"},
    "its last 2 stages, 4 views kept": {"train": "2", "kept_views": 4},
    "its last stage, 4 views kept": {"train": "1", "kept_views": 4},
}
N_BUFFERS_SEEN = 10  # of images of the stream: one in ten of the new ones enters a reservoir


def stages(subjects: tuple[Subject, ...] = (MOBILENET_64, MOBILENET_96), turns: int = 4) -> None:
    """A step in which all of the encoder learns, of one in which its last stages do; also with kept views."""
    keep_freed_memory()
    for subject in subjects:
        cases = {name: late_in_a_stream(subject, turns + 1, **own) for name, own in STAGES.items()}
        costs = in_turns({"all": late_in_a_stream(subject, turns + 1, train="all"), **cases}, turns)
        for name, own in STAGES.items():
            ratio, is_due = Ratio.of(costs["all"], costs[name]), "kept_views" in own
            target = "at least 3, one of the two" if is_due else ""
            row(f"{subject.name}: all learns, of {name}", ratio, target, ratio.at_least(3) if is_due else None)


def late_in_a_stream(subject: Subject, n_segments: int, **options: Any) -> Steps:
    case = Steps(subject.make(policy=Reservoir(), **options), subject.size, n_segments)
    generator = torch.Generator().manual_seed(0)
    case.learner.buffer.scores.uniform_(1 - 1 / N_BUFFERS_SEEN, 1, generator=generator)  # the reservoir's random keys
    return case


def overhead(width: int = 16) -> None:
    """What a step costs beyond the encoder."""
    keep_freed_memory()
    learner = Learner(resnet18(width), FIFOReplace(), buffer=256, device="cpu")
    new = images(256)
    step = seconds(lambda: learner.learn_many(new))
    done = learner.learn_many(new)
    buffer, keep = learner.buffer, torch.arange(256) * 2
    parts = [
        seconds(lambda: learner.views(new.repeat(2, 1, 1, 1), learner.generator), 5),
        seconds(lambda: buffer.replace(buffer.pool(new), keep), 5),
        seconds(lambda: json_line(vars(done)), 5),
    ]
    share = sum(parts) / step
    row(f"views, buffer and journal, of a step of width {width}", f"{100 * share:.2f} %", "at most 5 %", share <= 0.05)
