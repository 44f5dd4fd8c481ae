"""StreamCLR: visual representations from an unlabelled stream, in a small buffer of the images that teach the most."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamclr.base.errors import UserError
    from streamclr.buffer import Buffer
    from streamclr.classifier import Accuracy, Head, draw_labelled, knn_probe, linear_probe, train_head
    from streamclr.encoders.compact import compact
    from streamclr.encoders.mobilenet import mobilenet_v2
    from streamclr.encoders.projection import FeatureExtractor
    from streamclr.encoders.resnet import resnet18, resnet34, resnet50
    from streamclr.guards import Guarded
    from streamclr.learner import Learner, Step
    from streamclr.loss import BYOL, Loss, TargetNetwork, barlow_twins, nt_xent, vicreg
    from streamclr.models.card import Card
    from streamclr.models.pretrained import Pretrained, from_pretrained, save_pretrained
    from streamclr.policy import (
        ContrastScoring,
        FIFOReplace,
        KCenter,
        MinRed,
        Mixture,
        RandomReplace,
        Reservoir,
        ScoredReservoir,
        SelectiveBackprop,
    )
    from streamclr.runs.evaluation import evaluate
    from streamclr.score import contrast_score
    from streamclr.stage_two import choose_classifier, features_of, fine_tune, fit_linear
    from streamclr.streams.datasets.images import ArrayImages, Source
    from streamclr.streams.stream import open_stream
    from streamclr.views import StrongViews

_MODULES = {
    "base.errors": ["UserError"],
    "buffer": ["Buffer"],
    "classifier": ["Accuracy", "Head", "draw_labelled", "knn_probe", "linear_probe", "train_head"],
    "encoders.compact": ["compact"],
    "encoders.mobilenet": ["mobilenet_v2"],
    "encoders.projection": ["FeatureExtractor"],
    "encoders.resnet": ["resnet18", "resnet34", "resnet50"],
    "guards": ["Guarded"],
    "learner": ["Learner", "Step"],
    "loss": ["BYOL", "Loss", "TargetNetwork", "barlow_twins", "nt_xent", "vicreg"],
    "models.card": ["Card"],
    "models.pretrained": ["Pretrained", "from_pretrained", "save_pretrained"],
    "policy": [
        "ContrastScoring",
        "FIFOReplace",
        "KCenter",
        "MinRed",
        "Mixture",
        "RandomReplace",
        "Reservoir",
        "ScoredReservoir",
        "SelectiveBackprop",
    ],
    "runs.evaluation": ["evaluate"],
    "score": ["contrast_score"],
    "stage_two": ["choose_classifier", "features_of", "fine_tune", "fit_linear"],
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
