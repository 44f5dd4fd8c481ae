"""Reads one camera or recording in a process of its own, because a driver can hang without end.

`python -m streamclr.streams.cameras.capture` reads its feed as a line of JSON from standard input (an argument could be
seen by every user of the machine, and URLs have passwords). Then it answers requests on standard output:

    request {"frames": the most frames to send, "seconds": how long to wait for the first}
    answer  {"n": frames that follow, "account": of frames since the last answer, "place": where to resume after them,
            "waiting": frames left in the queue, "captured": frames read in all, "quiet": seconds since a sign of life,
            "regions": [of each of these frames], "tracks": [the same], "files": [the same],
            "thumbnails": [bytes of each one's JPEG, or 0], "frame": [width and height of the first frame],
            "ended": true if there will be no more, "error": what the user has to correct,
            "events": [reasons why the connection was lost],
            "rejected": [the first frames that cannot be used, and why]},
            then n x size x size x 3 bytes, then the JPEGs

A frame of a camera with several regions counts as one frame of each region.

It ends when its standard input does. It never imports torch: a device may have many cameras.
"""

import base64
import json
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from streamclr.base.errors import UserError
from streamclr.streams.account import MAX_NAMED, Account
from streamclr.streams.cameras.feed import CONNECTION_ERRORS, MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Feed, Raw
from streamclr.streams.cameras.gates import CELLS, Hours, MotionGate
from streamclr.streams.frame import BadFrame, Frame
from streamclr.streams.sight import spare, spare_of_thumbnails


class Place(NamedTuple):
    """Where a source goes on after a frame. Older checkpoints have only the first three."""

    mark: Any = None  # the source's own
    due: float = 0.0  # when the next frame is due, if fps is given
    n_frames: int = 0  # before
    n_regions: int = 0  # of the next frame that have been handed out already
    moved: tuple[Any, ...] = ()  # for each region the last frame in which something moved: cells, or their bytes

    def as_json(self) -> list[Any]:
        moved = [None if cells is None else base64.b64encode(cells.tobytes()).decode() for cells in self.moved]
        return [*self[:4], moved]

    @classmethod
    def of(cls, content: tuple[Any, ...]) -> "Place":
        place = cls(*content)
        kept = [None if text is None else np.frombuffer(base64.b64decode(text), np.uint8) for text in place.moved]
        return place._replace(moved=tuple(None if cells is None else cells.reshape(CELLS, CELLS) for cells in kept))


class Waiting(NamedTuple):
    """What a region shows of a frame, while it waits to be handed out."""

    pixels: np.ndarray  # size x size x 3
    region: int
    track: str
    file: str
    thumbnail: bytes
    place: Place  # after it
    account: Account  # of it, and of the frames before it that were not queued


