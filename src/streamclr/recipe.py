"""Recipes: everything about training that is not the method but its setting. docs/log.md tells how they were found."""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from streamclr.base import plugins
from streamclr.base.errors import UserError
from streamclr.base.options import one_of
from streamclr.compute.adam import Adam
from streamclr.compute.muon import Muon
from streamclr.encoders.inference import holds_generator
from streamclr.loss import BYOL, Loss, barlow_twins, nt_xent, vicreg
from streamclr.peers.alignment import CLA
from streamclr.peers.orthogonal import OrthogonalAdam
from streamclr.views import Views, build_views


@dataclass(frozen=True)
class Recipe:
    """How an encoder is trained. The names of the fields are those of the options of a run."""

    policy: str
    fresh: float  # share of the buffer that is replaced in a step at least, where scores decide
    buffer: int | str  # images, or bytes as "48M"
    batch: int | None  # images of one update, no more than the buffer holds; None: all that it holds
    segment: int | None  # new images of one step; None: as many as the buffer holds
    optimizer: str
    lr: float
    lr_half: int  # steps after which the learning rate has fallen to half; 0: it is constant
    temperature: float
    projection: str
    positives: str  # two views of one frame, "views", or of two neighbouring ones, "time"
    train: str  # which parts of the encoder learn, see `set_trained`
    crop: float  # smallest share of the image in a view
    flip: str  # mirror half of the views, "on", or none, "off"
    side: float  # of a view, as a share of the image's side

    @property
    def views(self) -> Views:
        return build_views("strong", self.crop, self.flip, self.side)

    def as_options(self) -> dict[str, Any]:
        return asdict(self)


# The paper's to the letter.
PAPER = Recipe(
    policy="contrast",
    fresh=0.0,
    buffer=256,
    batch=None,
    segment=None,
    optimizer="adam",
    lr=1e-4,
    lr_half=0,
    temperature=0.5,
    projection="plain",
    positives="views",
    train="all",
    crop=0.2,
    flip="on",
    side=1.0,
)
# On a device, for an encoder that learns from scratch.
SCRATCH = Recipe(
    policy="reservoir?horizon=10",
    fresh=0.02,
    buffer="10M",
    batch=64,
    segment=64,
    optimizer="muon",
    lr=0.04,
    lr_half=3000,
    temperature=0.2,
    projection="batchnorm",
    positives="time",
    train="all",
    crop=0.2,
    flip="on",
    side=0.75,
)
# On a device, for a public encoder that is adapted to what a camera sees.
ADAPT = Recipe(
    policy="reservoir",
    fresh=0.02,
    buffer="48M",
    batch=64,
    segment=64,
    optimizer="adam",
    lr=3e-4,
    lr_half=0,
    temperature=0.2,
    projection="batchnorm",
    positives="time",
    train="3",
    crop=0.2,
    flip="off",
    side=1.0,
)
RECIPES = ("device", "paper")
POSITIVES = ("views", "time")
OPTIMIZERS: dict[str, type[Adam]] = {"adam": Adam, "muon": Muon, "orthogonal-adam": OrthogonalAdam}
LOSSES: dict[str, Callable[..., Any]] = {
    "nt-xent": nt_xent,
    "vicreg": vicreg,
    "barlow-twins": barlow_twins,
    "byol": BYOL,
    "cla": CLA,
}
BATCH_SIZE = 64  # of a recipe that takes the whole buffer, where that is given in bytes


def find_recipe(name: str, is_public: bool) -> Recipe:
    """is_public: the encoder has learned from images before."""
    if name not in RECIPES:
        raise UserError(f"no recipe {name!r}: {one_of(name, RECIPES)}")
    return PAPER if name == "paper" else ADAPT if is_public else SCRATCH


def usual_lr(usual: Recipe, optimizer: str | None, lr: float | None) -> tuple[str, float]:
    """Optimizer and learning rate, which go together: that of Muon is a hundred times Adam's."""
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise UserError(f"no optimizer {optimizer!r}: {one_of(optimizer, OPTIMIZERS)}")
    if lr is None and optimizer not in (None, usual.optimizer):
        raise UserError(f"the optimizer is {optimizer}, and the recipe's lr is for {usual.optimizer}: give lr too")
    return optimizer or usual.optimizer, usual.lr if lr is None else lr


def usual_batch(batch: int | None, buffer: int | str) -> int:
    """How many images an update takes unless it is told. batch, buffer: of the recipe, or as given."""
    if isinstance(buffer, str):
        return batch or BATCH_SIZE
    return buffer if batch is None else min(batch, buffer)


def build_loss(loss: str | Callable[..., Tensor], temperature: float | None = None) -> Loss:
    """The loss `name?option=value`, built in or of a researcher, or any function of z0 and z1.

    temperature: of a loss by name, if it takes one.
    """
    made = plugins.make("loss", loss, LOSSES, temperature=temperature) if isinstance(loss, str) else loss
    if inspect.isclass(made) or not callable(made):
        raise UserError(f"loss is {made!r}: give {plugins.KINDS['loss'].is_a}, as BYOL()")
    if not isinstance(made, nn.Module) and (hasattr(made, "state_dict") or holds_generator(made)):
        raise UserError(f"the loss {type(made).__name__} has a state that would not be saved: derive it from Loss")
    return made if isinstance(made, Loss) else Loss(made)
