"""Answers without a run: frames whose classes are given."""

import threading
import time

import numpy as np

from streamclr.answers.answers import Answers
from streamclr.answers.outbox import Outbox
from streamclr.records.answering import AnswerOptions

CLASSES = ["cat", "dog"]
IMAGE = np.zeros((3, 8, 8), np.uint8)


class Told:
    """Answers of a directory `run`, fed frame by frame; its events are kept."""

    def __init__(self, path, *to, names=("door",), repeats=False, outbox=None, **options):
        self.events = []
        run = path / "run"
        run.mkdir(exist_ok=True)
        outbox = None if outbox is None else Outbox(run / "answers", **outbox)
        chosen = AnswerOptions(to=to, **options)
        self.answers = Answers(
            chosen, run / "answers", run, [(name, "") for name in names], repeats, self.events.append, outbox
        )
        self.answers.start()
        self.n = 0  # frames so far

    def frame(self, cat, source="door", image=None):
        """One frame, with the probability of a cat."""
        line = {"image": self.n if image is None else image, "version": 1, "time": time.time(), "source": source}
        self.answers.take([line], np.array([[cat, 1 - cat]]), CLASSES, IMAGE[None])
        self.n += 1

    def state(self):
        (state,) = self.answers.state().values()
        return state

    def close(self, **how):
        self.answers.close(**how)


class Feeding:
    """Frames at a rate, from a thread, until it is closed."""

    def __init__(self, told, a_second=30):
        self.told, self.pause = told, 1 / a_second
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        due = time.monotonic()
        while not self._over.is_set():
            self.told.frame(0.9)
            due += self.pause
            time.sleep(max(0.0, due - time.monotonic()))

    def close(self):
        self._over.set()
        self._thread.join()
