"""Frames of cameras and recordings: each is read by a process of its own, and they meet here in one stream."""

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from streamclr.base.errors import UserError
from streamclr.base.options import redacted
from streamclr.streams.account import Account
from streamclr.streams.cameras import video
from streamclr.streams.cameras.feed import CAMERAS, MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Feed

REQUEST_SECONDS = 0.5  # how long a capture process waits for a first frame before it answers that there is none
ANSWER_SECONDS = 5.0  # beyond that, until a capture process counts as dead
START_SECONDS = 60.0  # for Python and its libraries on a slow and busy device
MAX_RESTARTS = 5  # of a process that never answered: no camera is the reason
MAX_EVENTS = 100  # kept until they are taken

Idle = Callable[[], bool]  # called while there is no frame; True ends the frames
# Frames, n x 3 x size x size; the name of their camera or recording; the path of each that has a file, or "".
Received = Callable[[np.ndarray, str, list[str]], None]


class Frames(NamedTuple):
    """Frames of one camera, with what is known of each."""

    pixels: np.ndarray  # n x size x size x 3
    regions: list[int]
    tracks: list[str]
    files: list[str]  # the path of each that has a file, or ""
    thumbnails: list[bytes]  # empty where there is none


def never() -> bool:
    return False


class CameraFrames:
    """The frames of one or several cameras and recordings, in the order in which they come. Needs no torch."""

    def __init__(self, feeds: list[Feed]):
        if len({feed.size for feed in feeds}) > 1:
            raise UserError("the sources have different sizes: give one size to all")
        self.feeds = feeds
        self.exact = all(feed.exact for feed in feeds)  # all of them are recordings that wait for the learner
        drops = {feed.drops for feed in feeds}
        self.overload = "mixed" if len(drops) > 1 else "drop" if True in drops else "wait"
        # A resumed run gets the same frames again, under the same numbers. Two watched directories come in any order.
        self.repeats = self.exact or ([feed.kind for feed in feeds] == ["watch"] and self.overload == "wait")
        self.position = 0  # frames handed out
        self.account = Account()
        self._events: deque[tuple[str, str]] = deque(maxlen=MAX_EVENTS)  # source, event
        self._captures: list[CaptureProcess] = []
        self._places: list[Any] = [feed.place for feed in feeds]
        self._over = [False for _ in feeds]  # recordings that were read to their end
        self._none = np.empty((0, 3, self.size, self.size), np.uint8)
        # Of each frame of the last segment a number, equal for those of one camera and, if it names them, one track.
        self.tracks_named = np.empty(0, np.int64)
        self.places = {name: place for feed in feeds for name, place in feed.places.items()}
        self.names = list(self.places)
        self.cameras = np.empty(0, np.int64)  # of each frame of the last segment: which of `names`
        self._thumbnails: list[bytes] = []  # of each frame of the last segment; empty where it has none
        self._is_told = [False for _ in feeds]
        self._told: list[str] = []  # what is seen of the frames, for a person

    @property
    def size(self) -> int:
        return self.feeds[0].size

    @property
    def fps(self) -> float | None:
        """Frames a second, if that is known before they come."""
        rates = [feed.fps or (video.frame_rate(feed.where) if feed.kind == "video" else None) for feed in self.feeds]
        known = [rate * len(feed.sights) for feed, rate in zip(self.feeds, rates, strict=True) if rate]
        return sum(known) if len(known) == len(rates) else None

    def measured_fps(self, seconds: float = 3.0) -> float | None:
        """How many frames a second arrive; an error if none does. None unless all are cameras.

        A directory or a pipe may be empty for good reasons.
        """
        if not all(feed.kind in CAMERAS for feed in self.feeds):
            return None
        cameras, started, n = CameraFrames(self.feeds), time.monotonic(), 0
        longest = max(feed.timeout for feed in self.feeds) + ANSWER_SECONDS
        is_over = lambda: time.monotonic() > started + (seconds if n else longest)  # noqa: E731
        with closing(cameras.frames(1, idle=is_over)) as frames:
            for _ in frames:
                started = started if n else time.monotonic()  # from the first frame on: a connection takes time
                n += 1
        if n < 2:
            why = [f"{source}: {event}" for source, event in cameras.take_events()] or ["connected, but no frames"]
            raise UserError(f"no frames in {longest:.0f} s ({'; '.join(why)}): check the source")
        return (n - 1) / seconds

    def frames(
        self,
        n: int,
        until: int | None = None,
        idle: Idle = never,
        arrived: Received | None = None,
        thumbnail_every: int = 0,
    ) -> Generator[np.ndarray]:
        """Segments of `n` frames, n x 3 x size x size; the arguments are those of `Stream.segments`."""
        how: dict[str, Any] = {"thumbnail_every": thumbnail_every}
        self._captures = [
            CaptureProcess(replace(feed, place=place, queue=max(feed.queue, 2 * n), **how), self._events, over)
            for feed, place, over in zip(self.feeds, self._places, self._over, strict=True)
        ]
        try:
            while until is None or self.position < until:
                frames = self._read(n if until is None else min(n, until - self.position), idle, arrived)
                if not len(frames):
                    break
                yield frames
        finally:
            self._close()

    def _read(self, n: int, idle: Idle, arrived: Received | None) -> np.ndarray:
        """The next `n` frames, fewer at the end; n x 3 x size x size, camera by camera."""
        parts: list[list[Frames]] = [[] for _ in self._captures]
        missing = n
        while missing and not all(capture.ended for capture in self._captures):
            if idle():
                for capture, own in zip(self._captures, parts, strict=True):
                    capture.give_back(sum(len(part.pixels) for part in own))  # only whole segments are learned from
                return self._none
            self._ask(missing)
            asked = {capture.answers: i for i, capture in enumerate(self._captures) if capture.asked is not None}
            ready, _, _ = select.select(list(asked), [], [], 2 * REQUEST_SECONDS if asked else MIN_RETRY_SECONDS)
            for fd, i in asked.items():
                part = self._captures[i].look(fd in ready)
                self._tell_sight(i)
                if len(part.pixels):
                    missing -= len(part.pixels)
                    parts[i].append(part)
                    if arrived and not self.exact:
                        self._tell_arrived([part], i, arrived)
                elif self.feeds[i].drops and not parts[i]:  # its account is of frames rejected or passed over alone
                    self.account.add(self._captures[i].account.take())
        if arrived and self.exact:  # now in the order of the segment, not in that of the fastest
            for i, own in enumerate(parts):
                self._tell_arrived(own, i, arrived)
        for capture in self._captures:
            self.account.add(capture.account.take())
        self._places = [capture.place for capture in self._captures]
        self._over = [capture.ended and capture.feed.exact for capture in self._captures]
        self.account.learned += n - missing
        self.position += n - missing
        return self._segment(parts)

    def _tell_arrived(self, parts: list[Frames], camera: int, arrived: Received) -> None:
        for region, frames in by_region(parts):
            arrived(frames.pixels.transpose(0, 3, 1, 2), self.names[self._first_name(camera) + region], frames.files)

    def _segment(self, parts: list[list[Frames]]) -> np.ndarray:
        """The frames of all cameras, region by region."""
        found = [
            (self._first_name(i) + region, frames) for i, own in enumerate(parts) for region, frames in by_region(own)
        ]
        self.cameras = np.array([camera for camera, frames in found for _ in frames.tracks], np.int64)
        named = [f"{camera} {track}" for camera, frames in found for track in frames.tracks]
        self.tracks_named = np.unique(named, return_inverse=True)[1]
        self._thumbnails = [thumbnail for _, frames in found for thumbnail in frames.thumbnails]
        return np.concatenate([self._none, *(frames.pixels.transpose(0, 3, 1, 2) for _, frames in found)])

    def _first_name(self, camera: int) -> int:
        """The place in `names` of a camera's first region."""
        return sum(len(feed.sights) for feed in self.feeds[:camera])

    def thumbnail(self, arrival: int) -> bytes | None:
        """A JPEG for people of a frame of the last segment, by its number; only every Nth has one."""
        return self._thumbnails[arrival - (self.position - len(self._thumbnails))] or None

    def _ask(self, missing: int) -> None:
        """Ask those that have frames for equal shares of what is missing, so that together they cannot send more."""
        waiting = [capture for capture in self._captures if not capture.ended and capture.is_up()]
        free = missing - sum(capture.asked or 0 for capture in waiting)
        # Recordings are asked once all of them have answered, so that the shares do not depend on their speed.
        late = any(capture.asked and capture.feed.exact for capture in waiting)
        idle = [c for c in waiting if c.asked is None and not (c.feed.exact and late)]
        able = [capture for capture in idle if capture.has_frames]
        weights = [len(capture.feed.sights) for capture in able]  # a camera with several regions is as many cameras
        for i, capture in enumerate(able):
            if share := -(-free * weights[i] // sum(weights[i:])):
                capture.ask(share)
                free -= share
        for capture in idle:
            if not capture.has_frames:
                capture.ask(0)  # whether it has frames now

    def _close(self) -> None:
        """End the capture processes. Frames of cameras that wait there are passed over."""
        for capture in self._captures:
            if capture.tells_at_the_end and capture.asked is None:
                capture.ask(0)
        deadline = time.monotonic() + ANSWER_SECONDS  # for all of them together: some may hang
        for capture in self._captures:
            capture.close(max(0.0, deadline - time.monotonic()))
            self.account.add(capture.account)
        self._captures = []

    def take_events(self) -> list[tuple[str, str]]:
        """Camera and event, such as a lost connection, since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def take_told(self) -> list[str]:
        """What is seen of each camera's frames, for a person, since the last call: once their size is known."""
        told, self._told = self._told, []
        return told

    def _tell_sight(self, i: int) -> None:
        capture = self._captures[i]
        if capture.frame_size is not None and not self._is_told[i]:
            self._is_told[i] = True
            for name, sight in zip(capture.feed.places, capture.feed.sights, strict=True):
                if text := sight.told(*capture.frame_size):
                    self._told.append(f"{name}: {text}")

    def connections(self) -> dict[str, tuple[bool, int]]:
        """For each camera whether it sends frames, and how often its connection was lost."""
        return {capture.name: (capture.connected, capture.n_lost) for capture in self._captures}

    def state_dict(self) -> dict[str, Any]:
        account = self.account.state_dict()
        return {"position": self.position, "account": account, "places": list(self._places), "over": list(self._over)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["places"]) != len(self.feeds):
            raise UserError(f"the saved stream has {len(state['places'])} sources, this one {len(self.feeds)}")
        self.position, self.account = state["position"], Account.of(state["account"])
        self._places = list(state["places"])
        self._over = list(state.get("over", self._over))  # older checkpoints have none


class CaptureProcess:
    """The process that reads one camera or recording; restarted if it does not answer or its driver hangs.

    events: its events are added there, with its name.
    ended: nothing is left of a recording.
    """

    def __init__(self, feed: Feed, events: deque[tuple[str, str]], ended: bool):
        self.feed, self.name, self.place = feed, feed.name, feed.place
        self.ended, self.connected = ended, False
        self.has_frames = feed.exact  # a recording always has frames; a camera if its last answer says so
        self.n_lost = 0
        self.frame_size: tuple[int, int] | None = None  # of the first frame
        self._n_died = 0  # in a row, without an answer between
        self._has_answered = False
        self._patience = ANSWER_SECONDS
        self._down_until: float | None = None
        self.account = Account()  # of the frames received since it was last taken
        self._events = events
        self._start()

    def _start(self) -> None:
        feed = replace(self.feed, place=self.place)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "streamclr.streams.cameras.capture"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(int(feed.where),) if feed.kind == "stdin" else (),
            start_new_session=True,  # Ctrl-C goes to the learner, which then ends this process
        )
        assert self._process.stdout is not None
        self.answers = self._process.stdout.fileno()
        self.asked: int | None = None  # number of frames, while the answer is outstanding
        self._captured = self._accounted = 0  # frames that the process has read, and those of them in an account
        self._deadline = time.monotonic() + START_SECONDS
        self._tell(asdict(feed))

    def ask(self, most: int) -> None:
        self.asked, self._deadline = most, max(self._deadline, time.monotonic() + REQUEST_SECONDS + ANSWER_SECONDS)
        self._tell({"frames": most, "seconds": REQUEST_SECONDS})

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._deadline = 0.0  # the process has ended

    def look(self, is_ready: bool) -> Frames:
        """The frames that have come, perhaps none."""
        try:
            if is_ready:
                return self._answer()
            if time.monotonic() < self._deadline:
                return self._none()
            why = "the capture process does not answer"
        except UserError:
            raise
        except (OSError, EOFError, ValueError) as error:
            why = f"the capture process ended ({error})"
        self._n_died += 1
        if self._n_died == MAX_RESTARTS and not self._has_answered:
            raise UserError(f"the capture process of {self.name} does not start: see its errors above")
        self._lost([why])
        self._end("capture restarted")
        self._down_until = time.monotonic() + min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2 ** min(10, self._n_died))
        return self._none()

    def is_up(self) -> bool:
        """Whether it can be asked; a dead process is restarted after a pause."""
        if self._down_until is not None and time.monotonic() >= self._down_until:
            self._down_until = None
            self._start()
        return self._down_until is None

    def _answer(self) -> Frames:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self._exactly(1)
        header = json.loads(line)
        if header["error"]:
            raise UserError(f"{self.name}: {header['error']}")
        size = self.feed.size
        content = self._exactly(header["n"] * size**2 * 3)
        pixels = np.frombuffer(content, np.uint8).reshape(-1, size, size, 3)
        thumbnails = [bytes(self._exactly(n)) for n in header["thumbnails"]]
        frames = Frames(pixels, header["regions"], header["tracks"], header["files"], thumbnails)
        self.frame_size = self.frame_size or header["frame"]
        asked, self.asked = self.asked or 0, None
        self._n_died, self._has_answered = 0, True
        self._captured = header["captured"]
        own = Account.of(header["account"])
        self._accounted += own.received
        self.account.add(own)
        self._lost(header["events"])
        self._events.extend((self.name, f"rejected: {redacted(frame)}") for frame in header["rejected"])
        self.ended = header["ended"]
        self.has_frames = header["n"] + header["waiting"] > 0 or self.feed.exact
        if header["place"] is not None:
            self.place = header["place"]
        if header["n"]:
            if self.n_lost and not self.connected:
                self._events.append((self.name, "frames again"))
            self.connected = True
        if header["quiet"] > self.feed.timeout + ANSWER_SECONDS and self.feed.kind in CAMERAS and not header["n"]:
            raise TimeoutError(f"no sign of life for {header['quiet']:.0f} s")
        if self.feed.exact and not (header["n"] or self.ended):
            self.ask(asked)  # it keeps its share until it can send all of it, so that the order is always the same
        return frames

    def _lost(self, reasons: list[str]) -> None:
        self._events.extend((self.name, redacted(reason)) for reason in reasons)
        self.n_lost += len(reasons)
        self.connected &= not reasons

    def _none(self) -> Frames:
        return Frames(np.empty((0, self.feed.size, self.feed.size, 3), np.uint8), [], [], [], [])

    def give_back(self, n: int) -> None:
        """Frames that were received and will not be learned from; what waits for the learner sends them again."""
        if self.feed.drops:
            self.account.passed["stopped"] += n
        else:
            self.account = Account()

    def close(self, patience: float) -> None:
        """Take its last account, for which it has `patience` seconds, and end it."""
        if self.tells_at_the_end:
            self._patience = patience
            with suppress(OSError, EOFError, ValueError):
                self.give_back(len(self._answer().pixels))
        self._end("stopped")

    @property
    def tells_at_the_end(self) -> bool:
        return self.feed.drops and not self.ended and self._down_until is None

    def _end(self, reason: str) -> None:
        """Kill it. Frames of a camera that wait in it are passed over; a recording sends its frames again."""
        waiting = self._captured - self._accounted
        if self.feed.drops and waiting:
            self.account.add(Account(received=waiting, passed=Counter({reason: waiting})))
        self.asked, self._captured, self._accounted = None, 0, 0
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver that hangs in the kernel keeps a killed process
            self._process.wait(1)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _exactly(self, n: int) -> bytearray:
        content = bytearray(n)
        view = memoryview(content)
        while view:
            if not select.select([self.answers], [], [], self._patience)[0]:
                raise TimeoutError("it stopped in the middle of an answer")
            if not (count := os.readv(self.answers, [view])):
                raise EOFError("no more answers")
            view = view[count:]
        return content


def by_region(parts: list[Frames]) -> list[tuple[int, Frames]]:
    """The frames of one camera, region by region, each in the order in which they came."""
    if not parts:
        return []
    pixels = np.concatenate([part.pixels for part in parts])
    regions = np.array([region for part in parts for region in part.regions])
    tracks = [track for part in parts for track in part.tracks]
    files = [file for part in parts for file in part.files]
    thumbnails = [thumbnail for part in parts for thumbnail in part.thumbnails]
    found = []
    for region in sorted(set(regions.tolist())):
        rows = np.flatnonzero(regions == region).tolist()
        own = [tracks[row] for row in rows], [files[row] for row in rows], [thumbnails[row] for row in rows]
        found.append((region, Frames(pixels[rows], [region] * len(rows), *own)))
    return found
