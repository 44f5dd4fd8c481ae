"""What the cameras see now, and what was seen: the newest frames with their classes, the last hour's predictions."""

import io
import json
import secrets
from bisect import bisect_right
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from streamclr.base.errors import UserError
from streamclr.base.tensors import load_metadata, load_tensors
from streamclr.records.journal import Tail
from streamclr.runs.status import NEWEST

MAX_READ_BYTES = 4 * 2**20  # of the predictions at a time; what is longer is passed over
COUNTED_MINUTES = 60
N_RECENT = 10_000  # predictions of a source that are kept, to find that of a frame
N_CHANGES = 30
N_CLASSES = 12  # that are counted by name
# A class holds when so many frames in a row had it, or some for so many seconds: a flicker is no change.
N_IN_A_ROW, N_SLOW, SLOW_SECONDS = 8, 2, 2.0
ROUNDING = 0.002  # seconds, of a line's time


class Newest:
    """The newest frame of each source, as the run last wrote it."""

    def __init__(self, path: Path):
        self.file = path / NEWEST
        self.frames: list[dict[str, Any]] = []  # name, time, and the key of its picture
        self.pictures: dict[str, bytes] = {}  # by key; also those before, for who asks late
        self._changed = 0

    def update(self) -> None:
        """Read the file again if it has changed."""
        try:
            changed = self.file.stat().st_mtime_ns
            if changed == self._changed:
                return
            tensors, about = load_tensors(self.file), json.loads(load_metadata(self.file)["about"])
            found = [(one["name"], float(one["time"]), tensors[str(i)].numpy()) for i, one in enumerate(about)]
        except (OSError, UserError, ValueError, KeyError, TypeError):  # none yet, or damaged
            return
        self._changed = changed
        before = {frame["picture"] for frame in self.frames}
        pictures = {secrets.token_hex(16): _png(image) for _, _, image in found}
        self.pictures = {key: png for key, png in self.pictures.items() if key in before} | pictures
        self.frames = [
            {"name": name, "time": time, "picture": key, "side": image.shape[-1]}
            for key, (name, time, image) in zip(pictures, found, strict=True)
        ]


def _png(image: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(data, "PNG", compress_level=1)
    return data.getvalue()


class Prediction(NamedTuple):
    time: float
    class_name: str
    probability: float | None
    version: int | None


class Seen:
    """What a source shows, without flicker."""

    def __init__(self) -> None:
        self.recent: deque[Prediction] = deque(maxlen=N_RECENT)
        self.held: str | None = None  # the class that holds
        self._next: tuple[str, int, float] = ("", 0, 0.0)  # the class of the last frames, how many in a row, since when

    def take(self, one: Prediction) -> str | None:
        """The class that held before, if another begins to hold with this frame."""
        self.recent.append(one)
        name, n, since = self._next
        name, n, since = (name, n + 1, since) if name == one.class_name else (one.class_name, 1, one.time)
        self._next = name, n, since
        if name == self.held or not (n >= N_IN_A_ROW or (n >= N_SLOW and one.time - since >= SLOW_SECONDS)):
            return None
        before, self.held = self.held, name
        return before or ""


class Predictions:
    """The tail of `predictions.jsonl`: the class of each frame, the counts of the last hour, and the changes."""

    def __init__(self, path: Path):
        self._tail = Tail(path / "predictions.jsonl", MAX_READ_BYTES)
        self._reset()

    def _reset(self) -> None:
        self._sources: dict[str, Seen] = {}
        self._minutes: dict[int, Counter[str]] = {}
        self.changes: deque[dict[str, Any]] = deque(maxlen=N_CHANGES)
        self.until: float | None = None  # the time of the last one

    def update(self) -> None:
        """Read what is new."""
        try:
            anew, lines = self._tail.read()
        except OSError:
            return
        if anew:  # it was cut when the run went on, or is another file
            self._reset()
        for line in lines:
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # damaged
                self._take(json.loads(line))
        if self._minutes:
            first = max(self._minutes) - COUNTED_MINUTES
            self._minutes = {minute: counts for minute, counts in self._minutes.items() if minute > first}

    def _take(self, line: dict[str, Any]) -> None:
        time, name = float(line["time"]), line["class"]
        source, region = line.get("source", ""), line.get("region", "")  # lines of 0.1.0 may have no source
        source = f"{source}#{region}" if region else source
        self.until = time
        if not isinstance(name, str):
            return  # there is no classifier yet
        self._minutes.setdefault(int(time // 60), Counter())[name] += 1
        seen = self._sources.setdefault(source, Seen())
        before = seen.take(Prediction(time, name, line.get("probability"), line.get("version")))
        if before is not None:
            self.changes.append({"time": time, "source": source, "class": name, "before": before or None})

    def at(self, source: str, time: float) -> Prediction | None:
        """The prediction of the frame that a source gave at this time."""
        seen = self._sources.get(source)
        if seen is None or not seen.recent:
            return None
        after = bisect_right(seen.recent, time + ROUNDING, key=lambda one: one.time)
        return seen.recent[max(0, after - 1)]

    def counts(self) -> dict[str, Any] | None:
        """How often each class was seen in the last hour before the newest prediction, the most frequent first."""
        total: Counter[str] = sum(self._minutes.values(), Counter())
        if not total or self.until is None:
            return None
        first = total.most_common(N_CLASSES)
        return {
            "n": total.total(),
            "minutes": len(range(min(self._minutes), max(self._minutes) + 1)),
            "until": self.until,
            "classes": [list(one) for one in first],
            "others": total.total() - sum(n for _, n in first),
        }
