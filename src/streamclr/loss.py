"""NT-Xent, the contrastive loss of SimCLR (Eq. 1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.base.errors import UserError


def nt_xent(z0: Tensor, z1: Tensor, temperature: float = 0.5, reduction: str = "mean") -> Tensor:
    """Each view must find the other view of its image among all views of the batch.

    `z0[i]` and `z1[i]` are the unit projections of the two views of image i. With `reduction="none"` the result has one
    loss per anchor, first all of `z0`, then all of `z1`.
    """
    if z0.shape != z1.shape or z0.ndim != 2 or not len(z0):
        raise UserError(
            f"the views' projections are {tuple(z0.shape)} and {tuple(z1.shape)}: give two of n x d, n at least 1"
        )
    if not 0 < temperature < torch.inf:
        raise UserError(f"temperature is {temperature}: use a number above 0")
    if reduction not in ("mean", "sum", "none"):
        raise UserError(f"reduction is {reduction!r}: use 'mean', 'sum' or 'none'")
    z = torch.cat([z0, z1])  # 2n x d
    anchors = torch.arange(len(z), device=z.device)
    positives = anchors.roll(len(z0))
    losses = []
    for rows in anchors.split(4096):  # one round for any usual batch; a bound on memory for a large pool
        logits = z[rows] @ z.T / temperature
        logits[rows - rows[0], rows] = -torch.inf  # a view is not its own negative
        losses.append(F.cross_entropy(logits, positives[rows], reduction="none"))
    loss = torch.cat(losses)
    return {"none": loss, "sum": loss.sum(), "mean": loss.mean()}[reduction]