class CaptureThread:
    """A thread that reads frames into a bounded queue."""

    def __init__(self, feed: Feed):
        self.feed = feed
        self.captured = 0
        self.ended = False
        self.error = ""
        self.events: list[str] = []
        self.rejected: list[str] = []  # since the last answer
        self._n_named = 0
        self._queue: deque[Waiting] = deque()
        self._since = Account()  # of the frames since the last one that was queued
        self._change = threading.Condition()
        self._sign_of_life = time.monotonic()
        self._place = Place.of(feed.place)  # after the last frame, queued or not
        self._count = self._place.n_frames  # frames so far, with those of earlier processes
        self._due = self._place.due if feed.kind == "video" else 0.0  # when the next frame is due, if fps is given
        self._hours = None if feed.between is None else Hours.parse(feed.between)
        moved = self._place.moved or [None] * len(feed.sights)
        self._gates = [] if feed.motion is None else [MotionGate(feed.motion, cells) for cells in moved]
        self._n_queued = [0] * len(feed.sights)  # for each region
        self._frame_size: tuple[int, int] | None = None  # of the first frame
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._take_all()
        except UserError as error:
            self.error = str(error)
        finally:  # a bug here must end the stream, not look like a camera without frames
            with self._change:
                self.ended = True
                self._change.notify_all()

    def _take_all(self) -> None:
        feed, n_failed = self.feed, 0
        while not self.ended:
            n_before = self.captured
            try:
                for raw in feed.open(self._place.mark):
                    self._take(raw)
                    self._sign_of_life = time.monotonic()
                why = "" if feed.ends else "the stream ended"
            except UserError:
                raise
            except CONNECTION_ERRORS as error:
                why = str(error) or type(error).__name__
            except Exception as error:
                if feed.ends:
                    raise
                why = f"{type(error).__name__}: {error}"
            n_failed = 0 if self.captured > n_before else n_failed + 1
            with self._change:
                self._sign_of_life = time.monotonic()
                self.ended = feed.ends or (feed.retries is not None and n_failed > feed.retries)
                if why and n_failed <= 1:  # report a lost camera once
                    self.events.append(why)
                self._change.notify_all()
            if not self.ended:
                time.sleep(min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2**n_failed) * random.uniform(0.5, 1.0))

    def _take(self, raw: Raw) -> None:
        """Decode a frame and queue what its regions show, or note why not."""
        before, n_regions = self._place, len(self.feed.sights)
        n_new = n_regions - before.n_regions
        self.captured += n_new
        self._count += 1
        reason, rejected, frame = self._passes_over(raw), "", None
        try:
            frame = None if reason else self._decoded(raw)
        except BadFrame as error:
            rejected = self._named(error)
        after = Place(raw.mark, self._due, self._count)
        if frame is None:
            self._note(n_new, reason, rejected, after._replace(moved=self._moved()))
            return
        for region in range(before.n_regions, n_regions):
            self._take_region(region, raw, frame, before if region < n_regions - 1 else after)

    def _named(self, error: BadFrame) -> str:
        """The reason of an error; the first few frames are told by name."""
        self._n_named += 1
        if self._n_named <= MAX_NAMED:
            self.rejected.append(str(error))
        return error.reason

    def _take_region(self, region: int, raw: Raw, frame: Frame, place: Place) -> None:
        """place: before the frame, or after it for the last region."""
        feed, track, pixels, reason, rejected = self.feed, raw.track, None, "", ""
        try:
            pixels = feed.sights[region].square(frame, feed.size)
            if self._gates:
                gate, now = self._gates[region], raw.seconds if raw.taken is None else raw.taken
                reason = "" if gate.lets_through(pixels, time.monotonic() if now is None else now) else "no motion"
                track = f"{track} {gate.n_scenes}"
        except BadFrame as error:
            rejected = self._named(error)
        if place.n_frames < self._count:
            place = place._replace(n_regions=region + 1)
        place = place._replace(moved=self._moved())
        if pixels is None or reason:
            self._note(1, reason, rejected, place)
            return
        thumbnail = b""
        if feed.thumbnail_every and self._n_queued[region] % feed.thumbnail_every == 0:
            with suppress(BadFrame):
                thumbnail = feed.sights[region].thumbnail(self._large(raw, frame))
        self._n_queued[region] += 1
        with self._change:
            self._since.add(Account(1))
            self._place = place
            while len(self._queue) >= feed.queue:
                if feed.drops:
                    oldest = self._queue.popleft().account
                    oldest.passed["overload"] += 1
                    first = self._queue[0].account if self._queue else self._since
                    first.add(oldest)
                else:
                    self._change.wait(1)
                    self._sign_of_life = time.monotonic()
            self._queue.append(Waiting(pixels, region, track, raw.file, thumbnail, place, self._since.take()))
            self._change.notify_all()

    def _note(self, n: int, passed: str, rejected: str, place: Place) -> None:
        """Frames that are not queued."""
        with self._change:
            why = Counter({passed: n} if passed else {}), Counter({rejected: n} if rejected else {})
            self._since.add(Account(n, 0, *why))
            self._place = place

    def _moved(self) -> tuple[Any, ...]:
        return tuple(gate.last for gate in self._gates)

    def _decoded(self, raw: Raw) -> Frame:
        feed = self.feed
        frame = raw.decode(partial(spare, feed.sights, feed.size))
        if self._frame_size is None:
            self._frame_size = frame.size
            if not self._place.n_frames:  # else it was right before: the frame is rejected
                for sight in feed.sights:
                    sight.check(*frame.size)
        return frame

    def _large(self, raw: Raw, frame: Frame) -> Frame:
        """The frame with enough pixels for a thumbnail: decoded again if too few were needed of it."""
        large = partial(spare_of_thumbnails, self.feed.sights)
        is_enough = frame.size[0] / frame.image.width <= max(1.0, large(*frame.size))
        return frame if is_enough else raw.decode(large)

    def _passes_over(self, raw: Raw) -> str:
        if self._hours and not self._hours.include(time.time() if raw.taken is None else raw.taken):
            return "between"
        if (self._count - 1) % self.feed.every:
            return "every"
        if self.feed.fps is not None:
            now, period = time.monotonic() if raw.seconds is None else raw.seconds, 1 / self.feed.fps
            if now < self._due - 1e-6:
                return "fps"
            # A period after this frame was due, which keeps the mean rate; after a pause, a period from now.
            self._due = (self._due if now < self._due + period else now) + period
        return ""

    def fetch(self, n_max: int, seconds: float) -> tuple[dict[str, Any], list[Waiting]]:
        """The answer to a request: the oldest waiting frames, as soon as there is one or the time is over."""
        with self._change:
            # A recording waits for one more than asked for. Then it is known whether these are the last ones, and the
            # order in which several recordings are asked does not depend on their speed.
            enough = n_max + 1 if self.feed.exact else 1
            self._change.wait_for(lambda: len(self._queue) >= enough or self.ended, seconds)
            n = min(n_max, len(self._queue)) if self.ended or len(self._queue) >= enough else 0
            taken = [self._queue.popleft() for _ in range(n)]
            account = Account()
            for one in taken:
                account.add(one.account)
            place = taken[-1].place if taken else None
            done = self.ended and not self._queue
            if self.feed.drops or done:
                account.add(self._since.take())
            answer = {
                "n": len(taken),
                "regions": [one.region for one in taken],
                "tracks": [one.track for one in taken],
                "files": [one.file for one in taken],
                "thumbnails": [len(one.thumbnail) for one in taken],
                "account": account.state_dict(),
                "place": self._place.as_json() if done else place.as_json() if place else None,
                "waiting": len(self._queue),
                "captured": self.captured,
                "quiet": time.monotonic() - self._sign_of_life,
                "frame": self._frame_size,
                "ended": done,
                "error": self.error,
                "events": self.events,
                "rejected": self.rejected,
            }
            self.events, self.rejected = [], []
            self._change.notify_all()
        return answer, taken


def serve(asks: BinaryIO, answers: BinaryIO) -> None:
    capture = CaptureThread(Feed.of(json.loads(asks.readline())))
    for line in asks:
        ask = json.loads(line)
        answer, frames = capture.fetch(ask["frames"], ask["seconds"])
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.writelines(one.pixels.tobytes() for one in frames)
        answers.writelines(one.thumbnail for one in frames)
        answers.flush()


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the learner has ended
        serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # does not wait for the thread, which may hang in a driver
