"""Frames of cameras and recordings: each is taken by a process of its own, and they meet here in one stream."""

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from streamclr.base.errors import UserError
from streamclr.base.options import redacted
from streamclr.streams.account import Account
from streamclr.streams.cameras import video
from streamclr.streams.cameras.feed import CAMERAS, LONGEST_WAIT, SHORTEST_WAIT, Feed

ANSWER_WITHIN = 5.0  # seconds beyond those that were asked for
START_WITHIN = 60.0  # seconds for Python and its libraries on a slow and busy device
LOOK_EVERY = 0.5  # seconds: how long an ask waits for a first frame
MOST_DEATHS = 5  # of a process that never answered: that is no camera's fault
N_EVENTS = 100  # that are kept until somebody takes them


class Live:
    """The frames of one or several feeds, in the order in which they come; unlabelled.

    idle: called at least every few seconds while there is no frame; they end if it says True.
    arrived: called with frames as they come, before they are a whole segment, and the number of their feed.
    """

    live = True
    classes: tuple[str, ...] = ()
    n_images = epoch = train = test = None

    def __init__(self, feeds: list[Feed]):
        if len({feed.size for feed in feeds}) > 1:
            raise UserError("the sources have different sizes: give one size to all")
        self.feeds, self.size = feeds, feeds[0].size
        self.position = 0  # frames handed out
        self.account = Account()
        self._events: list[tuple[str, str]] = []  # the source, and what happened to it
        self.idle: Callable[[], bool] = lambda: False
        self.arrived: Callable[[np.ndarray, int], None] = lambda frames, feed: None
        self._captures: list[CaptureProcess] = []
        self._places: list[Any] = [feed.place for feed in feeds]
        self._over = [False for _ in feeds]  # recordings of which nothing is left

    @property
    def source(self) -> "Live":
        return self

    @property
    def exact(self) -> bool:
        """Whether all of them are recordings."""
        return all(feed.exact for feed in self.feeds)

    @property
    def fps(self) -> float | None:
        """Frames a second, as far as it is known before they come."""
        rates = [feed.fps or (video.frame_rate(feed.where) if feed.kind == "video" else None) for feed in self.feeds]
        known = [rate for rate in rates if rate]
        return sum(known) if len(known) == len(rates) else None

    def measured_fps(self, seconds: float = 3.0) -> float:
        """How many frames a second really come; an error if none does."""
        live, started, n = Live(self.feeds), time.monotonic(), 0
        longest = max(feed.timeout for feed in self.feeds) + ANSWER_WITHIN
        live.idle = lambda: time.monotonic() > started + (seconds if n else longest)
        with closing(live.frames(1)) as frames:
            for _ in frames:
                started = started if n else time.monotonic()  # the first may have taken a connection
                n += 1
        if n < 2:
            why = [f"{source}: {event}" for source, event in live.take_events()] or ["it connects, and is silent"]
            raise UserError(f"no frames in {longest:.0f} s ({'; '.join(why)}): check the source")
        return (n - 1) / seconds

    def frames(self, n: int, until: int | None = None) -> Generator[np.ndarray]:
        """Segments of `n` frames until all feeds have ended, or until frame number `until`; the last may be smaller."""
        if n < 1:
            raise UserError(f"the segment size is {n}: use at least 1")

        def generate() -> Generator[np.ndarray]:
            self._captures = [
                CaptureProcess(replace(feed, place=place, queue=max(feed.queue, 2 * n)))
                for feed, place in zip(self.feeds, self._places, strict=True)
            ]
            for capture, over in zip(self._captures, self._over, strict=True):
                capture.ended = over
            try:
                while until is None or self.position < until:
                    frames = self._read(n if until is None else min(n, until - self.position))
                    if not len(frames):
                        break
                    yield frames
            finally:
                self.close()

        return generate()

    def _read(self, n: int) -> np.ndarray:
        """The next `n` frames, fewer at the end; n x 3 x size x size, feed by feed."""
        parts: list[list[np.ndarray]] = [[] for _ in self._captures]
        missing = n
        while missing and not all(capture.ended for capture in self._captures):
            if self.idle():
                for capture in self._captures:  # what is not a whole segment is not learned from
                    capture.give_back(sum(map(len, parts[self._captures.index(capture)])))
                return self._none
            self._ask(missing)
            asked = {capture.answers: i for i, capture in enumerate(self._captures) if capture.asked is not None}
            ready, _, _ = select.select(list(asked), [], [], 2 * LOOK_EVERY if asked else SHORTEST_WAIT)
            for fd, i in asked.items():
                frames = self._captures[i].look(fd in ready)
                if len(frames):
                    missing -= len(frames)
                    parts[i].append(frames.transpose(0, 3, 1, 2))
                    self.arrived(parts[i][-1], i)
                elif self.feeds[i].drops and not parts[i]:  # rejected and passed over, with no frame that is still held
                    self.account.add(self._captures[i].take_account())
                self._note_events(self._captures[i])
        for capture in self._captures:
            self.account.add(capture.take_account())
        self._places = [capture.place for capture in self._captures]
        self._over = [capture.ended and capture.feed.exact for capture in self._captures]
        self.account.learned += n - missing
        self.position += n - missing
        return np.concatenate([self._none, *(frames for own in parts for frames in own)])

    @property
    def _none(self) -> np.ndarray:
        return np.empty((0, 3, self.size, self.size), np.uint8)

    def _ask(self, missing: int) -> None:
        """Share what is missing among the feeds that have frames, so that together they cannot send more."""
        waiting = [capture for capture in self._captures if not capture.ended and capture.is_up()]
        free = missing - sum(capture.asked or 0 for capture in waiting)
        # Recordings are asked when all have answered, so that who gives how much does not depend on who is fast.
        late = any(capture.asked and capture.feed.exact for capture in waiting)
        idle = [c for c in waiting if c.asked is None and not (c.feed.exact and late)]
        able = [capture for capture in idle if capture.has_frames]
        for i, capture in enumerate(able):
            if share := -(-free // (len(able) - i)):
                capture.ask(share)
                free -= share
        for capture in idle:
            if not capture.has_frames:
                capture.ask(0)  # only whether it has some now

    def close(self) -> None:
        """End the capture processes. What waited there is passed over."""
        for capture in self._captures:
            capture.ask_for_the_last()
        deadline = time.monotonic() + ANSWER_WITHIN  # for all of them together: some may hang
        for capture in self._captures:
            capture.close(max(0.0, deadline - time.monotonic()))
            self.account.add(capture.take_account())
            self._note_events(capture)
        self._captures = []

    def _note_events(self, capture: "CaptureProcess") -> None:
        where = redacted(capture.feed.where)
        self._events += [(where, redacted(event)) for event in capture.take_events()]
        del self._events[:-N_EVENTS]

    def take_events(self) -> list[tuple[str, str]]:
        """What happened to which source since this was last asked."""
        events, self._events = self._events, []
        return events

    def connections(self) -> dict[str, tuple[bool, int]]:
        """For each source whether frames come from it, and how often it was lost."""
        return {redacted(c.feed.where): (c.connected, c.n_lost) for c in self._captures}

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
    """The process of one feed: asked for frames, started anew when it does not answer or its driver hangs."""

    def __init__(self, feed: Feed):
        self.feed = feed
        self.place = feed.place
        self.ended = self.connected = False
        self.has_frames = feed.exact  # a recording always has; a camera, if its last answer says so
        self.n_lost = 0
        self._n_died = 0  # in a row, without an answer
        self._has_answered = False
        self._patience = ANSWER_WITHIN
        self._down_until: float | None = None
        self._account = Account()  # of the frames that were answered since it was last taken
        self._events: list[str] = []
        self._start()

    def _start(self) -> None:
        feed = replace(self.feed, place=self.place)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "streamclr.streams.cameras.capture"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(int(feed.where),) if feed.kind == "stdin" else (),
            start_new_session=True,  # Ctrl-C is for the learner, which then ends this
        )
        assert self._process.stdout is not None
        self.answers = self._process.stdout.fileno()
        self.asked: int | None = None  # frames, until they are answered
        self._captured = self._accounted = 0  # frames of this process in all, and of them in an account
        self._deadline = time.monotonic() + START_WITHIN
        self._tell(asdict(feed))

    def ask(self, most: int) -> None:
        self.asked, self._deadline = most, max(self._deadline, time.monotonic() + LOOK_EVERY + ANSWER_WITHIN)
        self._tell({"frames": most, "seconds": LOOK_EVERY})

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._deadline = 0.0  # it has ended

    def look(self, is_ready: bool) -> np.ndarray:
        """The frames that have come, n x size x size x 3, perhaps none."""
        try:
            if is_ready:
                return self._answer()
            if time.monotonic() < self._deadline:
                return self._frames(bytearray())
            why = "the capture process does not answer"
        except (OSError, EOFError, ValueError) as error:
            why = f"the capture process ended ({error})"
        self._n_died += 1
        if self._n_died == MOST_DEATHS and not self._has_answered:
            raise UserError(f"the capture process of {redacted(self.feed.where)} never comes to work: see above")
        self._lost([why])
        self._end("capture restarted")
        self._down_until = time.monotonic() + min(LONGEST_WAIT, SHORTEST_WAIT * 2 ** min(10, self._n_died))
        return self._frames(bytearray())

    def is_up(self) -> bool:
        """Whether it can be asked; one that died is started again after a while."""
        if self._down_until is not None and time.monotonic() >= self._down_until:
            self._down_until = None
            self._start()
        return self._down_until is None

    def _answer(self) -> np.ndarray:
        header = json.loads(self._line())
        frames = self._frames(self._exactly(header["n"] * self.feed.size**2 * 3))
        asked, self.asked = self.asked or 0, None
        self._n_died, self._has_answered = 0, True
        self._captured = header["captured"]
        own = Account.of(header["account"])
        self._accounted += own.received
        self._account.add(own)
        self._lost(header["events"])
        self.ended = header["ended"]
        self.has_frames = header["n"] + header["waiting"] > 0 or self.feed.exact
        if header["place"] is not None:
            self.place = header["place"]
        if header["n"]:
            if self.n_lost and not self.connected:
                self._events.append("frames again")
            self.connected = True
        if header["quiet"] > self.feed.timeout + ANSWER_WITHIN and self.feed.kind in CAMERAS and not header["n"]:
            raise TimeoutError(f"no sign of life for {header['quiet']:.0f} s")
        if self.feed.exact and not (header["n"] or self.ended):
            self.ask(asked)  # not yet all of them: nobody else may take its share, so that the order is always the same
        return frames

    def _lost(self, reasons: list[str]) -> None:
        self._events += reasons
        self.n_lost += len(reasons)
        self.connected &= not reasons

    def _frames(self, content: bytearray) -> np.ndarray:
        side = self.feed.size
        return np.frombuffer(content, np.uint8).reshape(len(content) // (3 * side**2), side, side, 3)

    def take_account(self) -> Account:
        account, self._account = self._account, Account()
        return account

    def take_events(self) -> list[str]:
        events, self._events = self._events, []
        return events

    def give_back(self, n: int) -> None:
        """Frames that were answered and will not be learned from: a recording gives them again next time."""
        if self.feed.drops:
            self._account.passed["stopped"] += n
        else:
            self._account = Account()

    def ask_for_the_last(self) -> None:
        if self._tells_at_the_end and self.asked is None:
            self.ask(0)

    def close(self, patience: float) -> None:
        """After a last look at its account, which it has some seconds to give."""
        if self._tells_at_the_end:
            self._patience = patience
            with suppress(OSError, EOFError, ValueError):
                self.give_back(len(self._answer()))
        self._end("stopped")

    @property
    def _tells_at_the_end(self) -> bool:
        return self.feed.drops and not self.ended and self._down_until is None

    def _end(self, reason: str) -> None:
        """Kill it, whatever it hangs in. The frames that wait in it are passed over, those of a recording are not."""
        waiting = self._captured - self._accounted
        if self.feed.drops and waiting:
            self._account.add(Account(received=waiting, passed=Counter({reason: waiting})))
        self.asked, self._captured, self._accounted = None, 0, 0
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver that hangs in the kernel holds even the dead
            self._process.wait(1)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self._exactly(1)
        return bytes(line)

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
