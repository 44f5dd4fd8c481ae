"""What a run does: its options with every default filled in, checked against the stream."""

import dataclasses
import math
import os
import typing
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from streamclr.base import plugins
from streamclr.base.errors import UserError
from streamclr.base.options import parse_size
from streamclr.buffer import n_that_fit
from streamclr.compute.ranks import NORM_OVER
from streamclr.encoders.architecture import ENCODERS, SCRATCH_ENCODERS, Architecture
from streamclr.encoders.stages import set_trained
from streamclr.kept import kept_bytes, kept_shape
from streamclr.policy import POLICIES
from streamclr.recipe import LOSSES, PAPER, POSITIVES, RECIPES, Recipe, find_recipe, usual_batch, usual_lr
from streamclr.records.journal import parse_limit
from streamclr.records.label_budget import N_ASKED, LabelBudget, n_candidates_that_fit
from streamclr.records.options import ModelOptions, RunOptions
from streamclr.scenes import REACH
from streamclr.streams.spec import absolute_source, split_source, takes, with_fit
from streamclr.streams.stream import CameraStream, DatasetStream, Stream, open_stream
from streamclr.views import VIEWS, WEAK_VIEWS, build_views

# A public encoder has learned from larger images: at 32 px the last stage of MobileNetV2 is left with one pixel.
MIN_SIZE = 64
MAX_USUAL_DECODERS = 16
# Of the parts that have names; the encoder's are resolved with its architecture.
BUILT_IN: dict[str, Container[str]] = {"policy": POLICIES, "loss": LOSSES, "views": VIEWS, "weak_view": WEAK_VIEWS}


@dataclass(frozen=True)
class RunPlan(RunOptions):
    """The options of a run with every default filled in; `config.json` holds one.

    images: None until the stream ends or somebody stops the run.
    label_budget: a number of images if the length of the stream is known; None: nobody is asked.
    """

    epochs: None = field(default=None)  # `images` says it
    recipe: None = field(default=None)  # the other options say it
    size: int = field(kw_only=True)
    encoder: str = field(kw_only=True)
    policy: str = field(kw_only=True)
    buffer: int = field(kw_only=True)  # images
    batch: int = field(kw_only=True)
    segment: int = field(kw_only=True)
    lr: float = field(kw_only=True)
    temperature: float = field(kw_only=True)
    guards: str = field(kw_only=True)  # never "auto"

    @classmethod
    def of(cls, content: Mapping[str, Any], where: str) -> "RunPlan":
        """The plan that a file or a job holds. where: for the error if it holds none."""
        hints = typing.get_type_hints(cls)
        if unknown := sorted(content.keys() - hints.keys()):
            raise UserError(f"{where} has unknown keys: {', '.join(unknown)}")
        hints["to"], content = tuple, {**content, "to": tuple(content.get("to", ()))}
        for name, value in content.items():
            if not isinstance(value, hints[name]) and not (isinstance(value, int) and hints[name] is float):
                raise UserError(f"{where} has {value!r} for {name}")
        if missing := [f.name for f in dataclasses.fields(cls) if f.kw_only and f.name not in content]:
            raise UserError(f"{where} has no {missing[0]}: it is not the plan of a run")
        if content["guards"] == "auto":  # of an earlier version, which wrote so for a stream that is not live
            content = {**content, "guards": "off"}
        if content.get("init") is None:  # of an earlier version, which had no public weights by name
            content = {**content, "init": "random"}
        if "source" in content:
            content = {**content, "source": with_fit(content["source"])}
        # Nor had it other recipes than the paper's, so that a run which was left unfinished goes on with that.
        usual = {name: value for name, value in PAPER.as_options().items() if content.get(name) is None}
        return cls(**{**content, **usual})

    @property
    def architecture(self) -> Architecture:
        return resolve_architecture(self, self.size)


