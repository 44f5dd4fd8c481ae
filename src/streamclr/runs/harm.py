"""Do no harm: whether an adapted encoder still tells the frames of its stream apart as well as the public one did."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.encoders.inference import infer, infer_views
from streamclr.encoders.projection import ContrastiveModel
from streamclr.views import StrongViews

MAX_IMAGES = 512
MIN_RANK_SHARE = 0.25  # of the public encoder's rank: below it the features have collapsed
VIEWS = StrongViews((0.5, 1.0), strength=0.25, grey=0.0, blur=0.0, flip=False)  # mild: what a moving camera does


def compare_encoders(
    public: ContrastiveModel, adapted: ContrastiveModel, images: Tensor, neighbours: Tensor, seed: int = 0
) -> dict[str, Any]:
    """Whether to use the adapted encoder, and why; for results.json.

    Each frame has to find a mild view of its neighbour among those of all frames, by the angle between features. The
    adapted encoder is used unless it finds fewer, by more than chance explains (two standard errors of the difference,
    on the same frames), or the features have lost most of their rank.

    images, neighbours: uint8 frames of the stream, n x 3 x H x W each; a frame without a neighbour is its own.
    """
    rows = torch.linspace(0, len(images) - 1, min(MAX_IMAGES, len(images))).long()
    images, neighbours = images[rows].cpu(), neighbours[rows].cpu()
    views = VIEWS(neighbours, torch.Generator().manual_seed(seed))
    found, ranks = [], []
    for model in (public, adapted):
        one = infer(model, images, model.features).cpu()
        other = infer_views(model, views, model.features).cpu()
        mean = torch.cat([one, other]).mean(0)
        similarity = F.normalize(one - mean, dim=1) @ F.normalize(other - mean, dim=1).T
        found.append(similarity.argmax(1) == torch.arange(len(one)))
        ranks.append(effective_rank(one))
    difference = found[1].double() - found[0].double()
    error = float(difference.std(correction=0)) / len(difference) ** 0.5
    is_worse = float(difference.mean()) < -2 * error
    has_collapsed = ranks[1] < MIN_RANK_SHARE * ranks[0] or not ranks[1] > 0  # NaN is a collapse, too
    shares = [float(one.double().mean()) for one in found]
    told = f"it finds the neighbours of {shares[1]:.0%} of the frames, the public one of {shares[0]:.0%}"
    rank = f"the rank of its features is {ranks[1]:.0f}, of the public one's {ranks[0]:.0f}"
    return {
        "used": "public" if is_worse or has_collapsed else "adapted",
        "why": f"{told}; {rank}",
        "found": shares,
        "rank": ranks,
        "n_frames": len(images),
    }


def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the singular values' shares (Roy and Vetterli 2007), of the centred features."""
    values = torch.linalg.svdvals((features - features.mean(0)).double())
    shares = values / values.sum()
    return float((-(shares * shares.clamp(min=1e-12).log()).sum()).exp())
