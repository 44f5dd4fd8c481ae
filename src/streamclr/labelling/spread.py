"""Which frames get the answer to a question about another one: its neighbours that show the same scene."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.labelling.candidates import Candidate
from streamclr.scenes import CUT_IN_FEATURES, find_scenes


def find_companions(
    asked: list[Candidate],
    clips: list[list[Candidate]],
    features: Tensor,
    mean: Tensor,
    features_of: Callable[[Tensor], Tensor],
) -> dict[str, list[Candidate]]:
    """The companions of each frame that is asked about, by its key: the frames that get the same answer.

    clips: of each frame that is asked about, the clip that it is from.
    features: of each frame that is asked about, n x d.
    mean: of the features of many images of the stream.
    features_of: images to features, for the frames whose track is not known.
    """
    companions = {one.key: same_scene(clip, one) for one, clip in zip(asked, clips, strict=True)}
    pairs = [(row, frame) for row, one in enumerate(asked) if one.track < 0 for frame in companions[one.key]]
    if pairs:
        found = features_of(torch.stack([frame.image for _, frame in pairs])) - mean
        similarity = F.cosine_similarity(found, features[[row for row, _ in pairs]] - mean, dim=1).tolist()
        other = {
            frame.key for (_, frame), cosine in zip(pairs, similarity, strict=True) if 1 - cosine > CUT_IN_FEATURES
        }
        companions = {key: [frame for frame in own if frame.key not in other] for key, own in companions.items()}
    return companions


def same_scene(clip: list[Candidate], asked: Candidate) -> list[Candidate]:
    """The other frames of a clip on the same track; where that is not known, those without a cut between."""
    if asked.track >= 0:
        together = [frame.track == asked.track for frame in clip]
    else:
        tracks = torch.tensor([frame.track for frame in clip])
        scenes = find_scenes(torch.stack([frame.image for frame in clip]), tracks).tolist()
        own = scenes[[frame.key for frame in clip].index(asked.key)]
        together = [scene == own for scene in scenes]
    return [frame for frame, is_in in zip(clip, together, strict=True) if is_in and frame.key != asked.key]
