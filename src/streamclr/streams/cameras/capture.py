"""Reads one camera or recording in a process of its own, because a driver can hang without end.

`python -m streamclr.streams.cameras.capture` reads its feed as a line of JSON from standard input (an argument could be
seen by every user of the machine, and URLs have passwords). Then it answers requests on standard output:

    request {"frames": the most frames to send, "seconds": how long to wait for the first}
    answer  {"n": frames that follow, "account": of frames since the last answer, "place": where to resume after them,
            "waiting": frames left in the queue, "captured": frames read in all, "quiet": seconds since a sign of life,
            "tracks", "files": [of each of these frames], "ended": true if there will be no more,
            "events": [reasons why the connection was lost]}, then n x size x size x 3 bytes

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
    """A thread that reads frames into a bounded queue."""

    def __init__(self, feed: Feed):
        self.feed = feed
        self.captured = 0
        self.ended = False
        self.events: list[str] = []
        self._queue: deque[tuple[np.ndarray, tuple[Any, float, int], Account, str, str]] = deque()
        self._since = Account()  # of the frames since the last one that was queued
        self._change = threading.Condition()
        self._sign_of_life = time.monotonic()
        self._place = feed.place  # after the last frame, queued or not
        _, due, self._count = feed.place  # frames so far, with those of earlier processes
        self._due = due if feed.kind == "video" else 0.0  # when the next frame is due, if fps is given
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._take_all()
        finally:  # a bug here must end the stream, not look like a camera without frames
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
                if why and n_failed <= 1:  # report a lost camera once
                    self.events.append(why)
                self._change.notify_all()
            if not self.ended:
                time.sleep(min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2**n_failed) * random.uniform(0.5, 1.0))

    def _take(self, raw: Raw) -> None:
        """Decode a frame and queue it, or note why not."""
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
                    _, _, oldest, *_ = self._queue.popleft()
                    oldest.passed["overload"] += 1
                    first = self._queue[0][2] if self._queue else self._since
                    first.add(oldest)
                else:
                    self._change.wait(1)
                    self._sign_of_life = time.monotonic()
            self._queue.append((frame, self._place, self._since.take(), raw.track, raw.file))
            self._change.notify_all()

    def _passes_over(self, raw: Raw) -> str:
        if (self._count - 1) % self.feed.every:
            return "every"
        if self.feed.fps is not None:
            now, period = time.monotonic() if raw.seconds is None else raw.seconds, 1 / self.feed.fps
            if now < self._due - 1e-6:
                return "fps"
            # A period after this frame was due, which keeps the mean rate; after a pause, a period from now.
            self._due = (self._due if now < self._due + period else now) + period
        return ""

    def fetch(self, n_max: int, seconds: float) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The answer to a request: the oldest waiting frames, as soon as there is one or the time is over."""
        with self._change:
            # A recording waits for one more than asked for. Then it is known whether these are the last ones, and the
            # order in which several recordings are asked does not depend on their speed.
            enough = n_max + 1 if self.feed.exact else 1
            self._change.wait_for(lambda: len(self._queue) >= enough or self.ended, seconds)
            n = min(n_max, len(self._queue)) if self.ended or len(self._queue) >= enough else 0
            taken = [self._queue.popleft() for _ in range(n)]
            account = Account()
            for _, _, own, *_ in taken:
                account.add(own)
            done = self.ended and not self._queue
            if self.feed.drops or done:
                account.add(self._since.take())
            answer = {
                "n": len(taken),
                "tracks": [track for *_, track, _ in taken],
                "files": [file for *_, file in taken],
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
        return answer, [frame for frame, *_ in taken]


def serve(asks: BinaryIO, answers: BinaryIO) -> None:
    capture = CaptureThread(Feed(**json.loads(asks.readline())))
    for line in asks:
        ask = json.loads(line)
        answer, frames = capture.fetch(ask["frames"], ask["seconds"])
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.writelines(frame.tobytes() for frame in frames)
        answers.flush()


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the learner has ended
        serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # does not wait for the thread, which may hang in a driver
