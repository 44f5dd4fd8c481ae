"""What one step of the learner did."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """What one call of `learn_many` did.

    >>> import torch
    >>> from streamclr import Learner, Step, resnet18
    >>> images = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
    >>> step: Step = Learner(resnet18(width=4), buffer=8).learn_many(images)
    >>> step.number, step.seen, step.kept, step.replaced, step.rescored
    (1, 8, 0, 8, 0.0)
    """

    number: int  # of the step, from 1
    seen: int  # images of the stream so far
    loss: float  # the mean over the step's updates
    kept: int  # images of the buffer that stayed
    replaced: int  # images of the segment that entered
    rescored: float  # share of the buffer that was scored again
    score: float  # mean score in the new buffer; NaN if the policy does not score
    seconds_scoring: float
    seconds_training: float
    spread: float = math.nan  # of the batch's projections, 1 - |mean z|²: 0 if all are equal, near 1 if all differ

    def __str__(self) -> str:
        return (
            f"step {self.number} | loss {self.loss:.3f} | {self.replaced} of {self.kept + self.replaced} replaced | "
            f"{100 * self.rescored:.1f} % re-scored"
        )
