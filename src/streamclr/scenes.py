"""Scenes of a stream, frames without a cut between them: neighbours in time, and what a label is true of."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Of 1 - correlation of two consecutive frames, scaled to 8 x 8: above it is a cut. On 9,000 frames of GTSRB, tracks in
# random order, it finds 95 % of the cuts and takes 4 % of the other frames for one.
CUT = 0.35
# The same for features less their mean. With an adapted encoder it finds 98 % of the cuts and takes 0.4 % of the other
# frames for one; with the public one 99.8 % and 14 %: labels spread less far, and hardly ever to another scene.
CUT_IN_FEATURES = 0.3
SPREAD_WEIGHT = 0.5  # of a label that was spread from another frame, beside 1 of a given one
REACH = 30  # frames between two neighbours at most: a second of a usual camera


def find_scenes(images: Tensor, tracks: Tensor | None = None) -> Tensor:
    """The number of the scene of each of n consecutive frames, by their pixels; uint8, n x 3 x H x W.

    tracks: numbers of what is known to be apart, such as cameras; a scene never spans two of them.
    """
    few = F.adaptive_avg_pool2d(images.float(), 8).flatten(1)
    is_cut = _unlike(few - few.mean(1, keepdim=True), CUT)
    is_cut &= (images[1:] != images[:-1]).flatten(1).any(1)  # equal frames of one colour have no correlation
    if tracks is not None:
        is_cut |= tracks[1:] != tracks[:-1]
    return F.pad(is_cut.long(), (1, 0)).cumsum(0)


def find_scenes_in(features: Tensor, tracks: Tensor | None = None) -> Tensor:
    """The same by the features of the frames, n x d, which tell scenes apart better than pixels do.

    features: of a whole stream: what all frames have in common, their mean, says nothing.
    """
    is_cut = _unlike(features - features.mean(0), CUT_IN_FEATURES)
    if tracks is not None:
        is_cut |= tracks[1:] != tracks[:-1]
    return F.pad(is_cut.long(), (1, 0)).cumsum(0)


def _unlike(rows: Tensor, cut: float) -> Tensor:
    """Of each row but the first: whether 1 - cosine with the row before is above `cut`."""
    rows = F.normalize(rows, dim=1)
    return 1 - (rows[1:] * rows[:-1]).sum(1) > cut


def spread(given: Tensor, scenes: Tensor, reach: int = REACH) -> tuple[Tensor, Tensor]:
    """The rows to which labels spread, the given ones among them, and for each row the given one it has its label from:
    the nearest of the same scene, at most `reach` frames away.

    given: rows that have a label, ascending.
    scenes: the number of the scene, or track, of each row; rows are in the order of the stream.
    """
    rows = torch.arange(len(scenes))
    place = torch.searchsorted(given, rows)
    sources = torch.stack([given[(place - 1).clamp(min=0)], given[place.clamp(max=len(given) - 1)]])
    distance = (sources - rows).abs().masked_fill(scenes[sources] != scenes, reach + 1)
    least, which = distance.min(0)
    near = least <= reach
    return rows[near], sources.gather(0, which[None])[0][near]


def draw_neighbours(scenes: Tensor, generator: torch.Generator, reach: int = REACH) -> Tensor:
    """For each frame the index of another one of the same scene, at most `reach` away; its own if there is none.

    scenes: the number of the scene of each frame; frames of one scene are consecutive.
    """
    index = torch.arange(len(scenes), device=scenes.device)
    _, lengths = scenes.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0)
    first, last = ((ends - lengths).repeat_interleave(lengths), (ends - 1).repeat_interleave(lengths))
    low, high = torch.maximum(first, index - reach), torch.minimum(last, index + reach)
    u = torch.rand(len(scenes), generator=generator, device=generator.device).to(scenes.device)
    drawn = low + (u * (high - low)).long()  # of the high - low others; those from its own place on are one further
    return torch.where(high > low, drawn + (drawn >= index), index)
