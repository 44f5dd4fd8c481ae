"""A run from its options: the plan, the stream, the policy and the learner."""

import dataclasses
import sys
from pathlib import Path

from streamclr.base.errors import UserError
from streamclr.base.options import parse_size
from streamclr.classifier import draw_labelled
from streamclr.compute.fast_scoring import check_precision
from streamclr.compute.ranks import OneProcess
from streamclr.encoders.architecture import Architecture
from streamclr.encoders.inference import seeded
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.weights import INITS, model_from
from streamclr.guards import Guarded
from streamclr.learner import Learner, find_device
from streamclr.models.pretrained import from_pretrained
from streamclr.policy import ContrastScoring, Policy, build_policy, policy_options
from streamclr.records.directory import RunDirectory
from streamclr.records.options import ModelOptions, RunOptions
from streamclr.records.plan import RunPlan, open_run_stream, resolve, resolve_architecture
from streamclr.runs.serving import check_can_predict
from streamclr.runs.status import check_can_serve
from streamclr.scenes import REACH
from streamclr.stage_two import check_classifier
from streamclr.streams.spec import fit_of, with_fit
from streamclr.streams.stream import CameraStream, DatasetStream, Stream


def initial_model(options: ModelOptions, size: int) -> ContrastiveModel:
    """What a run starts from: public or random weights, an encoder from a file, or a model with its projection head."""
    asked = resolve_architecture(options, size)
    init = asked.usual_init if options.init is None else options.init
    if init in INITS or not Path(init).is_dir():
        with seeded(options.seed):
            return model_from(asked, size, init)
    pretrained = from_pretrained(init)
    if (its := pretrained.architecture) != asked:
        own = zip(Architecture._fields, its, asked, strict=True)
        flags = " ".join(f"--{name} {value}" for name, value, other in own if value != other)
        raise UserError(f"{init} is {its}, not {asked}: give {flags}")
    return pretrained.model


def public_model(plan: RunPlan) -> ContrastiveModel | None:
    """The model as it was before the run; None if the run began with random weights."""
    return initial_model(plan, plan.size).to(find_device(plan.device)) if plan.init != "random" else None


def make_policy(plan: RunPlan) -> Policy:
    """The policy `name?key=value`, with the run's seed, temperature and re-scoring period where it takes them."""
    if plan.rescore_every is not None and "rescore_every" not in policy_options(plan.policy):
        raise UserError(f"--rescore-every is for the policy contrast: {plan.policy} does not score lazily")
    names = ("seed", "temperature", "fresh", "rescore_every")
    policy = build_policy(plan.policy, **{name: getattr(plan, name) for name in names})
    return policy if plan.guards == "off" else Guarded(policy, plan.guards)


def make_learner(plan: RunPlan) -> Learner:
    policy = make_policy(plan)  # mistakes come first: weights may have to be downloaded
    if plan.memory is not None:
        parse_size(plan.memory)
    model = initial_model(plan, plan.size)
    chosen = policy.policy if isinstance(policy, Guarded) else policy
    if isinstance(chosen, ContrastScoring):
        check_precision(model, chosen.precision)
    return Learner(
        model,
        policy,
        buffer=plan.buffer,
        batch_size=plan.batch,
        updates_per_segment=plan.updates,
        temperature=plan.temperature,
        optimizer=plan.optimizer,
        lr=plan.lr,
        lr_half=plan.lr_half,
        weight_decay=plan.weight_decay,
        views=plan.views,
        positives=plan.positives or "views",  # a plan of an earlier version does not say
        train=plan.train or "all",
        reach=plan.reach or REACH,
        precision=plan.precision,
        memory=plan.memory,
        compile=plan.compile,
        seed=plan.seed,
        device=plan.device,
    )


def prepare(options: RunOptions, ranks: OneProcess | None = None) -> tuple[RunPlan, Stream, Learner]:
    """All that a run needs. Every option is checked here, before anything is written, not hours later."""
    options = as_left(options)
    stream = open_run_stream(options)
    plan = resolve(options, stream)
    _ = plan.duty_share
    check_classifier(plan.classifier)
    if ranks is not None and ranks.n > 1:
        stream = own_stream(plan, stream, ranks)
    if plan.serve:
        check_can_serve()
    if plan.predict:
        check_can_predict(stream)
        if plan.memory is not None:
            raise UserError("--predict takes memory that --memory does not count: use one of them")
    if stream.train is not None:
        if plan.classifier == "selftrained" and (stream.train.tracks is None or plan.spread == "off"):
            raise UserError("selftrained needs frames whose tracks are known, and --spread on: use finetuned")
        for fraction in plan.label_fractions:
            draw_labelled(stream.train.labels, fraction, stream.train.classes)
    learner = make_learner(plan)
    if plan.memory is not None:
        print(f"memory: {learner.fit((plan.segment, 3, plan.size, plan.size))}", file=sys.stderr)
    return plan, stream, learner


def as_left(options: RunOptions) -> RunOptions:
    """With the fit of the run that was left unfinished in --out, unless the source has one: the usual fit may have been
    another when it began."""
    if options.out is None or not (Path(options.out) / "config.json").is_file():
        return options
    fit = fit_of(RunDirectory.existing(options.out).config.source)
    return dataclasses.replace(options, source=with_fit(options.source, fit))


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
