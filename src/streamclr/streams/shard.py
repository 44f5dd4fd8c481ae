"""What one rank of several reads of a source: every n-th segment."""

from typing import TYPE_CHECKING

import numpy as np

from streamclr.streams.datasets.images import Images

if TYPE_CHECKING:
    from streamclr.streams.spec import Source


class Shard:
    """Of the segments of a source those with the numbers index, index + n, index + 2n, …

    So n ranks together see in each step what one process with segments of n times the size would. An image has a number
    of its own here; the source ends where not every rank has a whole segment.
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
