"""What can be asked of a run, in groups: a command takes the groups that mean something to it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.options import option
from streamclr.base.plugins import KINDS
from streamclr.encoders.architecture import ADAPTERS, ENCODERS
from streamclr.guards import GUARDS
from streamclr.policy import POLICIES
from streamclr.recipe import ADAPT, LOSSES, OPTIMIZERS, PAPER, RECIPES, SCRATCH
from streamclr.records.answering import AnswerOptions
from streamclr.records.journal import USUAL_LIMIT
from streamclr.records.label_budget import MIN_ASKED, N_ASKED
from streamclr.views import VIEWS, WEAK_VIEWS


def by_recipe(name: str) -> str:
    """For `--help`: what the recipes have for an option."""
    of_paper, own, public = (getattr(recipe, name) for recipe in (PAPER, SCRATCH, ADAPT))
    device = f"{own}" if own == public else f"{public} for a public encoder, {own} from scratch"
    if own == public == of_paper:
        return f"[{device}]"
    return f"[{device}; paper: {'all of it' if of_paper is None else of_paper}]"


@dataclass(frozen=True)
class SourceOptions:
    """Where the images come from."""

    source: str = option("synthetic:", "where the images come from, as in cifar10?stc=500 or folder:DIR")


@dataclass(frozen=True)
class StreamOptions(SourceOptions):
    """The stream of images that a source is read as."""

    size: int | None = option(None, "side of the images in pixels [the source's own; at least 64 for a public encoder]")
    stc: int | None = option(None, "consecutive images of one class [the source's own]")


@dataclass(frozen=True)
class LengthOptions:
    """How much of the stream is learned from."""

    images: int | None = option(None, "how many images of the stream to learn from [of a camera, until it is stopped]")
    epochs: float | None = option(None, "the same in passes over the dataset [1, where there is one]")


@dataclass(frozen=True)
class PolicyOptions:
    """What stays in the buffer, in a command that runs one policy."""

    policy: str | None = option(
        None,
        f"which images stay in the buffer: {', '.join((*POLICIES, KINDS['policy'].form))}?option=value "
        f"{by_recipe('policy')}",
    )


@dataclass(frozen=True)
class BufferOptions:
    """The buffer, and what one step does with it."""

    buffer: int | str | None = option(
        None, f"the buffer's size in memory, as 10M, or images in it, as 256 {by_recipe('buffer')}"
    )
    batch: int | None = option(None, f"images in one update, drawn from the buffer {by_recipe('batch')}")
    segment: int | None = option(None, f"new images in one step {by_recipe('segment')}")
    guards: str = option(
        "auto",
        f"filters for unusable frames: on, off, or some of {', '.join(GUARDS)} with commas [on for a live source]",
    )
    memory: str | None = option(
        None, "the most memory that the process may take while learning, as in 600M or 1.5G [no limit]"
    )


@dataclass(frozen=True)
class ModelOptions:
    """The encoder and how it is trained: what all devices of a fleet have in common."""

    recipe: str | None = option(
        None,
        f"what gives the options that are not given: {' or '.join(RECIPES)}, which is the paper's to the letter "
        f"[{RECIPES[0]}]",
    )
    encoder: str | None = option(
        None,
        f"the base encoder: {', '.join((*ENCODERS, *ADAPTERS))} [mobilenet_v2; compact with --init random; resnet18 "
        "with --recipe paper, --width, --stem or --norm]",
    )
    width: int | None = option(None, "channels of the first stage of a ResNet or of compact [64; 32 of compact]")
    stem: str | None = option(
        None, "of a ResNet: small (3x3), half (the same, stride 2) or imagenet (7x7 and max-pool) [small below 64 px]"
    )
    norm: str | None = option(None, "of a ResNet or of compact: batch or group [batch]")
    projection: str | None = option(
        None, f"projection head: plain, or batchnorm, which has a norm {by_recipe('projection')}"
    )
    init: str | None = option(
        None,
        "start from pretrained (public weights), random, encoder weights in a file (.safetensors or .pth with "
        "torchvision's names) or a directory with a model [pretrained for mobilenet_v2, hf: and timm:, else random]",
    )
    optimizer: str | None = option(None, f"{', '.join(OPTIMIZERS)} {by_recipe('optimizer')}")
    lr: float | None = option(None, f"learning rate {by_recipe('lr')}")
    lr_half: int | None = option(
        None, f"steps after which the learning rate has fallen to half; 0: it is constant {by_recipe('lr_half')}"
    )
    weight_decay: float = option(1e-4, "weight decay")
    loss: str = option(
        "nt-xent", f"of the projections of two views: {', '.join((*LOSSES, KINDS['loss'].form))}?option=value"
    )
    temperature: float | None = option(None, f"of the loss {by_recipe('temperature')}")
    views: str = option("strong", f"what makes the views: {', '.join((*VIEWS, KINDS['views'].form))}?option=value")
    positives: str | None = option(
        None,
        "contrast two views of one frame (views), or of two neighbouring ones (time), unless the images were shuffled "
        + by_recipe("positives"),
    )
    train: str | None = option(
        None, f"which parts of the encoder learn: all, norms, or its last N stages {by_recipe('train')}"
    )
    crop: float | None = option(None, f"smallest share of the image in a view {by_recipe('crop')}")
    flip: str | None = option(None, f"mirror half of the views: on or off {by_recipe('flip')}")
    side: float | None = option(None, f"side of a view, as a share of the image's {by_recipe('side')}")
    seed: int = option(0, "of the stream, the weights, the views and the draws")


@dataclass(frozen=True)
class LearnerOptions(ModelOptions, BufferOptions):
    """A learner on this machine, but for its policy."""

    rescore_every: int | None = option(None, "lazy scoring: score an image in the buffer again every T steps [1]")
    fresh: float | None = option(
        None, f"share of the buffer that the policy contrast replaces in a step at least {by_recipe('fresh')}"
    )
    weak_view: str = option(
        "flip", f"of the contrast score: {', '.join((*WEAK_VIEWS, KINDS['weak_view'].form))}?option=value"
    )
    updates: int = option(1, "updates of the model in one step")
    reach: int | None = option(None, "frames between two neighbours at most [a second's, up to 30]")
    precision: str = option(
        "fp32", "of the encoder's arithmetic in training: fp32, or bf16, which is faster on a GPU and on some CPUs"
    )
    kept_views: int = option(
        0,
        "views of each image that are made once and kept in the buffer, behind the stages that do not learn: an update "
        "takes a fraction of the time, and fewer images fit in [0: drawn anew for each update]",
    )
    compile: bool = option(False, "compile the model: pays on long runs of narrow encoders, needs a C++ compiler")
    device: str | None = option(None, "cpu or cuda [a GPU if there is one]")


@dataclass(frozen=True)
class EvaluationOptions:
    """What is measured with the labels of a dataset."""

    fractions: str = option("0.01,0.1,1", "label fractions for the classifier")
    classifier: str = option(
        "auto",
        "linear (a layer on the frozen encoder), finetuned (the encoder is trained too), selftrained (so again, with "
        "what it is sure of in other tracks), auto (the best on labels held back), or paper (linear, the paper's Adam)",
    )
    spread: str = option(
        "on", "let a label count for the other frames of its track, where the source knows tracks: on or off"
    )
    probes: int | None = option(
        None,
        "points of the learning curve: kNN accuracy on up to 5,000 labels while learning [10, fewer where they would "
        "take more than a tenth of the time]",
    )
    supervised: bool = option(False, "also train the supervised baselines on the same labels")

    @property
    def label_fractions(self) -> tuple[float, ...]:
        return tuple(opts.convert(part.strip(), float, "a label fraction") for part in self.fractions.split(","))


@dataclass(frozen=True)
class LabellingOptions:
    """What a person is asked."""

    label_budget: str | None = option(
        None,
        "keep images to ask a person about: as many as 500, 1% of the stream (of one pass, if it has passes; at least "
        f"{MIN_ASKED}), or off [{N_ASKED} of a stream without labels, else off]",
    )
    label_disk: str = option("64M", "the most disk space for images to ask about")


@dataclass(frozen=True)
class KeepingOptions:
    """Where a run is kept, and when it is saved."""

    out: str | None = option(None, "the run directory, new or with this run unfinished in it [runs/SOURCE-POLICY]")
    checkpoint_minutes: float = option(
        10, "minutes between two checkpoints, more if they are large; 0: only at the end and when stopped"
    )
    checkpoint_steps: int | None = option(None, "also save a checkpoint every N steps")
    log_disk: str = option(
        USUAL_LIMIT, "the most disk space for each of journal, events and predictions; beyond it old lines are thinned"
    )


@dataclass(frozen=True)
class PaceOptions:
    """How much of the machine a run takes."""

    duty: str = option("100%", "share of the time in which to learn, as in 50%; capture goes on meanwhile")
    decoders: int | None = option(
        None,
        "processes that decode image files ahead of the step; 0: the run's own does [with a GPU one for each other "
        "core, up to 16; else 0]",
    )

    @property
    def duty_share(self) -> float:
        share = opts.convert(self.duty.strip().removesuffix("%"), float, "--duty")
        share /= 100 if self.duty.strip().endswith("%") else 1
        if not 0 < share <= 1:
            raise UserError(f"duty is {self.duty}: use more than 0% and up to 100%")
        return share


USUAL_HOST = "127.0.0.1"


@dataclass(frozen=True)
class ListenOptions:
    """Where the pages are served."""

    host: str = option(USUAL_HOST, "the address to serve the pages on; 0.0.0.0 lets other machines open them")
    port: int | None = option(
        None, "the port to serve the pages on; 0 picks any free one [8765, or any free one if that is taken]"
    )


@dataclass(frozen=True)
class ServingOptions(ListenOptions):
    """What a run shows or answers while it learns."""

    predict: bool = option(
        False, "also classify each frame as it comes, with the newest good head: predictions.jsonl in the run"
    )
    serve: bool = option(False, "open the dashboard for this run while it learns, and say where")
    metrics: int | None = option(
        None, "serve Prometheus metrics on this port of 127.0.0.1; 0 takes a free one and says which"
    )


# The fields of the last base come first, in `--help` too.
@dataclass(frozen=True)
class RunOptions(
    PaceOptions,
    EvaluationOptions,
    LearnerOptions,
    PolicyOptions,
    AnswerOptions,
    ServingOptions,
    LabellingOptions,
    KeepingOptions,
    LengthOptions,
    StreamOptions,
):
    """Learn from a stream, then train and test a classifier on few labels."""

    resume: bool = option(
        False, "go on with the newest unfinished run of these options [without: only if --out is one]"
    )
    norm_over: str = option("all", "under torchrun, BatchNorm over the images of all ranks, or of each rank's own")


def as_run(options: Any, **changes: Any) -> RunOptions:
    """The run that a command with some of these groups asks for, other options at their defaults."""
    names = [field.name for field in dataclasses.fields(RunOptions) if hasattr(options, field.name)]
    return RunOptions(**{name: getattr(options, name) for name in names} | changes)
