"""What a run does: its options with every default filled in, checked against the stream."""

import dataclasses
import math

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.compute.memory import parse_size
from streamclr.compute.ranks import NORM_OVER
from streamclr.encoders.resnet import ENCODERS, ResNet
from streamclr.records.label_budget import LabelBudget, n_that_fit
from streamclr.records.options import RunOptions
from streamclr.streams.spec import absolute_source, split_source, takes
from streamclr.streams.stream import CameraStream, DatasetStream, Stream, open_stream


def make_encoder(config: RunOptions) -> ResNet:
    if config.encoder not in ENCODERS:
        raise UserError(f"no encoder {config.encoder!r}: {opts.one_of(config.encoder, ENCODERS)}")
    return ENCODERS[config.encoder](config.width, config.stem, config.norm)


def open_run_stream(config: RunOptions) -> DatasetStream | CameraStream:
    given = "seed" in split_source(config.source)[2]
    seed = {"seed": config.seed} if takes(config.source, "seed") and not given else {}
    return open_stream(config.source, stc=config.stc, size=config.size, **seed)


def resolved(config: RunOptions, stream: Stream) -> RunOptions:
    """The configuration with every default filled in, checked against the stream before anything is made."""
    epoch, end = stream.epoch, stream.n_images
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


def _label_budget(config: RunOptions, images: int | None, epoch: int | None, size: int) -> str | None:
    """As a number of images where the stream has an end; checked against what the disk may hold."""
    if config.label_budget is None:
        return None
    budget, room = LabelBudget.parse(config.label_budget), n_that_fit(parse_size(config.label_disk, "label_disk"), size)
    known = min((n for n in (images, epoch) if n is not None), default=None)
    if budget.images is None and known is None:
        n_images = 1
    else:
        n_images = budget.of(known or 0)
        budget = LabelBudget(n_images, None)
    if known is not None and n_images > known:
        raise UserError(f"label_budget is {config.label_budget}, and the stream has {known} images: use fewer")
    if n_images > room:
        raise UserError(
            f"label_budget is {n_images} images, and {config.label_disk} of disk holds {room} of {size} px: "
            "use a larger --label-disk or a smaller budget"
        )
    return config.label_budget if budget.images is None else str(budget.images)
