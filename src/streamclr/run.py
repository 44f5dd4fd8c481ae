"""A run: learn from a stream, then train and test a classifier on few labels."""

import dataclasses
import math
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from streamclr.account import Account
from streamclr.budget import parse_size
from streamclr.candidates import Budget, n_that_fit
from streamclr.classifier import draw_labelled, evaluate, evaluate_supervised
from streamclr.config import RunConfig, make_encoder, make_learner
from streamclr.directory import RunDirectory, open_directory
from streamclr.distributed import NORM_OVER, Alone, join
from streamclr.encoder import ContrastiveModel
from streamclr.errors import Silent, UserError
from streamclr.learner import Learner
from streamclr.loop import learn
from streamclr.predicting import check_can_predict
from streamclr.served import Served
from streamclr.source import absolute_source, split_source, takes
from streamclr.stream import AnyStream, LiveStream, Stream, open_stream
from streamclr.window import check_can_serve


def run(config: RunConfig) -> tuple[Path, dict[str, Any]]:
    """Learn and evaluate: the whole job of one run, or of this rank of it. Returns its directory and its results."""
    with join(config.device, config.norm_over) as ranks:
        with ranks.together():
            config, stream, learner = prepare(config, ranks)
        with closing(open_directory(config, ranks)) as directory:
            learner.join(ranks)
            try:
                seconds = learn(own_part(config, ranks), learner, stream, directory)
            except (UserError, Silent):
                directory.remove_if_empty()
                raise
            parts = ranks.collect((learner.buffer.n_seen, stream.account))
            learner.leave()
            directory.save_buffer(learner, stream)
            if ranks.index:
                raise Silent(0)  # the first has the rest to do
            directory.save_model(learner.model)
            results = {
                "images": sum(n_seen for n_seen, _ in parts),
                "steps": learner.n_steps,
                "seconds_learning": seconds,
                **accounts_of([account for _, account in parts]),
                **evaluate_run(config, learner.model, stream, directory),
            }
            if config.predict:
                served = Served(directory).look()
                results |= {"predictions": stream.account.predicted, "served": served.about() if served else None}
            directory.save_results(results)
            return directory.path, results


def accounts_of(ranks: list[Account]) -> dict[str, Any]:
    """The account of all frames and, if there are several, that of each rank."""
    total = Account()
    for account in ranks:
        total.add(account)
    each = [account.state_dict() for account in ranks]
    return {"account": total.state_dict()} | ({"accounts_of_ranks": each} if len(each) > 1 else {})


def prepare(config: RunConfig, ranks: Alone | None = None) -> tuple[RunConfig, AnyStream, Learner]:
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
    labelled = stream.source.train
    for fraction in config.label_fractions:
        if labelled is not None:
            draw_labelled(labelled.labels, fraction, labelled.classes)
    learner = make_learner(config)
    if config.memory is not None:
        assert config.segment is not None
        assert config.size is not None
        print(f"memory: {learner.fit((config.segment, 3, config.size, config.size))}", file=sys.stderr)
    return config, stream, learner


def own_stream(config: RunConfig, stream: Stream | LiveStream, ranks: Alone) -> Stream | LiveStream:
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


def own_part(config: RunConfig, ranks: Alone) -> RunConfig:
    """What one rank has to do of a run: as many whole segments as all have; what is there once is the first's."""
    if ranks.n == 1:
        return config
    assert config.segment is not None
    n_steps = None if config.images is None else config.images // (ranks.n * config.segment)
    own = dataclasses.replace(config, images=None if n_steps is None else n_steps * config.segment)
    return dataclasses.replace(own, metrics=None, serve=False, probes=0) if ranks.index else own


def open_run_stream(config: RunConfig) -> Stream | LiveStream:
    given = "seed" in split_source(config.source)[2]
    seed = {"seed": config.seed} if takes(config.source, "seed") and not given else {}
    return open_stream(config.source, stc=config.stc, size=config.size, **seed)


def resolved(config: RunConfig, stream: AnyStream) -> RunConfig:
    """The configuration with every default filled in, checked against the stream before anything is made."""
    epoch, end = stream.source.epoch, stream.source.n_images
    if config.images is not None and config.epochs is not None:
        raise UserError("both --images and --epochs are given: use one of them")
    epochs = 1 if config.epochs is None else config.epochs
    if not 0 < epochs < math.inf:
        raise UserError(f"epochs is {epochs}: use a number above 0")
    images = config.images
    if images is None:
        if config.epochs is not None and epoch is None:
            raise UserError(f"{config.source} has no epochs: say how long with --images")
        images = round(epochs * epoch) if epoch else None if stream.live else 20_000
    if end is not None and images is not None and images > end:
        how = f": write passes={-(-images // epoch)} in the source for more" if epoch else ""
        raise UserError(f"{config.source} ends after {end} images, before the {images} asked for{how}")
    batch = config.buffer if config.batch is None else config.batch
    if images is not None and images < batch:
        whole = f"{config.source} ends after {images} images" if images == end else f"{images} images are asked for"
        raise UserError(f"{whole}, before one batch of {batch}: give it more, or use a smaller --buffer or --batch")
    if config.norm_over not in NORM_OVER:
        raise UserError(f"norm_over is {config.norm_over!r}: use {' or '.join(NORM_OVER)}")
    if not 0 <= config.probes <= 1000:
        raise UserError(f"probes is {config.probes}: use 0 (no learning curve) to 1000")
    segment = config.segment if config.segment is not None else config.buffer
    if segment < 1:
        raise UserError(f"segment is {segment}: use at least 1")
    size = stream.size
    stem = ("small" if size < 64 else "imagenet") if config.stem is None else config.stem
    return dataclasses.replace(
        config,
        source=absolute_source(config.source),
        images=images,
        epochs=None,
        batch=batch,
        segment=segment,
        size=size,
        stem=stem,
        guards="on" if config.guards == "auto" and stream.live else config.guards,
        label_budget=_label_budget(config, images, epoch, size),
    )


def _label_budget(config: RunConfig, images: int | None, epoch: int | None, size: int) -> str | None:
    """As a number of images where the stream has an end; checked against what the disk may hold."""
    if config.label_budget is None:
        return None
    budget, room = Budget.parse(config.label_budget), n_that_fit(parse_size(config.label_disk, "label_disk"), size)
    known = min((n for n in (images, epoch) if n is not None), default=None)
    if budget.images is None and known is None:
        n_images = 1
    else:
        n_images = budget.of(known or 0)
        budget = Budget(n_images, None)
    if known is not None and n_images > known:
        raise UserError(f"label_budget is {config.label_budget}, and the stream has {known} images: use fewer")
    if n_images > room:
        raise UserError(
            f"label_budget is {n_images} images, and {config.label_disk} of disk holds {room} of {size} px: "
            "use a larger --label-disk or a smaller budget"
        )
    return config.label_budget if budget.images is None else str(budget.images)


def evaluate_run(
    config: RunConfig, model: ContrastiveModel, stream: AnyStream, directory: "RunDirectory"
) -> dict[str, Any]:
    """Stage two on the run's own labels; nothing for a stream that has none."""
    train, test = stream.source.train, stream.source.test
    if train is None or test is None:
        return {"labels": {}}
    results, heads = evaluate(model, train, test, config.label_fractions, config.seed)
    directory.save_classifiers(heads, train.classes)
    if config.supervised:
        results["supervised"] = evaluate_supervised(
            lambda: make_encoder(config), train, test, config.label_fractions, config.seed, model.mean.device
        )
    return results
