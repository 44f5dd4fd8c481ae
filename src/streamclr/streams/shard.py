"""The part of a source that one rank of several reads: every nth segment."""

from typing import TYPE_CHECKING

import numpy as np

from streamclr.streams.datasets.images import Images

if TYPE_CHECKING:
    from streamclr.streams.spec import Source


class Shard:
    """The segments number index, index + n, index + 2n, … of a source.

    Together, n ranks see in each step what one process with segments of n times the size would see. Images are numbered
    anew. The shard ends with the last segment that is whole on every rank.
    """

    def __init__(self, whole: "Source", index: int, n: int, segment: int):
        self.whole, self.index, self.n, self.segment = whole, index, n, segment

    @property
    def n_images(self) -> int | None:
        return None if self.whole.n_images is None else self.whole.n_images // (self.n * self.segment) * self.segment

    @property
    def epoch(self) -> int | None:
        return None if self.whole.epoch is None else -(-self.whole.epoch // self.n)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.whole.classes

    @property
    def train(self) -> Images | None:
        return self.whole.train

    @property
    def test(self) -> Images | None:
        return self.whole.test

    def images(self, numbers: np.ndarray) -> np.ndarray:
        return self.whole.images(self._in_whole(numbers))

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        return self.whole.labels(self._in_whole(numbers))

    def _in_whole(self, numbers: np.ndarray) -> np.ndarray:
        return (numbers // self.segment * self.n + self.index) * self.segment + numbers % self.segment
