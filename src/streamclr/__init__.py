"""StreamCLR: visual representations from an unlabelled stream, in a small buffer of the images that teach the most."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamclr.buffer import Buffer
    from streamclr.card import Card
    from streamclr.encoder import resnet18, resnet34, resnet50
    from streamclr.errors import UserError
    from streamclr.guard import Guarded
    from streamclr.learner import Learner, Step
    from streamclr.loss import nt_xent
    from streamclr.policy import (
        ContrastScoring,
        FIFOReplace,
        KCenter,
        RandomReplace,
        Reservoir,
        SelectiveBackprop,
    )
    from streamclr.pretrained import Pretrained, from_pretrained, save_pretrained
    from streamclr.score import contrast_score
    from streamclr.stream import open_stream
    from streamclr.views import StrongViews

__all__ = [
    "Buffer",
    "Card",
    "ContrastScoring",
    "FIFOReplace",
    "Guarded",
    "KCenter",
    "Learner",
    "Pretrained",
    "RandomReplace",
    "Reservoir",
    "SelectiveBackprop",
    "Step",
    "StrongViews",
    "UserError",
    "contrast_score",
    "from_pretrained",
    "nt_xent",
    "open_stream",
    "resnet18",
    "resnet34",
    "resnet50",
    "save_pretrained",
]

_MODULES = (
    "buffer",
    "encoder",
    "errors",
    "guard",
    "learner",
    "loss",
    "policy",
    "score",
    "stream",
    "views",
    "pretrained",
)


def __getattr__(name: str) -> Any:
    """Imported when asked for: a capture process has no use for torch."""
    if name in __all__:
        for module in map(import_module, (f"{__name__}.{module}" for module in _MODULES)):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
