"""A stream that classifies every frame as it comes: a thread reads ahead while the learner learns."""

import threading
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamclr.answers.answers import Answers
from streamclr.base.errors import UserError
from streamclr.models.versions import Versions
from streamclr.records.journal import Journal, cut
from streamclr.streams.account import Account
from streamclr.streams.cameras.live import Idle
from streamclr.streams.stream import Arrived, Stream

BATCH_SIZE = 64  # images that are classified together
IDLE_SECONDS = 0.5  # between two calls of `idle`
ROLLBACK_CHECK_SECONDS = 1.0  # between two looks for another version to serve


def check_can_predict(stream: Stream) -> None:
    """An error if sources that wait are mixed with sources that drop: a resumed run could not number their frames."""
    if stream.overload == "mixed":
        how = "give the same overload, wait or drop, to all of them"
        raise UserError(f"--predict takes sources that all wait for the learner, or all do not: {how}")


@dataclass
class ReadSegment:
    """A segment that the reader's thread has read and classified."""

    images: Tensor  # empty: the stream has ended
    state: dict[str, Any]  # of the stream after it
    account: Account  # of the frames since the segment before
    tracks: Tensor | None  # of the images of cameras, which are known until the next segment is read
    thumbnails: list[bytes | None]  # the same


class PredictingStream(Stream):
    """The segments of a stream, unchanged, with a line in `predictions.jsonl` for each frame.

    Position, account and state are those of the last segment that was handed out. A run that is resumed from there
    misses no frame and has none twice: lines of later frames are removed, and the frames are read again. Frames of a
    camera cannot be read again: those that the learner has no time for are classified too, and passed over in the
    account. `arrived` is called in the reader's thread, after the images are classified.

    answers: takes what is predicted, to send it.
    log_bytes: limit of the file of predictions.
    """

    def __init__(
        self, stream: Stream, served: Versions, path: Path, answers: Answers | None = None, log_bytes: int | None = None
    ):
        check_can_predict(stream)
        self.stream, self.served, self.path, self.answers = stream, served, path, answers
        self._log_bytes = log_bytes
        self.n_images, self.epoch, self.classes = stream.n_images, stream.epoch, stream.classes
        self.train, self.test = stream.train, stream.test
        self.live, self.exact, self.overload = stream.live, stream.exact, stream.overload
        self.has_thumbnails, self.places, self.repeats = stream.has_thumbnails, stream.places, stream.repeats
        self._drops = stream.overload == "drop"
        self._predictions: Journal | None = None
        self._events: deque[tuple[str, str]] = deque()
        self._connections: dict[str, tuple[bool, int]] = {}
        self._told: list[str] = []
        self._tracks: Tensor | None = None  # of the last segment that was handed out, of cameras
        self._thumbnails: list[bytes | None] = []  # the same
        self.load_state_dict(stream.state_dict())

    @property
    def size(self) -> int:
        return self.stream.size

    def labels(self, arrivals: Tensor) -> Tensor:
        return self.stream.labels(arrivals)

    def tracks(self, arrivals: Tensor) -> Tensor | None:
        if not self.live:
            return self.stream.tracks(arrivals)
        return None if self._tracks is None else self._tracks[arrivals - (self.position - len(self._tracks))]

    def thumbnail(self, arrival: int) -> bytes | None:
        if not self.live:
            return self.stream.thumbnail(arrival)
        return self._thumbnails[arrival - (self.position - len(self._thumbnails))]

    def take_told(self) -> list[str]:
        told, self._told = self._told, []
        return told

    def take_events(self) -> list[tuple[str, str]]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def connections(self) -> dict[str, tuple[bool, int]]:
        return self._connections

    def state_dict(self) -> dict[str, Any]:
        """The lines of its frames are on the disk when this returns."""
        if self._predictions is not None:
            self._predictions.sync()
            if self.answers is not None:
                self.answers.sync()
        return self._state | {"position": self.position, "account": self.account.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)
        self._state, self.position = self.stream.state_dict(), self.stream.position
        self.account = Account.of(self._state["account"])

    # In the learner's thread:

    def _segments(
        self, n: int, until: int | None, idle: Idle, arrived: Arrived | None, thumbnail_every: int
    ) -> Generator[Tensor]:
        self._start(n, until, arrived, thumbnail_every)
        try:
            while not (self._drops and until is not None and self.position >= until):
                part = self._next(idle)
                if part is None or not len(images := self._handed_out(part, until)):
                    break
                yield images
        finally:
            self._stop()

    def _start(self, n: int, until: int | None, arrived: Arrived | None, thumbnail_every: int) -> None:
        cut(self.path, self.account.classifiable)
        self._predictions = Journal(self.path, self.path.name, self._log_bytes)
        self.stream.account.take()  # from here on it is that of the frames since the last part
        self._image = self.account.classifiable  # number of the next one
        self._n_classified = self._n_written = 0  # since the last part: images, and lines of them
        self._rollback_check_due = 0.0
        self._ready: deque[ReadSegment] = deque()
        self._change = threading.Condition()
        self._ends = False
        torch.get_num_threads()  # settles this thread's number, before another thread takes one of its own
        self._pool = ThreadPoolExecutor(1, "predicting")
        self._reader: Future[None] = self._pool.submit(self._read, n, until, arrived, thumbnail_every)
        self._reader.add_done_callback(lambda _: self._notify())

    def _notify(self) -> None:
        with self._change:
            self._change.notify_all()

    def _next(self, idle: Idle) -> ReadSegment | None:
        """The next part; None if the stream has ended, or `idle` returns True."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ready or self._reader.done(), IDLE_SECONDS)
                if self._ready:
                    self._change.notify_all()
                    return self._ready.popleft()
                if self._reader.done():
                    self._reader.result()  # raises the reader's error
                    return None
            if idle():
                return None

    def _handed_out(self, part: ReadSegment, until: int | None) -> Tensor:
        images = part.images
        if self._drops:
            images = images[: None if until is None else until - self.position]
            part.account.pass_over(len(part.images) - len(images), "learner stopped")
            self.position += len(images)
        else:
            self.position = part.state["position"]
        self._tracks = None if part.tracks is None else part.tracks[: len(images)]
        self._thumbnails = part.thumbnails[: len(images)]
        self._state = part.state
        self.account.add(part.account)
        return images

    def _stop(self) -> None:
        """End the thread, and set the stream back to where the learner is."""
        self._ends = True
        self._notify()
        self._pool.shutdown()
        torch.set_num_threads(torch.get_num_threads())  # for new threads, which would inherit the reader's number
        if self._drops:
            for part in self._ready:
                self._handed_out(part, self.position)
        assert self._predictions is not None
        with suppress(OSError):  # a full disk, which was reported already
            self._predictions.sync()
        self._predictions.close()
        self._predictions = None
        cut(self.path, self.account.classifiable)
        self.stream.load_state_dict(self.state_dict())

    # In the reader's thread:

    def _read(self, n: int, until: int | None, arrived: Arrived | None, thumbnail_every: int) -> None:
        torch.set_num_threads(1)  # of this thread

        def classify(images: Tensor, source: str, files: list[str]) -> None:
            for start in range(0, len(images), BATCH_SIZE):
                part = slice(start, start + BATCH_SIZE)
                self._classify(images[part], source, files[part])
            if arrived:
                arrived(images, source, files)

        until = None if self._drops else until  # a camera is read until the learner has enough
        with closing(self.stream.segments(n, until, self._told_to_end, classify, thumbnail_every)) as segments:
            for images in segments:
                self._put(images)
                if self._ends:
                    break
        self._told_to_end()
        self._put(torch.empty(0))

    def _told_to_end(self) -> bool:
        """What the stream calls while it is idle; keeps its events for the learner's thread."""
        self._events.extend(self.stream.take_events())
        self._told += self.stream.take_told()
        self._connections = self.stream.connections()
        return self._ends

    def _classify(self, images: Tensor, source: str, files: list[str]) -> None:
        """Write a line for each image, with the class by the version that is served now."""
        assert self._predictions is not None
        if time.monotonic() >= self._rollback_check_due:
            with suppress(OSError):  # the disk cannot be read now: the version in memory is used
                self.served.look()
            self._rollback_check_due = time.monotonic() + ROLLBACK_CHECK_SECONDS
        version = self.served.current
        common: dict[str, Any] = {"version": None if version is None else version.number, "time": round(time.time(), 3)}
        camera, region = self.places[source]
        common |= {"source": camera} | ({"region": region} if region else {})
        guesses: list[tuple[str | None, float | None]] = [(None, None)] * len(images)
        if version is not None:
            each = version.probabilities(images)
            probabilities, labels = each.max(1)
            guesses = [
                (version.classes[label], round(probability, 4))
                for probability, label in zip(probabilities.tolist(), labels.tolist(), strict=True)
            ]
        lines = [
            {"image": self._image + i, "class": name, "probability": probability} | common
            for i, (name, probability) in enumerate(guesses)
        ]
        lines = [line | ({"file": file} if file else {}) for line, file in zip(lines, files, strict=True)]
        if self._predictions.write(*lines):
            self._n_written += len(lines)
        if self.answers is not None and version is not None:
            self.answers.take(lines, each.numpy(), version.classes, images.numpy())
        self._image += len(lines)
        self._n_classified += len(lines)

    def _put(self, images: Tensor) -> None:
        """Make a segment ready for the learner: wait until it takes it, or, of a camera, replace the one before."""
        account = self.stream.account.take()
        account.add(Account(predicted=self._n_written))
        if self._drops:  # frames of an incomplete segment were given back
            n_given_back = self._n_classified - len(images)
            account.passed.subtract({"stopped": n_given_back})
            account.passed["learner stopped"] += n_given_back
        self._n_classified = self._n_written = 0
        numbers = torch.arange(self.stream.position - len(images), self.stream.position)
        tracks = self.stream.tracks(numbers) if self.live and len(images) else None
        thumbnails = [self.stream.thumbnail(number) for number in numbers.tolist()] if self.live else []
        with self._change:
            if self._drops and self._ready and len(images):
                old = self._ready.popleft()
                old.account.pass_over(len(old.images), "learner busy")
                old.account.add(account)
                account = old.account
            self._ready.append(ReadSegment(images, self.stream.state_dict(), account, tracks, thumbnails))
            self._change.notify_all()
            if not self._drops:
                self._change.wait_for(lambda: not self._ready or self._ends)
