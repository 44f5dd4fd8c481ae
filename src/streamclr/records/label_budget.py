"""How many images a person is asked about, and how many candidates for them fit on the disk."""

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from streamclr.base.errors import UserError

CLIP = 8  # consecutive frames that are kept together: an answer to one of them counts for those of the same scene
N_CANDIDATES_EACH = 8  # clips for every image that is asked about, where the disk has room for them
MIN_CANDIDATES_EACH = 2  # with fewer, clips are shorter
N_ASKED = 200  # of a stream without labels, unless the run is told: more than a person needs for a first classifier
MIN_ASKED = 50  # of a share: 1 % of a short clip would be a handful, of one class perhaps
N_ASKED_OF_SHARE = 100  # images, for the length of the clips of a stream without an end: nobody knows how many to come


class LabelBudget(NamedTuple):
    """How many images a person is asked about: a number, or a share of those seen in a stream without an end."""

    images: int | None
    share: float | None

    @classmethod
    def parse(cls, text: str) -> "LabelBudget":
        number, is_share = text.strip().removesuffix("%"), text.strip().endswith("%")
        with suppress(ValueError):
            if is_share and 0 < float(number) <= 100:
                return cls(None, float(number) / 100)
            if not is_share and int(number) > 0:
                return cls(int(number), None)
        raise UserError(f"label_budget is {text!r}: use a share as 1%, a number of images as 500, or off")

    def of(self, n_seen: int, least: int = MIN_ASKED) -> int:
        """The number of images to ask about, once `n_seen` images were seen; of a share at least so many, if it can."""
        if self.images is not None:
            return self.images
        return max(1, min(n_seen, max(least, round((self.share or 0) * n_seen))))


def n_candidates_that_fit(n_bytes: int, side: int) -> int:
    """How many candidates of `side` pixels fit into a file of this size."""
    return max(0, (n_bytes - HEADER_SIZE) // record_size((3, side, side)))


def clips_that_fit(n_frames: int, n_asked: int | None) -> tuple[int, int]:
    """How many clips to keep, and how many frames each has.

    n_frames: that fit on the disk, or that the stream has, if it has fewer.
    n_asked: images to ask about; None: a share of a stream without an end.
    """
    length = max(1, min(CLIP, n_frames // (MIN_CANDIDATES_EACH * (n_asked or N_ASKED_OF_SHARE))))
    n_clips = n_frames // length
    return n_clips if n_asked is None else min(n_clips, N_CANDIDATES_EACH * n_asked), length


HEADER_SIZE, DIGEST_SIZE = 4096, 16


def record_size(shape: tuple[int, ...]) -> int:
    return DIGEST_SIZE + 16 + int(np.prod(shape))
