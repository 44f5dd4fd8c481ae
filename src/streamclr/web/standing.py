"""How good a run's classifier is, and the labels behind it."""

import sqlite3
from collections import Counter
from contextlib import suppress
from typing import Any

from streamclr.base.errors import UserError
from streamclr.base.statistics import wilson
from streamclr.labelling.store import Labels
from streamclr.models.heads import Heads
from streamclr.models.versions import Versions
from streamclr.records.directory import RunDirectory

FAILURES = (UserError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, sqlite3.Error)


class Standing:
    """Read again only when a file has changed."""

    def __init__(self, directory: RunDirectory):
        self.directory = directory
        self.classifier: dict[str, Any] | None = None  # the one in use
        self.labels: dict[str, Any] | None = None  # that a person gave
        self._stamp: Any = None  # of what the classifier was read from
        self._used: frozenset[str] = frozenset()  # keys of the labels that the classifier in use knows
        self._store: Labels | None = None
        self._change: Any = None  # of the labels, when they were read

    def update(self) -> None:
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp, self._change = stamp, None
            self.classifier = None
            with suppress(*FAILURES):  # damaged: as if there were none
                self.classifier = self._served() or self._head()
        with suppress(*FAILURES):
            self._read_labels()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _look(self) -> Any:
        """Changes with what the classifier in use depends on."""
        found: list[Any] = []
        with suppress(*FAILURES):
            found.append(Versions(self.directory).numbers())
        for name in ("served/pinned.json", "labelled.safetensors", "classifier.safetensors", "results.json"):
            with suppress(OSError):
                found.append((name, (self.directory.path / name).stat().st_mtime_ns))
        return found

    def _served(self) -> dict[str, Any] | None:
        """The version that `run --predict` serves."""
        versions, self._used = Versions(self.directory), frozenset()
        for path, state in versions.facts():
            right, n, _ = state["score"]
            self._used = frozenset(state["trained_on"]) | frozenset(state["held_back"])
            pinned = (versions.directory.path / "served" / "pinned.json").exists()
            return {
                **_accuracy(right / n if n else None, n),
                "name": f"version {int(path.name)}",
                "pinned": pinned,
                "step": state["step"],
                "n_labels": len(state["trained_on"]),
                "by_class": [[name, *counts] for name, counts in state.get("by_class", {}).items()],
                "classes": state["classes"],
            }
        return None

    def _head(self) -> dict[str, Any] | None:
        """The one that `predict` uses."""
        head, _ = Heads(self.directory).default()
        return {
            **_accuracy(head.accuracy, None),
            "measured": head.measured,
            "name": head.name,
            "pinned": False,
            "n_labels": head.n_labels,
            "by_class": [],
            "classes": head.classes,
        }

    def _read_labels(self) -> None:
        file = self.directory.path / "labels.sqlite"
        if self._store is None:
            if not file.exists():  # nobody has opened the labelling page yet
                self.labels = None
                return
            self._store = Labels(file)
        change = self._store.change()
        if change == self._change:
            return
        answers, names, questions = self._store.answers(), self._store.classes(), self._store.questions()
        kinds = Counter(answer.kind for answer in answers.values())
        of_class = Counter(names[one.class_id] for one in answers.values() if one.class_id is not None)
        given = {key for key, answer in answers.items() if answer.kind == "label"}
        self.labels = {
            "given": len(given),
            "unsure": kinds["unsure"],
            "skipped": kinds["skip"],
            "open": sum(question.key not in answers for question in questions),
            "used": len(given & self._used) if self._used else None,
            "by_class": [list(one) for one in of_class.most_common()],
        }
        self._change = change


def _accuracy(value: float | None, n: int | None) -> dict[str, Any]:
    """n: labels held back that it was measured on; None: not known."""
    found: dict[str, Any] = {"accuracy": value, "low": None, "high": None, "held_back": n}
    if value is not None and n:
        found["low"], found["high"] = wilson(round(value * n), n)
    return found