def open_run_stream(options: RunOptions) -> DatasetStream | CameraStream:
    """The source's own size, unless it is given or a public encoder needs more."""
    given = split_source(options.source)[2]
    usual = {"seed": options.seed, "decoders": _n_decoders(options)}
    own = {name: n for name, n in usual.items() if name not in given and takes(options.source, name)}
    stream = open_stream(options.source, stc=options.stc, size=options.size, **own)
    is_free = options.size is None and "size" not in given
    if is_free and stream.size < MIN_SIZE and _encoder(options) not in SCRATCH_ENCODERS:
        return open_stream(options.source, stc=options.stc, size=MIN_SIZE, **own)
    return stream


def _n_decoders(options: RunOptions) -> int:
    """Unless it is told: where a GPU learns, one for each core of this process but its own."""
    if options.decoders is not None:
        if options.decoders and not takes(options.source, "decoders"):
            raise UserError(f"decoders is {options.decoders}, and {options.source} has no image files: leave it out")
        return options.decoders
    if options.device == "cpu" or not torch.cuda.is_available():
        return 0
    n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # of torchrun, which gives each one thread
    n_cores = (os.cpu_count() or 1) // n_processes if n_processes else torch.get_num_threads()
    return max(1, min(MAX_USUAL_DECODERS, n_cores - 1))


def resolve(options: RunOptions, stream: Stream) -> RunPlan:
    """The plan for these options on this stream; options that do not fit the stream are refused."""
    epoch, end = stream.epoch, stream.n_images
    if options.images is not None and options.epochs is not None:
        raise UserError("both --images and --epochs are given: use one of them")
    epochs = 1 if options.epochs is None else options.epochs
    if not 0 < epochs < math.inf:
        raise UserError(f"epochs is {epochs}: use a number above 0")
    images = options.images
    if images is not None and images < 1:
        raise UserError(f"images is {images}: use at least 1, or leave it out for all that there are")
    if images is None:
        if options.epochs is not None and epoch is None:
            is_recording = split_source(options.source)[0] == "video"
            how = f"write passes={math.ceil(epochs)} in the source" if is_recording else "say how long with --images"
            raise UserError(f"{options.source} has no epochs: {how}")
        images = round(epochs * epoch) if epoch else None if stream.live else 20_000
    if end is not None and images is not None and images > end:
        how = f": write passes={-(-images // epoch)} in the source for more" if epoch else ""
        raise UserError(f"{options.source} ends after {end} images, before the {images} asked for{how}")
    architecture = resolve_architecture(options, stream.size)
    recipe, given = _recipe(options), dataclasses.asdict(options)
    chosen = {name: value if given[name] is None else given[name] for name, value in recipe.as_options().items()}
    chosen["optimizer"], chosen["lr"] = usual_lr(recipe, options.optimizer, options.lr)
    named = {"policy": chosen["policy"], **{name: given[name] for name in ("loss", "views", "weak_view")}}
    chosen |= {name: plugins.full_name(name, text, BUILT_IN[name]) for name, text in named.items()}
    if options.train is None and architecture.encoder not in ENCODERS:
        chosen["train"] = "all"  # an adapter may have no stages
    if options.positives is None and not stream.in_time:
        chosen["positives"] = "views"
    for name, allowed in (("positives", POSITIVES), ("flip", ("on", "off"))):
        if chosen[name] not in allowed:
            raise UserError(f"{name} is {chosen[name]!r}: use {' or '.join(allowed)}")
    shape, in_time = (3, stream.size, stream.size), chosen["positives"] == "time"
    buffer = n_that_fit(chosen["buffer"], shape, in_time, _kept_bytes(options, architecture, chosen, shape))
    room = buffer if isinstance(chosen["buffer"], int) else chosen["buffer"]
    batch = usual_batch(recipe.batch, room) if options.batch is None else options.batch
    if images is not None and images < batch:
        if images == end == 1:
            how = "a run learns from many, streamclr predict classifies one"
            raise UserError(f"{options.source} is one image, and an update takes {batch}: {how}")
        whole = f"{options.source} ends after {images} images" if images == end else f"{images} images are asked for"
        raise UserError(f"{whole}, before one batch of {batch}: give it more, or use a smaller --buffer or --batch")
    parse_limit(options.log_disk)
    if options.norm_over not in NORM_OVER:
        raise UserError(f"norm_over is {options.norm_over!r}: use {' or '.join(NORM_OVER)}")
    if options.probes is not None and not 0 <= options.probes <= 1000:
        raise UserError(f"probes is {options.probes}: use 0 (no learning curve) to 1000")
    segment = usual_batch(recipe.segment, room) if options.segment is None else options.segment
    if segment < 1:
        raise UserError(f"segment is {segment}: use at least 1")
    filled = {
        "source": absolute_source(options.source),
        "images": images,
        "epochs": None,
        **chosen,
        "recipe": None,
        "buffer": buffer,
        "reach": _reach(options, stream) if in_time else None,
        "batch": batch,
        "segment": segment,
        "size": stream.size,
        **architecture._asdict(),
        "init": architecture.usual_init if options.init is None else options.init,
        "guards": ("on" if stream.live else "off") if options.guards == "auto" else options.guards,
        "label_budget": _label_budget(options, stream, images),
    }
    return RunPlan(**{f.name: getattr(options, f.name) for f in dataclasses.fields(RunOptions)} | filled)


