"""Which frames of a camera are of use: those in which something moved, and those of certain hours."""

import re
import time
from typing import NamedTuple

import numpy as np
from PIL import Image

from streamclr.base.errors import UserError

# A still frame of 720p with noise of 20 of 255 on each pixel, 2 % flicker and JPEG artefacts changes no cell by more
# than 12; every object that enters with 1 % of the frame changes 0.5 % of the cells by more (docs/sources.md#motion).
CELLS, CHANGE = 32, 12  # cells in a row, and of 255: a cell that differs by more has changed
MOTION = 0.5  # per cent of the cells
PAUSE_SECONDS = 1.0  # without motion, after which what moves next is another scene


class MotionGate:
    """Tells the frames in which something moved, against the last frame that it let through.

    Slow motion adds up until it is seen; what came and stays is the new background. Light that changes everywhere alike
    does not count.

    threshold: per cent of the cells that must have changed.
    last: the last frame that was let through, as cells; None: the next frame is the first.
    """

    def __init__(self, threshold: float, last: np.ndarray | None = None):
        self.threshold, self.last = threshold, last
        self._moved_at = -np.inf  # seconds
        self.n_scenes = 0  # times that something began to move after a pause

    def lets_through(self, pixels: np.ndarray, seconds: float) -> bool:
        """pixels: size x size x 3, as they are seen."""
        cells = as_cells(pixels)
        if self.last is not None and changed(self.last, cells) < self.threshold:
            return False
        self.last = cells
        if seconds - self._moved_at > PAUSE_SECONDS:
            self.n_scenes += 1
        self._moved_at = seconds
        return True


def as_cells(pixels: np.ndarray) -> np.ndarray:
    """CELLS x CELLS means of brightness."""
    return np.asarray(Image.fromarray(pixels).convert("L").resize((CELLS, CELLS), Image.Resampling.BOX))


def changed(before: np.ndarray, after: np.ndarray) -> float:
    """Per cent of the cells that changed, beyond what all of them did."""
    difference = after.astype(np.int16) - before
    return float(100 * (abs(difference - np.median(difference)) > CHANGE).mean())


def parse_motion(text: str | None) -> float | None:
    """`on`, `off`, or per cent of the picture that must have changed, as `2` or `0.5%`."""
    if text is None or text == "off":
        return None
    if text == "on":
        return MOTION
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?) *%?", text.strip())) and 0 < float(match[1]) <= 100:
        return float(match[1])
    raise UserError(f"motion is {text!r}: use on, off, or the per cent of the picture that must change, as 0.5%")


class Hours(NamedTuple):
    """A part of each day, in minutes of the local clock; over midnight if it ends before it starts."""

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> "Hours":
        match = re.fullmatch(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", text.strip())
        if match:
            (h0, m0), (h1, m1) = ((int(match[i]), int(match[i + 1])) for i in (1, 3))
            start, end = 60 * h0 + m0, 60 * h1 + m1
            if m0 < 60 and m1 < 60 and h0 < 24 and end <= 24 * 60 and start != end:
                return cls(start, end)
        raise UserError(f"between is {text!r}: use two times of the day, as 06:00-20:00, or 20:00-06:00 over midnight")

    def include(self, moment: float) -> bool:
        """moment: seconds since 1970."""
        local = time.localtime(moment)
        minute = 60 * local.tm_hour + local.tm_min
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end
