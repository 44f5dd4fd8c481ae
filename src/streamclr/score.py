"""The contrast score (Sec. III-B)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.compute.fast_scoring import projection
from streamclr.encoders.inference import check_stored, inference_mode, map_chunks
from streamclr.views import WeakView, flip


def contrast_score(
    model: nn.Module, images: Tensor, precision: str = "fp32", weak_view: WeakView | None = None
) -> Tensor:
    """S(x) = 1 - z(x)·z(x+) in [0, 2] for stored uint8 images (Eq. 2): high where the encoder has yet to learn.

    Deterministic: it depends on the image and the model only; in int8 also, slightly, on the other images.

    precision: `fp32` is exact; `int8` and `half` are faster (see compute/fast_scoring.py).
    weak_view: x to x+; default: the model's own, else the flip.

    >>> import torch
    >>> from streamclr import Learner, contrast_score, resnet18
    >>> learner = Learner(resnet18(width=4), buffer=8)
    >>> left = torch.randint(256, (4, 3, 16, 8), dtype=torch.uint8)
    >>> images = torch.cat([left, left.flip(-1)], dim=-1)  # each is its own mirror image
    >>> bool((contrast_score(learner.model, images) < 1e-6).all())
    True
    """
    check_stored(images)
    weak = weak_view or getattr(model, "weak_view", None) or flip
    with inference_mode(model):
        project = projection(model, images, precision)

        def score(x: Tensor) -> Tensor:
            z0, z1 = F.normalize(project(torch.cat([x, _checked(weak(x), x)])), dim=1).chunk(2)
            return (z0 - z1).square().sum(1) / 2  # = 1 - z0·z1 for unit vectors, without its cancellation near 0

        return map_chunks(model, images, score).clamp_(max=2)


def _checked(weak: Tensor, images: Tensor) -> Tensor:
    if not isinstance(weak, Tensor) or (weak.shape, weak.dtype) != (images.shape, images.dtype):
        what = f"{weak.dtype} of shape {tuple(weak.shape)}" if isinstance(weak, Tensor) else f"a {type(weak).__name__}"
        raise UserError(f"the weak view is {what}: return {images.dtype} of the images' shape {tuple(images.shape)}")
    return weak


def stand_ins(images: Tensor, tolerance: float) -> Tensor:
    """For each frame of a sequence the index of the frame whose score it takes: its own, or an earlier, equal one's.

    A frame is compared with the one that stands in for its predecessor, so that a slow change is not missed.

    tolerance: mean absolute difference of two equal frames' pixels, of 255.
    """
    stand_in = torch.arange(len(images), device=images.device)
    few = max(1, 2**20 // images.shape[1:].numel())  # images at a time, to save memory
    pairs = zip(images[1:].split(few), images[:-1].split(few), strict=True)
    near = [flag for new, before in pairs for flag in (_difference(new, before) <= tolerance).tolist()]
    for i in range(1, len(images)):
        if near[i - 1]:  # rare in a dataset, usual for a camera
            first = stand_in[i - 1]
            if _difference(images[i : i + 1], images[first][None]) <= tolerance:
                stand_in[i] = first
    return stand_in


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of the pixels of each image."""
    return (a.short() - b.short()).abs().flatten(1).float().mean(1)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's; NaN where one of them does not vary."""
    ranks = [x.argsort().argsort().double() if x.std() > 0 else torch.zeros(len(x)).double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
