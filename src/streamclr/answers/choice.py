"""Which answers are told: smoothed over frames, "unknown" below a threshold, and only those that change."""

from collections import deque
from collections.abc import Sequence

import numpy as np

UNKNOWN = "unknown"
Place = tuple[str, str]  # a camera or dataset, and a region of its frames, "" if it has none


class Chooser:
    """Knows the last frames of each place, and what was told of it last.

    told: the class that was told last.
    """

    def __init__(self, threshold: float = 0.0, smooth: int = 1, every_frame: bool = False):
        self.threshold, self.smooth, self.every_frame = threshold, smooth, every_frame
        self.told: dict[Place, str] = {}
        self._frames: dict[Place, deque[np.ndarray]] = {}
        self._classes: dict[Place, Sequence[str]] = {}

    def answer(self, place: Place, probabilities: np.ndarray, classes: Sequence[str]) -> tuple[str, float]:
        """Class and probability after this frame; call it for each."""
        if self._classes.get(place) != classes:  # another version knows other classes
            self._frames[place], self._classes[place] = deque(maxlen=self.smooth), classes
        frames = self._frames[place]
        frames.append(probabilities)
        mean = np.mean(frames, axis=0)
        label = int(mean.argmax())
        probability = round(float(mean[label]), 4)
        return (classes[label] if probability >= self.threshold else UNKNOWN), probability

    def is_told(self, place: Place, name: str) -> bool:
        """Whether this answer is to be told; from then on it is the last."""
        is_new = self.told.get(place) != name
        self.told[place] = name
        return is_new or self.every_frame
