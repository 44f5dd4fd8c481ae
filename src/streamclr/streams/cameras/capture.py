"""Frames of one camera or recording, taken in a process of its own, because a driver's read can hang for ever.

`python -m streamclr.streams.cameras.capture` reads its feed (JSON, one line; not an argument, which everybody may see:
a URL has passwords) and then answers on standard output what is asked on standard input:

    ask     {"frames": at most so many, "seconds": how long to wait for the first}
    answer  {"n": frames that follow, "account": what became of others since the last answer, "place": where a recording
            goes on after them, "waiting": frames that could follow, "captured": frames in all, "quiet": seconds without
            a sign of life, "ended": true if there will be no more, "events": [what happened to the connection]},
            and n x size x size x 3 bytes

It ends when its standard input does. It never imports torch: a device may have many cameras.
"""

import json
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from streamclr.streams.account import Account
from streamclr.streams.cameras.feed import CONNECTION_ERRORS, MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Feed, Raw
from streamclr.streams.frame import BadFrame


class CaptureThread:
    """A thread that takes frames, and a bounded queue from which they are fetched."""

    def __init__(self, feed: Feed):
        self.feed = feed
        self.captured = 0
        self.ended = False
        self.events: list[str] = []
        self._queue: deque[tuple[np.ndarray, tuple[Any, float, int], Account]] = deque()
        self._since = Account()  # what became of frames since the last one that was queued
        self._change = threading.Condition()
        self._sign_of_life = time.monotonic()
        self._place = feed.place  # after the last frame, whatever became of it
        _, due, self._count = feed.place  # frames before, those of an earlier process included
        self._due = due if feed.kind == "video" else 0.0  # when to take a frame, if there is a rate to keep
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._take_all()
        finally:  # a bug in here ends the stream: it must not look like a camera without frames
            with self._change:
                self.ended = True
                self._change.notify_all()

    def _take_all(self) -> None:
        feed, n_failed = self.feed, 0
        while not self.ended:
            n_before = self.captured
            try:
                for raw in feed.open(self._place[0]):
                    self._take(raw)
                    self._sign_of_life = time.monotonic()
                why = "" if feed.ends else "the stream ended"
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
                if why and n_failed <= 1:  # a camera that stays away is told of once
                    self.events.append(why)
                self._change.notify_all()
            if not self.ended:
                time.sleep(min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2**n_failed) * random.uniform(0.5, 1.0))

    def _take(self, raw: Raw) -> None:
        """Decode a frame and queue it; it is in the account once it is known what becomes of it."""
        self.captured += 1
        self._count += 1
        reason, frame = self._passes_over(raw), None
        try:
            frame = None if reason else raw.decode(self.feed.size)
            rejected = Counter[str]()
        except BadFrame as error:
            rejected = Counter([error.reason])
        with self._change:
            self._since.add(Account(1, 0, Counter([reason] if reason else []), rejected))
            self._place = (raw.place, self._due, self._count)
            if frame is None:
                return
            while len(self._queue) >= self.feed.queue:
                if self.feed.drops:
                    _, _, oldest = self._queue.popleft()
                    oldest.passed["overload"] += 1
                    first = self._queue[0][2] if self._queue else self._since
                    first.add(oldest)
                else:
                    self._change.wait(1)
                    self._sign_of_life = time.monotonic()
            self._queue.append((frame, self._place, self._since))
            self._since = Account()
            self._change.notify_all()

    def _passes_over(self, raw: Raw) -> str:
        if (self._count - 1) % self.feed.every:
            return "every"
        if self.feed.fps is not None:
            now, period = time.monotonic() if raw.seconds is None else raw.seconds, 1 / self.feed.fps
            if now < self._due - 1e-6:
                return "fps"
            # A period after this one was due, so that the mean rate is kept; after a pause a period from now.
            self._due = (self._due if now < self._due + period else now) + period
        return ""

    def fetch(self, most: int, seconds: float) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The answer to one ask: the oldest frames that wait, once there is one or the time is over."""
        with self._change:
            # Of a recording one more than asked: only then it is known whether these are the last, and whom to ask next
            # does not depend on who is fast.
            enough = most + 1 if self.feed.exact else 1
            self._change.wait_for(lambda: len(self._queue) >= enough or self.ended, seconds)
            n = min(most, len(self._queue)) if self.ended or len(self._queue) >= enough else 0
            taken = [self._queue.popleft() for _ in range(n)]
            account = Account()
            for _, _, own in taken:
                account.add(own)
            done = self.ended and not self._queue
            if self.feed.drops or done:
                account.add(self._since)
                self._since = Account()
            answer = {
                "n": len(taken),
                "account": account.state_dict(),
                "place": self._place if done else taken[-1][1] if taken else None,
                "waiting": len(self._queue),
                "captured": self.captured,
                "quiet": time.monotonic() - self._sign_of_life,
                "ended": done,
                "events": self.events,
            }
            self.events = []
            self._change.notify_all()
        return answer, [frame for frame, _, _ in taken]


def serve(asks: BinaryIO, answers: BinaryIO) -> None:
    capture = CaptureThread(Feed(**json.loads(asks.readline())))
    for line in asks:
        ask = json.loads(line)
        answer, frames = capture.fetch(ask["frames"], ask["seconds"])
        answers.write(json.dumps(answer).encode() + b"\n")
        for frame in frames:
            answers.write(frame.tobytes())
        answers.flush()


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the learner is gone
        serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # not waiting for a thread that may hang in a driver
