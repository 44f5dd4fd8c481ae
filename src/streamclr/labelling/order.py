"""Which images to ask a person about, by greedy k-median (facility location): each next one most reduces the sum of the
distances from all images to the nearest one asked about."""

import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import checked_seed

MAX_ROWS = 8192  # all pairwise distances take 256 MiB; of more rows, a uniform sample is used first
N_AT_ONCE = 16  # rows whose gains are updated together


def asking_order(features: Tensor, n: int, seed: int = 0, known: Tensor | None = None) -> Tensor:
    """The `n` rows to ask about, in order; every prefix is spread over feature space.

    It does not depend on `n`. A dense region is asked about first, and again only when others are farther from an
    answer. What is measured is the angle between rows: see docs/log.md for what else was tried.
    known: a mask of rows that are asked about already; they come first, and the others where these leave something.
    """
    features = features.detach().cpu().float()
    if features.ndim != 2 or not features.isfinite().all():
        raise UserError(f"features have shape {tuple(features.shape)}: use one row of finite numbers per image")
    if not 0 <= n <= len(features):
        raise UserError(f"n is {n}: use 0 to {len(features)}, the number of images with features")
    generator = torch.Generator().manual_seed(checked_seed(seed))
    # Shuffled, so that the seed decides among equal rows such as duplicates, not their position.
    drawn = torch.randperm(len(features), generator=generator)
    n_known = 0
    if known is not None:
        drawn = drawn[known[drawn].logical_not().long().argsort(stable=True)]
        n_known = min(int(known.sum()), n, MAX_ROWS)
    # Only sampled rows may be asked: others would be preferred just because they lie near a sampled one.
    few = min(n, MAX_ROWS)
    first = _greedy(directions(features[drawn[:MAX_ROWS]]), few, n_known)
    return torch.cat([drawn[first], drawn[MAX_ROWS:][: n - few]])


def directions(features: Tensor) -> Tensor:
    """Rows standardised, then scaled to length 1: relative to the mean, classes differ in direction, not in length."""
    if not features.numel():
        return features
    features = features / features.abs().amax(0).clamp(min=1e-30)  # against overflow of the squares
    spread = features.std(0, correction=0)
    varies = spread > 1e-6  # standardising would turn the rounding noise of a constant column into a feature
    return F.normalize((features - features.mean(0))[:, varies] / spread[varies], dim=1)


def _greedy(x: Tensor, n: int, n_known: int) -> Tensor:
    """Greedy choice of `n` rows of x by their gain given those before; the first `n_known` rows are fixed."""
    lengths = x.square().sum(1)  # 1, or 0 for a row equal to the mean
    distance = torch.addmm(lengths, x, x.T, alpha=-2).add_(lengths[:, None])
    torch.threshold_(distance, 1e-5, 0.0).sqrt_()  # duplicates get distance 0 despite rounding
    nearest = torch.full((len(x),), 2.0)  # the largest distance of two unit vectors
    if n_known:
        nearest = distance[:n_known].amin(0)
    gain = torch.cat([(nearest - some).clamp_(min=0).sum(1) for some in distance.split(256)]).double()
    chosen = torch.arange(n)
    asked = torch.zeros(len(x), dtype=torch.bool)
    asked[:n_known], gain[:n_known] = True, -1
    for i in range(n_known, n):
        # Lazy greedy (Minoux 1978): gains only shrink, so an old gain is an upper bound; stop when the best updated
        # gain is not below any old one.
        while True:
            best = gain.topk(min(N_AT_ONCE, len(gain))).indices
            best = best[~asked[best]]
            gain[best] = (nearest - distance[best]).clamp_(min=0).sum(1).double()
            index = best[gain[best].argmax()]
            if gain[index] >= gain.max():
                break
        if gain[index] <= 0:  # every distinct row is chosen: the rest in any order
            chosen[i:] = (~asked).nonzero()[: n - i, 0]
            break
        chosen[i], asked[index], gain[index] = index, True, -1
        nearest = torch.minimum(nearest, distance[index])
    return chosen
