"""A run from its options: the plan, the stream, the policy and the learner."""

import dataclasses
import inspect
import sys
from pathlib import Path

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.classifier import draw_labelled
from streamclr.compute.ranks import OneProcess
from streamclr.encoders.inference import seeded
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import Architecture, ResNet
from streamclr.encoders.weights import load_encoder
from streamclr.guards import Guarded
from streamclr.learner import Learner
from streamclr.models.pretrained import from_pretrained
from streamclr.policy import POLICIES, Policy
from streamclr.records.options import RunOptions
from streamclr.records.plan import make_encoder, open_run_stream, resolved
from streamclr.runs.serving import check_can_predict
from streamclr.runs.status import check_can_serve
from streamclr.streams.stream import CameraStream, DatasetStream, Stream


def initial_model(config: RunOptions) -> ResNet | ContrastiveModel:
    """What a run starts from: an encoder by the seed, with the weights of a file, or a model with its head."""
    with seeded(config.seed):
        encoder = make_encoder(config)
    if config.init is None:
        return encoder
    if not Path(config.init).is_dir():
        load_encoder(encoder, Path(config.init))
        return encoder
    pretrained, asked = from_pretrained(config.init), Architecture.of(encoder)
    its = pretrained.architecture
    if its != asked:
        own = zip(Architecture._fields, its, asked, strict=True)
        options = " ".join(f"--{name} {value}" for name, value, other in own if value != other)
        raise UserError(f"{config.init} is {its}, not {asked}: give {options}")
    return pretrained.model


def policy_options(policy: str) -> list[str]:
    """The names of the options that a policy takes."""
    name, _ = opts.split(policy)
    if name not in POLICIES:
        raise UserError(f"no policy {name!r}: {opts.one_of(name, POLICIES)}")
    return list(inspect.signature(POLICIES[name]).parameters)


def make_policy(config: RunOptions) -> Policy:
    """The policy `name?key=value`, with the run's seed, temperature and re-scoring period where it takes them."""
    name, options = opts.split(config.policy)
    takes = policy_options(config.policy)
    if config.rescore_every is not None:
        if "rescore_every" not in takes:
            raise UserError(f"--rescore-every is for the policy contrast: {name} does not score lazily")
        options["rescore_every"] = str(config.rescore_every)
    defaults = {"seed": config.seed, "temperature": config.temperature}
    chosen = {k: v for k, v in defaults.items() if k in takes} | options
    policy: Policy = opts.build(POLICIES[name], chosen, f"the policy {name}")
    return policy if config.guards in ("auto", "off") else Guarded(policy, config.guards)


def make_learner(config: RunOptions) -> Learner:
    return Learner(
        initial_model(config),
        make_policy(config),
        buffer_size=config.buffer,
        batch_size=config.batch,
        updates_per_segment=config.updates,
        temperature=config.temperature,
        lr=config.lr,
        weight_decay=config.weight_decay,
        memory=config.memory,
        compile=config.compile,
        seed=config.seed,
        device=config.device,
    )


def prepare(config: RunOptions, ranks: OneProcess | None = None) -> tuple[RunOptions, Stream, Learner]:
    """All that a run needs, checked before anything is written: what is wrong is said now, not hours later."""
    stream = open_run_stream(config)
    config = resolved(config, stream)
    _ = config.duty_share
    if ranks is not None and ranks.n > 1:
        stream = own_stream(config, stream, ranks)
    if config.serve:
        check_can_serve()
    if config.predict:
        check_can_predict(stream)
        if config.memory is not None:
            raise UserError("--predict takes memory that --memory does not know of: use one of them")
    labelled = stream.train
    for fraction in config.label_fractions:
        if labelled is not None:
            draw_labelled(labelled.labels, fraction, labelled.classes)
    learner = make_learner(config)
    if config.memory is not None:
        assert config.segment is not None
        assert config.size is not None
        print(f"memory: {learner.fit((config.segment, 3, config.size, config.size))}", file=sys.stderr)
    return config, stream, learner


def own_stream(
    config: RunOptions, stream: DatasetStream | CameraStream, ranks: OneProcess
) -> DatasetStream | CameraStream:
    """What this rank reads of the stream; an error for what several ranks cannot do."""
    for name in ("memory", "compile", "predict", "label_budget"):
        if getattr(config, name) not in (None, False):
            raise UserError(
                f"--{name.replace('_', '-')} is for one process, this job has {ranks.n} ranks: leave it out"
            )
    assert config.segment is not None
    assert config.batch is not None
    images = own_part(config, ranks).images
    if images is not None and images < max(config.segment, config.batch):
        each = f"{config.images} images are {images} for each of {ranks.n} ranks in segments of {config.segment}"
        raise UserError(f"{each}, before one batch of {config.batch}: use more --images, or a smaller --buffer")
    return stream.shard(ranks.index, ranks.n, config.segment)


def own_part(config: RunOptions, ranks: OneProcess) -> RunOptions:
    """What one rank has to do of a run: as many whole segments as all have; what is there once is the first's."""
    if ranks.n == 1:
        return config
    assert config.segment is not None
    n_steps = None if config.images is None else config.images // (ranks.n * config.segment)
    own = dataclasses.replace(config, images=None if n_steps is None else n_steps * config.segment)
    return dataclasses.replace(own, metrics=None, serve=False, probes=0) if ranks.index else own
