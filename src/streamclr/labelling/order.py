"""Which images to ask a person about: each shortens the way from every image to the nearest asked one the most."""

import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import checked_seed

N_MOST = 8192  # rows, of which all distances are kept, 256 MiB; of more, a uniform draw of as many is asked about first
N_AT_ONCE = 16  # rows whose gains are brought up to date together


def asking_order(features: Tensor, n: int, seed: int = 0, known: Tensor | None = None) -> Tensor:
    """The `n` rows to ask about, in the order in which to ask: any first part of it is spread over feature space.

    It does not depend on `n`. Greedy facility location: the next row is the one that reduces the sum of all rows'
    distances to their nearest asked row the most, so that a dense region is asked about first, and again only when
    others are farther from an answer. What is measured is the angle between rows: see docs/log.md for what else was
    tried.
    known: a mask of rows that are asked about already; they come first, and the others where these leave something.
    """
    features = features.detach().cpu().float()
    if features.ndim != 2 or not features.isfinite().all():
        raise UserError(f"features of shape {tuple(features.shape)}: use finite numbers, a row for each image")
    if not 0 <= n <= len(features):
        raise UserError(f"{n} images to ask about: use 0 to {len(features)}, of which there are features")
    generator = torch.Generator().manual_seed(checked_seed(seed))
    # In a drawn order, so that among equals, as duplicates are, the seed decides and not who came first.
    drawn = torch.randperm(len(features), generator=generator)
    n_known = 0
    if known is not None:
        drawn = drawn[known[drawn].logical_not().long().argsort(stable=True)]
        n_known = min(int(known.sum()), n, N_MOST)
    # If all could be asked about while these alone count, rows that happen to lie near one of these would be preferred.
    few = min(n, N_MOST)
    first = _greedy(_directions(features[drawn[:N_MOST]]), few, n_known)
    return torch.cat([drawn[first], drawn[N_MOST:][: n - few]])


def _directions(features: Tensor) -> Tensor:
    """Rows standardised, then of length 1; seen from the mean, direction tells classes apart and length does not."""
    if not features.numel():
        return features
    features = features / features.abs().amax(0).clamp(min=1e-30)  # the square of a large number is infinite
    spread = features.std(0, correction=0)
    varies = spread > 1e-6  # what is constant but for rounding would count as much as any other
    return F.normalize((features - features.mean(0))[:, varies] / spread[varies], dim=1)


def _greedy(x: Tensor, n: int, n_known: int) -> Tensor:
    """`n` rows of x in the order of their gains, each given those before it; the first `n_known` as they are."""
    lengths = x.square().sum(1)  # 1, and 0 of a row that is the mean itself
    distance = torch.addmm(lengths, x, x.T, alpha=-2).add_(lengths[:, None])
    torch.threshold_(distance, 1e-5, 0.0).sqrt_()  # rounding would leave duplicates apart, with something to be gained
    nearest = torch.full((len(x),), 2.0)  # no two directions are farther apart
    if n_known:
        nearest = distance[:n_known].amin(0)
    gain = torch.cat([(nearest - some).clamp_(min=0).sum(1) for some in distance.split(256)]).double()
    chosen = torch.arange(n)
    asked = torch.zeros(len(x), dtype=torch.bool)
    asked[:n_known], gain[:n_known] = True, -1
    for i in range(n_known, n):
        # Gains only shrink as more is asked, so an old gain is an upper bound, and few rows need a new one: the search
        # ends when the best of the new gains is not below any old one (Minoux 1978).
        while True:
            best = gain.topk(min(N_AT_ONCE, len(gain))).indices
            best = best[~asked[best]]
            gain[best] = (nearest - distance[best]).clamp_(min=0).sum(1).double()
            index = best[gain[best].argmax()]
            if gain[index] >= gain.max():
                break
        if gain[index] <= 0:  # every distinct row is asked: the rest as they come
            chosen[i:] = (~asked).nonzero()[: n - i, 0]
            break
        chosen[i], asked[index], gain[index] = index, True, -1
        nearest = torch.minimum(nearest, distance[index])
    return chosen
