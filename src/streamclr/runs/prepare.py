"""All that a run needs, from its options: the plan, the stream and the learner."""

import dataclasses
import sys
from pathlib import Path

from streamclr.answers.answers import addresses
from streamclr.base.errors import UserError
from streamclr.base.progress import say
from streamclr.classifier import draw_labelled
from streamclr.compute.ranks import OneProcess
from streamclr.learner import Learner
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import RunPlan, open_run_stream, resolve
from streamclr.runs.assemble import make_learner
from streamclr.runs.choose import choose
from streamclr.runs.dashboard import check_can_serve
from streamclr.runs.serving import check_can_predict
from streamclr.stage_two import check_classifier
from streamclr.streams.sight import FIT
from streamclr.streams.spec import fit_of, with_fit
from streamclr.streams.stream import CameraStream, DatasetStream, Stream


def prepare(options: RunOptions, ranks: OneProcess | None = None) -> tuple[RunPlan, Stream, Learner]:
    """All that a run needs. Every option is checked here, before anything is written, not hours later.

    ranks: of a run that begins now, which is then told on stderr.
    """
    options = as_left(options)
    stream = open_run_stream(options)
    plan = resolve(options, stream)
    _ = plan.duty_share
    check_classifier(plan.classifier)
    if ranks is not None and ranks.n > 1:
        if options.label_budget is None:
            plan = dataclasses.replace(plan, label_budget=None)
        stream = own_stream(plan, stream, ranks)
    check_can_serve(plan)
    if addresses(plan) and not plan.predict:
        raise UserError("--to sends the answers of --predict: give --predict too")
    if plan.predict:
        check_can_predict(stream)
        if plan.memory is not None:
            raise UserError("--predict takes memory that --memory does not count: use one of them")
    if stream.train is not None:
        if plan.classifier == "selftrained" and (stream.train.tracks is None or plan.spread == "off"):
            raise UserError("selftrained needs frames whose tracks are known, and --spread on: use finetuned")
        for fraction in plan.label_fractions:
            draw_labelled(stream.train.labels, fraction, stream.train.classes)
    if ranks is not None:
        RunDirectory.check_out(plan)
    choice = choose(options, plan, stream) if ranks is not None and ranks.n == 1 else None
    plan = plan if choice is None else choice.plan
    learner = make_learner(plan)
    if plan.memory is not None:
        print(f"memory: {learner.fit((plan.segment, 3, plan.size, plan.size))}", file=sys.stderr)
    # A plan says all, and nothing was chosen.
    for line in [] if choice is None or isinstance(options, RunPlan) else choice.lines():
        say(line)
    return plan, stream, learner


def as_left(options: RunOptions) -> RunOptions:
    """With the fit of the run that was left unfinished in --out, unless the source has one: the usual fit may have been
    another when it began."""
    if options.out is None or not (Path(options.out) / "config.json").is_file():
        return options
    fit = fit_of(RunDirectory.existing(options.out).config.source)
    return options if fit == FIT else dataclasses.replace(options, source=with_fit(options.source, fit))


def own_stream(plan: RunPlan, stream: DatasetStream | CameraStream, ranks: OneProcess) -> DatasetStream | CameraStream:
    """What this rank reads of the stream; an error for what several ranks cannot do."""
    for name in ("memory", "compile", "predict", "label_budget"):
        if getattr(plan, name) not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} is for one process, this job has {ranks.n} ranks: leave it out")
    images = own_part(plan, ranks).images
    if images is not None and images < max(plan.segment, plan.batch):
        each = f"{plan.images} images are {images} for each of {ranks.n} ranks in segments of {plan.segment}"
        raise UserError(f"{each}, before one batch of {plan.batch}: use more --images, or a smaller --buffer")
    return stream.shard(ranks.index, ranks.n, plan.segment)


def own_part(plan: RunPlan, ranks: OneProcess) -> RunPlan:
    """One rank's part of a run: as many whole segments as every rank has; rank 0 alone serves, probes and reports."""
    if ranks.n == 1:
        return plan
    n_steps = None if plan.images is None else plan.images // (ranks.n * plan.segment)
    own = dataclasses.replace(plan, images=None if n_steps is None else n_steps * plan.segment)
    return dataclasses.replace(own, metrics=None, serve=False, probes=0) if ranks.index else own
