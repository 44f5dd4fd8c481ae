"""A stream every frame of which is classified as it comes, by a thread that reads ahead while the learner learns."""

import json
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import redacted
from streamclr.models.versions import Versions
from streamclr.records.journal import Journal
from streamclr.streams.account import Account
from streamclr.streams.stream import LiveStream

if TYPE_CHECKING:
    from streamclr.streams.cameras.live import Live
    from streamclr.streams.spec import Source
    from streamclr.streams.stream import AnyStream

AT_ONCE = 64  # frames of a recording that are classified together
IDLE_EVERY = 0.5  # seconds
LOOK_EVERY = 1.0  # seconds: for a rollback


def check_can_predict(stream: "AnyStream") -> None:
    """An error in one line where it cannot be told which frames have been learned from when a run goes on."""
    feeds = stream.feeds if isinstance(stream, LiveStream) else []
    if len({feed.drops for feed in feeds}) > 1:
        raise UserError(
            "--predict takes sources that all wait for the learner, or all do not: give the same overload, wait or "
            "drop, to all of them"
        )


@dataclass
class ReadSegment:
    """A segment that was read, with all that is known then."""

    images: Tensor  # none: the stream has ended
    state: dict[str, Any]  # of the stream
    account: Account  # of the frames since the part before


class PredictingStream:
    """Hands out the segments of a stream as they are; a line in a file for each of its frames.

    Position, account and state are those of the last segment that was handed out, so that a run that goes on from there
    misses none and has none twice: lines of later frames are taken back, and the frames are read again. What does not
    wait for the learner, as a camera, cannot be read again: those of its frames that the learner has no time for are
    classified all the same, and passed over in the account.
    """

    def __init__(self, stream: "AnyStream", served: Versions, path: Path):
        check_can_predict(stream)
        self.stream, self.served, self.path = stream, served, path
        self.feeds = stream.feeds if isinstance(stream, LiveStream) else []
        self.drops = any(feed.drops for feed in self.feeds)
        # Frames of a recording are all there: they are classified in the order in which they are learned from.
        self._as_they_come = not all(feed.exact for feed in self.feeds)
        self.idle: Callable[[], bool] = lambda: False
        self.position: int = stream.position
        self.account: Account = stream.account
        self._state = stream.state_dict()
        self._predictions: Journal | None = None
        self._events: deque[tuple[str, str]] = deque()
        self._connections: dict[str, tuple[bool, int]] = {}

    @property
    def source(self) -> "Source | Live":
        return self.stream.source

    @property
    def exact(self) -> bool:
        return self.stream.exact

    @property
    def live(self) -> bool:
        return self.stream.live

    @property
    def fps(self) -> float | None:
        return self.stream.fps

    @property
    def size(self) -> int:
        return self.stream.size

    def labels(self, arrivals: Tensor) -> Tensor:
        return self.stream.labels(arrivals)

    def take_events(self) -> list[tuple[str, str]]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def connections(self) -> dict[str, tuple[bool, int]]:
        return self._connections

    def state_dict(self) -> dict[str, Any]:
        """The lines that it knows of are on the disk."""
        if self._predictions is not None:
            self._predictions.sync()
        return self._state | {"position": self.position, "account": self.account.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)
        self.position, self.account, self._state = self.stream.position, self.stream.account, self.stream.state_dict()

    # ------------------------------------------------------------------------------------------------------------
    # What the learner's thread does.

    def segments(self, n: int, until: int | None = None) -> Generator[Tensor]:
        """Segments of `n` images until the stream ends, or until image number `until`; the last may be smaller."""
        if n < 1:
            raise UserError(f"the segment size is {n}: use at least 1")

        def generate() -> Generator[Tensor]:
            self._start(n, until)
            try:
                while not (self.drops and until is not None and self.position >= until):
                    part = self._next()
                    if part is None or not len(images := self._handed_out(part, until)):
                        break
                    yield images
            finally:
                self._stop()

        return generate()

    def _start(self, n: int, until: int | None) -> None:
        cut(self.path, self.account.classifiable)
        self._predictions = Journal(self.path, self.path.name)
        self.stream.account = Account()  # of the frames since the last part
        self._image = self.account.classifiable  # number of the next one
        self._n_classified = 0  # since the last part
        self._looked = 0.0
        self._ready: deque[ReadSegment] = deque()
        self._change = threading.Condition()
        self._ends = False
        self.stream.idle = self._told_to_end
        if isinstance(self.stream, LiveStream) and self._as_they_come:
            self.stream.arrived = lambda frames, feed: self._classify(torch.from_numpy(frames), feed)
        torch.get_num_threads()  # settles this thread's number, before another thread takes one of its own
        self._pool = ThreadPoolExecutor(1, "predicting")
        self._reader: Future[None] = self._pool.submit(self._read, n, until)
        self._reader.add_done_callback(lambda _: self._tell())

    def _tell(self) -> None:
        with self._change:
            self._change.notify_all()

    def _next(self) -> ReadSegment | None:
        """The next part; None if there is none, or `idle` says that there need not be."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ready or self._reader.done(), IDLE_EVERY)
                if self._ready:
                    self._change.notify_all()
                    return self._ready.popleft()
                if self._reader.done():
                    self._reader.result()  # its error is the run's
                    return None
            if self.idle():
                return None

    def _handed_out(self, part: ReadSegment, until: int | None) -> Tensor:
        images = part.images
        if self.drops:
            images = images[: None if until is None else until - self.position]
            part.account.pass_over(len(part.images) - len(images), "learner stopped")
            self.position += len(images)
        else:
            self.position = part.state["position"]
        self._state = part.state
        self.account.add(part.account)
        return images

    def _stop(self) -> None:
        """End the thread; the stream is then where the learner is."""
        self._ends = True
        self._tell()
        self._pool.shutdown()
        torch.set_num_threads(torch.get_num_threads())  # for threads to come: the reader has set it to its own
        if self.drops:
            for part in self._ready:
                part.account.pass_over(len(part.images), "learner stopped")
                self._state = part.state
                self.account.add(part.account)
        assert self._predictions is not None
        with suppress(OSError):  # a full disk, which was told of
            self._predictions.sync()
        self._predictions.close()
        self._predictions = None
        cut(self.path, self.account.classifiable)
        self.stream.load_state_dict(self.state_dict())

    # ------------------------------------------------------------------------------------------------------------
    # What the reader's thread does.

    def _read(self, n: int, until: int | None) -> None:
        torch.set_num_threads(1)  # of this thread
        with closing(self.stream.segments(n, None if self.drops else until)) as segments:
            for images in segments:
                if not self._as_they_come:
                    for part in images.split(AT_ONCE):
                        self._classify(part)
                self._put(images)
                if self._ends:
                    break
        self._told_to_end()
        self._put(torch.empty(0))

    def _told_to_end(self) -> bool:
        """The stream asks this when it has nothing, and often: what it has to say is kept for the learner's thread."""
        self._events.extend(self.stream.take_events())
        self._connections = self.stream.connections()
        return self._ends

    def _classify(self, images: Tensor, feed: int = 0) -> None:
        """A line for each image, with the version that is served at this moment."""
        assert self._predictions is not None
        if time.monotonic() >= self._looked + LOOK_EVERY:
            with suppress(OSError):  # a disk that cannot be read now: what is served is in memory
                self.served.look()
            self._looked = time.monotonic()
        version = self.served.current
        common: dict[str, Any] = {"version": None if version is None else version.number, "time": round(time.time(), 3)}
        if len(self.feeds) > 1:
            common["source"] = redacted(self.feeds[feed].where)
        guesses: list[tuple[str | None, float | None]] = [(None, None)] * len(images)
        if version is not None:
            probabilities, labels = version.probabilities(images).max(1)
            guesses = [
                (version.classes[label], round(probability, 4))
                for probability, label in zip(probabilities.tolist(), labels.tolist(), strict=True)
            ]
        lines = [
            {"image": self._image + i, "class": name, "probability": probability} | common
            for i, (name, probability) in enumerate(guesses)
        ]
        if self._predictions.write(*lines):
            self.stream.account.predicted += len(lines)
        self._image += len(lines)
        self._n_classified += len(lines)

    def _put(self, images: Tensor) -> None:
        """Ready for the learner. What waits does so here; of the rest the oldest that is ready goes."""
        part = ReadSegment(images, self.stream.state_dict(), self.stream.account)
        self.stream.account = Account()
        if self.drops:  # those of a segment that did not become whole were given back
            n_given_back = self._n_classified - len(images)
            part.account.passed.subtract({"stopped": n_given_back})
            part.account.passed["learner stopped"] += n_given_back
        self._n_classified = 0
        with self._change:
            if self.drops and self._ready and len(images):
                old = self._ready.popleft()
                old.account.pass_over(len(old.images), "learner busy")
                old.account.add(part.account)
                part.account = old.account
            self._ready.append(part)
            self._change.notify_all()
            if not self.drops:
                self._change.wait_for(lambda: not self._ready or self._ends)


def cut(path: Path, image: int) -> None:
    """Take the lines of an image and all later ones out of a file of predictions, and what is left of a broken line."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                with suppress(ValueError, KeyError, TypeError):  # a line that somebody damaged
                    if json.loads(content[start:end])["image"] < image:
                        break
                end = start
        file.truncate(end)