def _reach(options: RunOptions, stream: Stream) -> int:
    """Frames in a second of the stream, where its rate is known."""
    if options.reach is not None:
        return options.reach
    return max(1, min(REACH, round(stream.fps))) if stream.fps else REACH


def _kept_bytes(options: RunOptions, architecture: Architecture, chosen: dict[str, Any], shape: tuple[int, ...]) -> int:
    """Of what is kept of an image beside it."""
    if not options.kept_views:
        return 0
    with torch.device("meta"):  # no memory, no random numbers
        model = architecture.make_model()
    set_trained(model, chosen["train"])
    views = build_views(options.views, *(chosen[name] for name in ("crop", "flip", "side")))
    return kept_bytes(kept_shape(options.kept_views, model.encoder, views, shape))


def resolve_architecture(options: ModelOptions, size: int) -> Architecture:
    """The model that is asked for, for images of this size."""
    o = options
    projection = _recipe(o).projection if o.projection is None else o.projection
    return Architecture.resolve(_encoder(o), size, o.width, o.stem, o.norm, projection)


def _encoder(options: ModelOptions) -> str:
    if options.encoder is not None:
        return options.encoder
    if options.recipe == "paper" or any(value is not None for value in (options.width, options.stem, options.norm)):
        return "resnet18"
    return "compact" if options.init == "random" else "mobilenet_v2"


def _recipe(options: ModelOptions) -> Recipe:
    """A plan has none, and nothing to be filled in."""
    return find_recipe(options.recipe or RECIPES[0], _encoder(options) not in SCRATCH_ENCODERS)


def _label_budget(options: RunOptions, stream: Stream, images: int | None) -> str | None:
    """None: nobody is asked. As a number of images where the stream has an end; checked against what the disk may hold.

    The usual one is never too large for the stream or the disk.
    """
    asked = options.label_budget
    if asked == "off" or (asked is None and (stream.train is not None or isinstance(options, RunPlan))):
        return None  # a plan says all: there is nothing to be filled in
    room = n_candidates_that_fit(parse_size(options.label_disk, "label_disk"), stream.size)
    known = min((n for n in (images, stream.epoch) if n is not None), default=None)
    if asked is None and not room:
        how = "use a larger --label-disk, or --label-budget off"
        raise UserError(f"label_disk is {options.label_disk}, which holds no image of {stream.size} px: {how}")
    if asked is None:
        return str(min(N_ASKED, room, room if known is None else known))
    budget = LabelBudget.parse(asked)
    n_images = budget.of(known or 0)
    if known is not None and n_images > known:
        raise UserError(f"label_budget is {asked}, and the stream has {known} images: use fewer")
    if n_images > room:
        holds = f"{options.label_disk} of disk holds {room} of {stream.size} px"
        how = "use a larger --label-disk or a smaller budget"
        raise UserError(f"label_budget is {n_images} images, and {holds}: {how}")
    return asked if budget.images is None and known is None else str(n_images)
