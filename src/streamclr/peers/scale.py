"""SCALE: which images a memory keeps, so that they are spread evenly (its losses are not here)."""

import heapq
from itertools import count

import torch
from torch import Tensor, nn

from streamclr.base.options import shown
from streamclr.buffer import Pool
from streamclr.encoders.inference import infer


class SCALE:
    """Keep images that are spread evenly in feature space (Yu et al. 2023, the online memory update of SCALE).

    The features of all images are computed anew in each step, as the authors do.

    >>> import torch
    >>> from streamclr import SCALE, Learner, resnet18
    >>> learner = Learner(resnet18(width=4), SCALE(), buffer=4)
    >>> images = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8).repeat_interleave(2, dim=0)  # each of four twice
    >>> step = learner.learn_many(images)
    >>> len({n // 2 for n in learner.buffer.arrivals.tolist()})  # one of each
    4
    """

    __repr__ = shown

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        features = infer(model, pool.images, getattr(model, "features", None))
        return part_and_select(features.cpu(), size).to(pool.age.device)


def part_and_select(features: Tensor, size: int) -> Tensor:
    """`size` rows by the Part and Select Algorithm (Salomon et al. 2013).

    The box with the longest side is cut in the middle of that side, until there are `size` boxes; of each the row stays
    that is nearest to the middle of the box. Rows that are equal cannot be cut apart: the last of them fill up.
    """
    order = count()  # of boxes with equal sides

    def box(rows: Tensor) -> tuple[float, int, Tensor, Tensor, Tensor]:
        low, high = torch.aminmax(features[rows], dim=0)
        return -float((high - low).max()), next(order), rows, low, high

    boxes = [box(torch.arange(len(features)))]
    while len(boxes) < size and 0 < -boxes[0][0] < torch.inf:
        _, _, rows, low, high = heapq.heappop(boxes)
        axis = (high - low).argmax()
        above = features[rows, axis] - low[axis] > (high - low)[axis] / 2  # neither none nor all, however near they are
        for half in (rows[~above], rows[above]):
            heapq.heappush(boxes, box(half))
    middles = [rows[(features[rows] - (low + high) / 2).square().sum(1).argmin()] for _, _, rows, low, high in boxes]
    chosen = torch.stack(middles)
    others = torch.ones(len(features), dtype=torch.bool)
    others[chosen] = False
    return torch.cat([chosen, others.nonzero()[:, 0][len(features) - size :]])
