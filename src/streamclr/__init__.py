"""StreamCLR: visual representations from an unlabelled stream, in a small buffer of the images that teach the most."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # under their own names, so that a type checker takes them for exported
    from streamclr.base.errors import UserError as UserError
    from streamclr.buffer import Buffer as Buffer
    from streamclr.buffer import Pool as Pool
    from streamclr.classifier import Accuracy as Accuracy
    from streamclr.classifier import Head as Head
    from streamclr.classifier import draw_labelled as draw_labelled
    from streamclr.classifier import knn_probe as knn_probe
    from streamclr.classifier import linear_probe as linear_probe
    from streamclr.classifier import train_head as train_head
    from streamclr.encoders.compact import compact as compact
    from streamclr.encoders.mobilenet import mobilenet_v2 as mobilenet_v2
    from streamclr.encoders.projection import FeatureExtractor as FeatureExtractor
    from streamclr.encoders.resnet import resnet18 as resnet18
    from streamclr.encoders.resnet import resnet34 as resnet34
    from streamclr.encoders.resnet import resnet50 as resnet50
    from streamclr.guards import Guarded as Guarded
    from streamclr.learner import Learner as Learner
    from streamclr.linear import fit_linear as fit_linear
    from streamclr.loss import BYOL as BYOL
    from streamclr.loss import Loss as Loss
    from streamclr.loss import TargetNetwork as TargetNetwork
    from streamclr.loss import barlow_twins as barlow_twins
    from streamclr.loss import nt_xent as nt_xent
    from streamclr.loss import vicreg as vicreg
    from streamclr.models.card import Card as Card
    from streamclr.models.pretrained import Pretrained as Pretrained
    from streamclr.models.pretrained import from_pretrained as from_pretrained
    from streamclr.models.pretrained import save_pretrained as save_pretrained
    from streamclr.peers.alignment import CLA as CLA
    from streamclr.peers.min_red import MinRed as MinRed
    from streamclr.peers.scale import SCALE as SCALE
    from streamclr.policy import ContrastScoring as ContrastScoring
    from streamclr.policy import FIFOReplace as FIFOReplace
    from streamclr.policy import KCenter as KCenter
    from streamclr.policy import Mixture as Mixture
    from streamclr.policy import Policy as Policy
    from streamclr.policy import RandomReplace as RandomReplace
    from streamclr.policy import Reservoir as Reservoir
    from streamclr.policy import ScoredReservoir as ScoredReservoir
    from streamclr.policy import SelectiveBackprop as SelectiveBackprop
    from streamclr.runs.evaluation import evaluate as evaluate
    from streamclr.score import contrast_score as contrast_score
    from streamclr.stage_two import choose_classifier as choose_classifier
    from streamclr.stage_two import features_of as features_of
    from streamclr.stage_two import fine_tune as fine_tune
    from streamclr.step import Step as Step
    from streamclr.streams.datasets.images import ArrayImages as ArrayImages
    from streamclr.streams.datasets.images import Source as Source
    from streamclr.streams.stream import open_stream as open_stream
    from streamclr.views import StrongViews as StrongViews

_MODULES = {
    "base.errors": ["UserError"],
    "buffer": ["Buffer", "Pool"],
    "classifier": ["Accuracy", "Head", "draw_labelled", "knn_probe", "linear_probe", "train_head"],
    "encoders.compact": ["compact"],
    "encoders.mobilenet": ["mobilenet_v2"],
    "encoders.projection": ["FeatureExtractor"],
    "encoders.resnet": ["resnet18", "resnet34", "resnet50"],
    "guards": ["Guarded"],
    "learner": ["Learner"],
    "linear": ["fit_linear"],
    "loss": ["BYOL", "Loss", "TargetNetwork", "barlow_twins", "nt_xent", "vicreg"],
    "models.card": ["Card"],
    "models.pretrained": ["Pretrained", "from_pretrained", "save_pretrained"],
    "peers.alignment": ["CLA"],
    "peers.min_red": ["MinRed"],
    "peers.scale": ["SCALE"],
    "policy": [
        "ContrastScoring",
        "FIFOReplace",
        "KCenter",
        "Mixture",
        "Policy",
        "RandomReplace",
        "Reservoir",
        "ScoredReservoir",
        "SelectiveBackprop",
    ],
    "runs.evaluation": ["evaluate"],
    "score": ["contrast_score"],
    "stage_two": ["choose_classifier", "features_of", "fine_tune"],
    "step": ["Step"],
    "streams.datasets.images": ["ArrayImages", "Source"],
    "streams.stream": ["open_stream"],
    "views": ["StrongViews"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import on first use: a capture process must not load torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
