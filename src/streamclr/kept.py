"""Views whose way through the frozen stages is kept: where only late stages learn, an update then costs a fraction."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.buffer import Buffer
from streamclr.encoders.block_encoder import BlockEncoder
from streamclr.encoders.inference import inference_mode
from streamclr.encoders.projection import ContrastiveModel
from streamclr.views import ViewPairs, Views

DTYPE = torch.half  # half the memory of float, and three digits of each value
VIEWS_AT_ONCE = 256  # of those that are made as images enter the buffer


class KeptViews:
    """A few fixed views of each image, as what the frozen stages make of them, in the buffer beside the image.

    An update draws one of the image's views and one of its neighbour's, which is the image itself if none is kept.

    n: views of each image, and of its neighbour.
    """

    def __init__(self, n: int, views: Views, generator: torch.Generator):
        self.n, self.views, self.generator = n, views, generator

    @torch.no_grad()
    def fill(self, buffer: Buffer, model: ContrastiveModel) -> None:
        """Make the views of the images that have just entered."""
        new = (buffer.ages == 0).nonzero()[:, 0]
        model.train()  # in which the stages that learn are not fixed
        for rows in new.split(max(1, VIEWS_AT_ONCE // (2 * self.n))) if len(new) else ():
            images, neighbours = (column.repeat_interleave(self.n, 0) for column in buffer.pairs(rows))
            made = ViewPairs(self.views, images, self.generator, neighbours)(slice(None))
            of_each = model.early(made).to(DTYPE).unflatten(0, (2, len(rows), self.n))
            buffer.kept[rows] = of_each.transpose(0, 1).flatten(1, 2)

    def draw(self, buffer: Buffer, rows: Tensor) -> Tensor:
        """Rows i and n + i are views of image i of the n, as in ViewPairs."""
        first, second = torch.randint(self.n, (2, len(rows)), generator=self.generator, device=rows.device)
        return torch.cat([buffer.kept[rows, first], buffer.kept[rows, self.n + second]]).float()


def kept_shape(n: int, encoder: nn.Module, views: Views, shape: Sequence[int]) -> tuple[int, ...]:
    """Of what is kept of one image of this shape: 2n x channels x height x width."""
    if n < 1:
        raise UserError(f"kept_views is {n}: use 0 (views are drawn anew for each update) or more")
    if not isinstance(encoder, BlockEncoder):
        raise UserError(f"kept_views is {n}, and the frozen stages of a {type(encoder).__name__} are not known: use 0")
    if not encoder.n_frozen:
        raise UserError(
            f"kept_views is {n}, and all stages of the encoder learn: give train, as 2, so that some do not"
        )
    blank = torch.zeros(1, *shape, dtype=torch.uint8)
    x = views(blank, torch.Generator()).to(next(encoder.parameters()).device)
    with inference_mode(encoder):
        for number in range(encoder.n_frozen):
            x = encoder.run_stage(number, x)
    return (2 * n, *x.shape[1:])


def kept_bytes(shape: Sequence[int] | None) -> int:
    return 0 if shape is None else math.prod(shape) * DTYPE.itemsize
