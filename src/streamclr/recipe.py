"""Recipes: everything about training that is not the method but its setting. docs/log.md tells how they were found."""

from dataclasses import asdict, dataclass
from typing import Any

from streamclr.base.errors import UserError
from streamclr.base.options import one_of
from streamclr.views import StrongViews


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
    def views(self) -> StrongViews:
        return StrongViews((self.crop, 1.0), flip=self.flip == "on", side=self.side)

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


def find_recipe(name: str, is_public: bool) -> Recipe:
    """is_public: the encoder has learned from images before."""
    if name not in RECIPES:
        raise UserError(f"no recipe {name!r}: {one_of(name, RECIPES)}")
    return PAPER if name == "paper" else ADAPT if is_public else SCRATCH
