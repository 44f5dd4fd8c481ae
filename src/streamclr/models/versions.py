"""The versions of a run's classifier that `run --predict` serves while it learns, and rollback to an earlier one, which
stays until it is unpinned."""

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.files import read_json, write_json
from streamclr.base.progress import say
from streamclr.classifier import Classifier, Head
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.directory import RunDirectory

N_VERSIONS = 5  # kept on disk
BACK = ".back"  # suffix of a version that was rolled back
PIN = "pinned.json"  # while it is there, no newer version is served than the one that it names


class Score(NamedTuple):
    """How well a version does on the labels held back."""

    right: int
    n: int
    loss: float  # mean of -log of the probability of the true class; 0 without labels

    def __str__(self) -> str:
        return f"{self.right} of {self.n}" if self.n else "none"


@dataclass(frozen=True)
class Version:
    """A classifier that is or was served, with the labels that it was trained and measured on."""

    classifier: Classifier
    step: int  # of the learner whose encoder this is
    trained_on: frozenset[str]  # keys of labels
    held_back: frozenset[str]
    score: Score  # on the labels held back, when the version was accepted
    number: int = 0  # 0 until it is accepted
    by_class: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of each class held back: right, of how many

    @property
    def classes(self) -> list[str]:
        return self.classifier.classes

    def probabilities(self, images: Tensor) -> Tensor:
        """n x classes."""
        return self.classifier.probabilities(images)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.classifier.model.state_dict(),
            "head": self.classifier.head.state_dict(),
            "classes": list(self.classes),
            "step": self.step,
            "trained_on": sorted(self.trained_on),
            "held_back": sorted(self.held_back),
            "score": list(self.score),
            "by_class": {name: list(counts) for name, counts in self.by_class.items()},
        }

    def about(self) -> dict[str, Any]:
        """For results.json, status and metrics."""
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
    """The versions in a run's directory `served`; the newest intact one is served, or an older one that is pinned.

    Another process may roll back or unpin at any time: `look` notices it. Threads share one object.
    tell: called with a line about each change.
    """

    def __init__(self, directory: RunDirectory, tell: Callable[[str], None] = say):
        self.directory, self.tell = directory, tell
        self.current: Version | None = None
        self.pinned: int | None = None  # the number of the version that stays, at the last look
        self._versions = Checkpoints(directory.path / "served", N_VERSIONS)
        self._numbers: list[int] = []  # at the last look
        self._lock = threading.Lock()

    def look(self) -> Version | None:
        """The version that is served now. Never blocks: while another thread changes it, this is the one before."""
        if self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self.current

    def _look(self) -> None:
        """Read weights only if the numbers have changed."""
        numbers, pinned = self.numbers(), self._pin()
        if numbers != self._numbers:
            was, self.current = self.current, self._newest(numbers)
            self._numbers = numbers
            if was is not None and self.current is not was:
                how = "" if self.current and self.current.number > was.number else "rolled back: "
                self.tell(f"{how}{self.current or 'nothing'} is served instead of version {was.number}")
        if pinned is None and self.pinned is not None:
            self.tell(f"version {self.pinned} is unpinned: a better one may take its place")
        self.pinned = pinned

    def numbers(self) -> list[int]:
        """Of the versions that may be served, intact or damaged, the oldest first."""
        pinned = self._pin()
        return [number for number in self._versions.numbers() if pinned is None or number <= pinned]

    def _pin(self) -> int | None:
        with suppress(UserError, KeyError, TypeError, ValueError):  # there is none, or somebody wrote something else
            return int(read_json(self._versions.directory / PIN)["version"])
        return None

    def _newest(self, numbers: list[int]) -> Version | None:
        for number in reversed(numbers):
            if self.current is not None and self.current.number == number:
                return self.current
            try:
                return self._load(number)
            except (UserError, FileNotFoundError) as error:
                self.tell(f"{error}: skipping version {number} for the one before")
        return None

    def _load(self, number: int) -> Version:
        state, where = self._versions.load(number), str(self._versions.directory / f"{number:010}")
        try:
            model = self.directory.model_with(state["model"], where)
            head = Head.from_state(state["head"], where)
            classifier = Classifier(model, head, list(map(str, state["classes"])), self.directory.image_size)
            trained_on, held_back = (frozenset(state[name]) for name in ("trained_on", "held_back"))
            by_class = {str(name): (int(of[0]), int(of[1])) for name, of in state.get("by_class", {}).items()}
            return Version(classifier, state["step"], trained_on, held_back, Score(*state["score"]), number, by_class)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{where} holds no encoder and head ({error!r})") from None

    def facts(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Each version's directory and state without the weights, the served one first; damaged ones are left out."""
        for number in reversed(self.numbers()):
            with suppress(UserError, OSError):
                yield self._versions.directory / f"{number:010}", self._versions.facts(number)

    def take(self, version: Version, instead_of: Version | None) -> Version | None:
        """Serve this version from now on. None if `instead_of` is no longer the one served, or stays: someone rolled
        back."""
        with self._alone():
            self._look()
            if self.current is not instead_of or self.pinned is not None:
                return None
            taken = replace(version, number=self._next())
            self._versions.save(taken.number, taken.state_dict())
            self.current, self._numbers = taken, self._versions.numbers()
            return taken

    def _next(self) -> int:
        """A number is never used twice: lines in predictions.jsonl name versions by it."""
        names = [path.name.removesuffix(BACK) for path in self._versions.directory.iterdir()]
        return max((int(name) for name in names if name.isdecimal()), default=0) + 1

    def rollback(self) -> tuple[Version, Version]:
        """Serve the version before, until `unpin`. Returns the version that is served now and the one that was."""
        if not self._versions.numbers():
            raise self.none()
        with self._alone():
            self._look()
            was = self.current
            if was is None:
                raise UserError(
                    f"all versions in {self._versions.directory} are damaged: let the run go on, it will make a new one"
                )
            before = self._newest([number for number in self._numbers if number < was.number])
            if before is None:
                raise UserError(f"version {was.number} is the first of {self.directory.path}: there is none before it")
            write_json(self._versions.directory / PIN, {"version": before.number})  # from here on it holds
            self._put_aside(before.number)
            return before, was

    def unpin(self) -> Version | None:
        """Let better versions take the place of the one that a rollback pinned. Returns the one that is served."""
        pin = self._versions.directory / PIN
        if not pin.exists():
            raise UserError(f"{self.directory.path} has no pinned version: streamclr rollback pins the one before")
        with self._alone():
            self._look()
            if self.pinned is not None:
                self._put_aside(self.pinned)  # a rollback may have been killed before it did
            pin.unlink(missing_ok=True)
            self.pinned = None
            return self.current

    def none(self) -> UserError:
        return UserError(f"{self.directory.path} serves no version: run with --predict, and give it labels")

    def _put_aside(self, after: int) -> None:
        """The versions after this one, by one rename each. The newest stay on disk: their numbers must not be used
        again."""
        versions = self._versions.directory
        numbers = [number for number in self._versions.numbers() if number > after]
        for earlier in versions.glob(f"*{BACK}"):
            if numbers and earlier.name < f"{min(numbers):010}":  # the highest number has to stay
                shutil.rmtree(earlier, ignore_errors=True)
        for path in [versions / f"{number:010}" for number in numbers]:
            path.rename(path.with_name(path.name + BACK))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock out other threads and processes that change versions."""
        with self._lock:
            self._versions.directory.mkdir(exist_ok=True)
            lock = os.open(self._versions.directory, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)
