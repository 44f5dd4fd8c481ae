"""MinRed: a buffer of images that say different things."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.options import shown
from streamclr.buffer import Pool
from streamclr.encoders.inference import infer


class MinRed:
    """Keep images that differ: of the two most alike in feature space the older one goes (Purushwalkam et al. 2022, the
    minimum redundancy buffer).

    Features are computed once, when an image arrives: the encoder changes slowly, so that they stay comparable.

    >>> import torch
    >>> from streamclr import Learner, MinRed, resnet18
    >>> learner = Learner(resnet18(width=4), MinRed(), buffer=4)
    >>> images = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8).repeat_interleave(2, dim=0)  # each of four twice
    >>> step = learner.learn_many(images)
    >>> sorted(learner.buffer.arrivals.tolist())  # the newer one of each
    [1, 3, 5, 7]
    """

    __repr__ = shown

    def __init__(self) -> None:
        self._features = torch.empty(0, 0)  # of the images that were kept, unit length
        self._arrivals = torch.empty(0, dtype=torch.long)

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        arrivals = pool.arrival.cpu()
        new = ~torch.isin(arrivals, self._arrivals)
        found = F.normalize(infer(model, pool.images[new.to(pool.age.device)], getattr(model, "features", None)), dim=1)
        features = found.new_empty(len(pool), found.shape[1], device="cpu")
        features[new] = found.cpu()
        order = self._arrivals.argsort()
        if len(order):
            features[~new] = self._features[order[torch.searchsorted(self._arrivals[order], arrivals[~new])]]
        keep = least_redundant(features, size, arrivals)
        self._features, self._arrivals = features[keep], arrivals[keep]
        return keep.to(pool.age.device)

    def state_dict(self) -> dict[str, Any]:
        return {"features": self._features, "arrivals": self._arrivals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._features, self._arrivals = state["features"], state["arrivals"]


def least_redundant(features: Tensor, size: int, arrivals: Tensor) -> Tensor:
    """`size` rows of unit length: as long as there are more, of the two most similar the one that came first goes."""
    similarity = features @ features.T
    similarity.fill_diagonal_(-torch.inf)
    nearest, which = similarity.max(1)
    stays = torch.ones(len(features), dtype=torch.bool)
    for _ in range(len(features) - size):
        one = int(nearest.argmax())
        other = int(which[one])
        goes = one if arrivals[one] < arrivals[other] else other
        stays[goes], nearest[goes] = False, -torch.inf
        similarity[:, goes] = -torch.inf
        lost = ((which == goes) & stays).nonzero()[:, 0]  # those whose nearest has gone
        nearest[lost], which[lost] = similarity[lost].max(1)
    return stays.nonzero()[:, 0]
