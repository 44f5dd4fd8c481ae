"""What a run serves while it learns: an encoder as it once was with the head that was trained on it, in versions."""

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.progress import say
from streamclr.base.tensors import load_weights
from streamclr.classifier import Head
from streamclr.encoders.inference import infer
from streamclr.encoders.projection import ContrastiveModel
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.directory import RunDirectory

N_VERSIONS = 5  # that are kept
BACK = ".back"  # behind the number of a version that was rolled back


class Score(NamedTuple):
    """How well a version does on the labels that were held back."""

    right: int
    n: int
    loss: float  # the mean of -log of the probability of the true class; 0 if there are none

    def __str__(self) -> str:
        return f"{self.right} of {self.n}" if self.n else "none"


@dataclass(frozen=True)
class Version:
    """An encoder, its head, and how they came to be served. Both are frozen: any thread may use them."""

    model: ContrastiveModel
    head: Head
    classes: tuple[str, ...]
    step: int  # of the learner whose encoder this is
    trained_on: frozenset[str]  # keys of labels
    held_back: frozenset[str]
    score: Score  # on those held back, when it was taken
    number: int = 0  # 0 until it is taken

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        self.head.eval().requires_grad_(False)

    def probabilities(self, images: Tensor) -> Tensor:
        """n x classes."""
        return self.head(infer(self.model, images, self.model.features).cpu()).softmax(1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "classes": list(self.classes),
            "step": self.step,
            "trained_on": sorted(self.trained_on),
            "held_back": sorted(self.held_back),
            "score": list(self.score),
        }

    def about(self) -> dict[str, Any]:
        """For results and whoever looks."""
        right, n, _ = self.score
        return {
            "version": self.number,
            "step": self.step,
            "labels": len(self.trained_on),
            "held_back": n,
            "accuracy": right / n if n else None,
        }

    def __str__(self) -> str:
        known = f"{self.score} labels held back right" if self.score.n else "no label was held back to measure it"
        return f"version {self.number} (step {self.step}, {len(self.trained_on)} labels, {known})"


class Versions:
    """The versions of a run in its directory `served`, of which the newest that is whole is served.

    Another process may roll back at any time: `look` finds that. Threads share one of these.
    tell: what to do with a line about what happened to the versions.
    """

    def __init__(self, directory: RunDirectory, tell: Callable[[str], None] = say):
        self.directory, self.tell = directory, tell
        self.current: Version | None = None
        self._versions = Checkpoints(directory.path / "served", N_VERSIONS)
        self._numbers: list[int] = []  # when it was last looked
        self._lock = threading.Lock()

    def look(self) -> Version | None:
        """What is served now. It waits for nobody: while a version is being taken it is the one before."""
        if self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self.current

    def _look(self) -> None:
        """Files are read only when there are others than before."""
        numbers = self._versions.numbers()
        if numbers != self._numbers:
            was, self.current = self.current, self._newest(numbers)
            self._numbers = numbers
            if was is not None and self.current is not was:
                how = "" if self.current and self.current.number > was.number else "rolled back: "
                self.tell(f"{how}{self.current or 'nothing'} is served instead of version {was.number}")

    def _newest(self, numbers: list[int]) -> Version | None:
        for number in reversed(numbers):
            if self.current is not None and self.current.number == number:
                return self.current
            try:
                return self._load(number)
            except (UserError, FileNotFoundError) as error:
                self.tell(f"{error}: version {number} is passed over for the one before")
        return None

    def _load(self, number: int) -> Version:
        state, where = self._versions.load(number), str(self._versions.directory / f"{number:010}")
        try:
            classes, n_features = tuple(map(str, state["classes"])), state["head"]["mean"].shape[0]
            model = self.directory.model_with(state["model"], where)
            head = Head(n_features, len(classes))
            load_weights(head, state["head"], where)
            trained_on, held_back = (frozenset(state[name]) for name in ("trained_on", "held_back"))
            score = Score(*state["score"])
            return Version(model, head, classes, state["step"], trained_on, held_back, score, number)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{where} holds no encoder and head ({error!r})") from None

    def take(self, version: Version, instead_of: Version | None) -> Version | None:
        """Serve this one from now on; None if another than `instead_of` is served meanwhile, because of a rollback."""
        with self._alone():
            self._look()
            if self.current is not instead_of:
                return None
            taken = replace(version, number=self._next())
            self._versions.save(taken.number, taken.state_dict())
            self.current, self._numbers = taken, self._versions.numbers()
            return taken

    def _next(self) -> int:
        """A number is never used again, so that a line in predictions.jsonl says what it says for ever."""
        names = [path.name.removesuffix(BACK) for path in self._versions.directory.iterdir()]
        return max((int(name) for name in names if name.isdecimal()), default=0) + 1

    def rollback(self) -> tuple[Version, Version]:
        """Serve the version before. Returns the one that is served now, and the one that was."""
        if not self._versions.numbers():
            raise UserError(f"{self.directory.path} serves no version: run with --predict, and give it labels")
        with self._alone():
            self._look()
            was = self.current
            if was is None:
                raise UserError(f"no version in {self._versions.directory} is whole: the run takes the next good one")
            before = self._newest([number for number in self._numbers if number < was.number])
            if before is None:
                raise UserError(f"version {was.number} is the first of {self.directory.path}: there is none before it")
            self._put_aside([number for number in self._numbers if number > before.number])
            return before, was

    def _put_aside(self, numbers: list[int]) -> None:
        """By one rename each: served or not. They stay there, for their numbers and for a second thought."""
        versions = self._versions.directory
        for earlier in versions.glob(f"*{BACK}"):
            if earlier.name < f"{min(numbers):010}":  # the highest number is never given again
                shutil.rmtree(earlier, ignore_errors=True)
        for path in [versions / f"{number:010}" for number in numbers]:
            path.rename(path.with_name(path.name + BACK))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process takes or rolls back a version meanwhile."""
        with self._lock:
            self._versions.directory.mkdir(exist_ok=True)
            lock = os.open(self._versions.directory, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)
