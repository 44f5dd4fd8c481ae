"""The options of a run, and what is made from them: encoder, policy, learner."""

from dataclasses import dataclass

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.options import option
from streamclr.encoders.resnet import ENCODERS
from streamclr.guards import GUARDS
from streamclr.policy import POLICIES


@dataclass(frozen=True)
class RunOptions:
    """Learn from a stream, then train and test a classifier on few labels."""

    source: str = option("synthetic:", "where the images come from, as in cifar10?stc=500 or folder:DIR")
    policy: str = option("contrast", f"which images stay in the buffer: {', '.join(POLICIES)}")
    images: int | None = option(None, "how many images of the stream to learn from [of a camera, until it is stopped]")
    epochs: float | None = option(None, "the same in passes over the dataset [1, where there is one]")
    stc: int | None = option(None, "consecutive images of one class [the source's own]")
    size: int | None = option(None, "side of the images in pixels [the source's own]")
    buffer: int = option(256, "images in the buffer")
    batch: int | None = option(None, "images in one update, drawn from the buffer [all of it]")
    segment: int | None = option(None, "new images in one step [as many as the buffer holds]")
    rescore_every: int | None = option(None, "lazy scoring: score an image in the buffer again every T steps [1]")
    guards: str = option(
        "auto",
        f"against frames that lie: on, off, or some of {', '.join(GUARDS)} with commas [on where the source is live]",
    )
    updates: int = option(1, "updates of the model in one step")
    encoder: str = option("resnet18", f"the base encoder: {', '.join(ENCODERS)}")
    width: int = option(64, "channels of the encoder's first stage")
    stem: str | None = option(
        None, "small (3x3), half (the same, stride 2) or imagenet (7x7 and max-pool) [small below 64 px]"
    )
    norm: str = option("batch", "batch or group")
    norm_over: str = option("all", "under torchrun, BatchNorm over the images of all ranks, or of each rank's own")
    init: str | None = option(
        None,
        "start from these encoder weights (.safetensors, torchvision's names), or this directory with a whole model",
    )
    lr: float = option(1e-4, "learning rate of Adam")
    weight_decay: float = option(1e-4, "weight decay of Adam")
    temperature: float = option(0.5, "of the contrastive loss")
    memory: str | None = option(
        None, "what the process may take while learning, as in 600M or 1.5G [as much as it takes]"
    )
    compile: bool = option(False, "compile the model: pays on long runs of narrow encoders, needs a C++ compiler")
    fractions: str = option("0.01,0.1,1", "label fractions for the classifier")
    label_budget: str | None = option(
        None, "keep images to ask a person about, as many as 500, or 1% of the stream (of one pass, if it has passes)"
    )
    label_disk: str = option("64M", "what the candidates for these questions may take on the disk")
    probes: int = option(10, "points of the learning curve: kNN accuracy on up to 5,000 labels while learning")
    supervised: bool = option(False, "also train the supervised baselines on the same labels")
    checkpoint_minutes: float = option(
        10, "minutes between two checkpoints, more if they are large; 0: only at the end and when stopped"
    )
    checkpoint_steps: int | None = option(None, "a checkpoint every so many steps too")
    predict: bool = option(
        False, "also classify each frame as it comes, with the newest good head: predictions.jsonl in the run"
    )
    resume: bool = option(
        False, "go on with the newest unfinished run of these options [without: only if --out is one]"
    )
    duty: str = option("100%", "share of the time in which to learn, as in 50%; capture goes on meanwhile")
    seed: int = option(0, "of the stream, the weights, the views and the draws")
    device: str | None = option(None, "cpu or cuda [a GPU if there is one]")
    out: str | None = option(None, "the run directory, new or with this run unfinished in it [runs/SOURCE-POLICY]")
    metrics: int | None = option(
        None, "serve Prometheus metrics on this port of 127.0.0.1; 0 takes a free one and says which"
    )
    serve: bool = option(False, "open the dashboard for this run while it learns, and say where")

    @property
    def label_fractions(self) -> tuple[float, ...]:
        return tuple(opts.convert(part.strip(), float, "a label fraction") for part in self.fractions.split(","))

    @property
    def duty_share(self) -> float:
        share = opts.convert(self.duty.strip().removesuffix("%"), float, "--duty")
        share /= 100 if self.duty.strip().endswith("%") else 1
        if not 0 < share <= 1:
            raise UserError(f"duty is {self.duty}: use more than 0% and up to 100%")
        return share
