"""A run as the pages show it, read from its directory: what is seen now, the growing journal, the state, the health."""

import json
import math
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from streamclr.base.errors import UserError
from streamclr.base.files import read_json
from streamclr.base.options import redacted, split
from streamclr.records.directory import RunDirectory
from streamclr.records.journal import Tail
from streamclr.runs.loop import COLLAPSED_SPREAD, N_COLLAPSED
from streamclr.web.now import Newest, Predictions
from streamclr.web.plain import plain
from streamclr.web.standing import Standing
from streamclr.web.wall import Wall

MAX_POINTS = 1000  # of a chart
MAX_JOURNAL_BYTES = 8 * 2**20  # of a longer journal the rest is sampled instead of read in full
MAX_EVENT_BYTES = 2**16
WAITING_SECONDS = 30.0  # without a step, until a run is shown as waiting
COLUMNS = ("step", "seen", "time", "loss", "score", "replaced", "rescored", "spread", "rate", "memory", "accuracy")
Point = dict[str, float | None]


class JournalTail:
    """The steps of a run so far, thinned for a chart, and the new ones since the last read."""

    def __init__(self, path: Path):
        self.path = path
        self._tail = Tail(path, MAX_JOURNAL_BYTES, MAX_POINTS)
        self._reset()

    def _reset(self) -> None:
        self.points: list[Point] = []
        self.recent: deque[Point] = deque(maxlen=500)  # not thinned
        self.last: dict[str, Any] = {}
        self._every, self._n = 1, 0
        self.n_ranks = 1
        self._rate: float | None = None

    def read(self) -> tuple[bool, list[Point]]:
        """Whether the journal was started again, and the new points, at most MAX_POINTS."""
        try:
            anew, lines = self._tail.read()
        except OSError:  # a disk that fails for a while: keep what is shown
            return False, []
        if anew:
            self._reset()
        # The journal counts the images of rank 0; each further rank of this machine has a directory.
        self.n_ranks = 1 + sum(1 for _ in (self.path.parent / "ranks").glob("*"))
        return anew, thinned([point for line in lines if (point := self._point(line))])

    def _point(self, line: bytes) -> Point | None:
        try:
            step = json.loads(line)
            point = self._columns(step)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None  # damaged
        self.last = step
        self.recent.append(point)
        if self._n % self._every == 0 or point["accuracy"] is not None:
            self.points.append(point)
        self._n += 1
        if len(self.points) > 2 * MAX_POINTS:
            self._every *= 2
            self.points = self.points[::2]
        return point

    def _columns(self, step: dict[str, Any]) -> Point:
        held = step["kept"] + step["replaced"]
        point: Point = {name: step.get(name) for name in COLUMNS}
        point |= {"step": step["number"], "replaced": step["replaced"] / max(1, held), "rate": self._speed(step)}
        point["seen"] = step["seen"] * self.n_ranks
        return {name: value if isinstance(value, int | float) else None for name, value in point.items()}

    def _speed(self, step: dict[str, Any]) -> float | None:
        """Images per second between the last two steps, smoothed, pauses included."""
        before = self.last
        if not all(isinstance(one.get("time"), int | float) for one in (before, step)):
            return self._rate
        images, seconds = step["seen"] - before["seen"], step["time"] - before["time"]
        if images > 0 and seconds > 0:
            speed = self.n_ranks * images / seconds
            self._rate = speed if self._rate is None else 0.9 * self._rate + 0.1 * speed
        return self._rate


class RunView:
    """One run. `update` reads its directory again, about once a second for all clients together."""

    def __init__(self, path: Path):
        self.directory = RunDirectory.existing(path)
        self.path = self.directory.path.resolve()
        self.name = self.path.name
        self._identity = self._identify()
        self.config = self.directory.config
        self.journal = JournalTail(self.path / "journal.jsonl")
        self.events: deque[dict[str, Any]] = deque(maxlen=20)
        self._new_events = Tail(self.path / "events.jsonl", MAX_EVENT_BYTES)
        self.wall = Wall(self.path, split(self.config.policy)[0])
        self.newest, self.predictions = Newest(self.path), Predictions(self.path)
        self.standing = Standing(self.directory)
        self._lock = threading.Lock()  # a program may ask what is seen now while the pages are told
        self.state = "stopped"
        self._status: dict[str, Any] = {}  # the last status.json

    def _identify(self) -> tuple[int, int]:
        file = (self.path / "config.json").stat()
        return file.st_ino, file.st_mtime_ns

    def is_another(self) -> bool:
        """Whether the directory now has another run in it."""
        with suppress(OSError):
            return self._identify() != self._identity
        return False

    def is_gone(self) -> bool:
        """Whether the directory was deleted or moved; not that its disk cannot be read now."""
        try:
            self._identify()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            pass
        return False

    def about(self) -> dict[str, Any]:
        return {
            "name": shown(self.name),
            "source": shown(self.config.source),
            "policy": split(self.config.policy)[0],
            "state": self._find_state(),
            "can_label": self.config.label_budget is not None,
            "predicts": self.config.predict,
        }

    def now(self) -> dict[str, Any]:
        """What the cameras saw last, its class, what changed lately, the classifier in use and the labels."""
        with self._lock:
            self.newest.update()  # before the predictions, so that each of its frames has one
            self.predictions.update()
            self.standing.update()
            return {
                "frames": [self._frame(**frame) for frame in self.newest.frames],
                "changes": [change | {"source": shown(change["source"])} for change in self.predictions.changes],
                "counts": self.predictions.counts(),
                "classifier": self.standing.classifier,
                "labels": self.standing.labels,
            }

    def _frame(self, name: str, time: float, picture: str, side: int) -> dict[str, Any]:
        one = self.predictions.at(name, time)
        known = None if one is None else {"class": one.class_name, "probability": one.probability}
        return {
            "name": shown(name),
            "time": time,
            "picture": picture,
            "side": side,
            **(known or {"class": None, "probability": None}),
        }

    def update(self) -> tuple[bool, list[Point]]:
        """The new points of the journal, as `JournalTail.read` gives them."""
        self._status = _json(self.path / "status.json")
        self._read_events()
        found = self.journal.read()
        self.state = self._find_state()
        return found

    def _find_state(self) -> str:
        if (self.path / "results.json").exists():
            return "finished"
        with suppress(OSError):
            if self.directory.is_learning:
                last = os.path.getmtime(self.journal.path) if self.journal.path.exists() else 0.0
                return "waiting" if time.time() - last > WAITING_SECONDS else "learning"
        return "stopped"

    def _read_events(self) -> None:
        try:
            anew, lines = self._new_events.read()
        except OSError:
            return
        if anew:
            self.events.clear()
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # damaged
                event = json.loads(line)
                kind, text = plain(said := shown(event["event"]), self._sources)
                one = {"time": event["time"], "step": event["step"], "event": said, "kind": kind, "plain": text}
                self.events.append(one)

    def status(self) -> dict[str, Any]:
        last, written = self.journal.last, self._status
        alive = self.state in ("learning", "waiting")
        account, seen = written.get("account"), last.get("seen", 0) * self.journal.n_ranks
        if self.state == "finished":
            results = _json(self.path / "results.json")
            account, seen = results.get("account", account), results.get("images", seen)
        return {
            "state": self.state,
            "step": last.get("number", 0),
            "seen": seen,
            "images": self.config.images,
            "rate": self.journal.recent[-1]["rate"] if self.journal.recent and self.state == "learning" else None,
            "memory": last.get("memory") if alive else None,
            "account": account,
            "kept_out": last.get("kept_out"),
            "health": self._health(),
            "events": list(self.events),
            "checkpoint": written.get("checkpoint"),
            "sources": self._sources,
        }

    def _health(self) -> list[dict[str, Any]]:
        """Checks of the run, each with a verdict: collapse, drift, disk, numbers, sources."""
        found, recent = [], list(self.journal.recent)
        spreads = [p["spread"] for p in recent[-N_COLLAPSED:] if p["spread"] is not None]
        if spreads:
            collapsed = len(spreads) == N_COLLAPSED and max(spreads) < COLLAPSED_SPREAD
            alike = "collapsed, all projections are alike: lower the learning rate"
            text = alike if collapsed else "projections differ"
            found.append(_item("collapse", not collapsed, f"{text} (spread {spreads[-1]:.2g})"))
        found.append(self._drift(recent))
        if failures := self._status.get("checkpoint_failures"):
            found.append(_item("disk", False, f"{failures} checkpoints could not be written"))
        if undone := self._status.get("undone"):
            found.append(_item("numbers", False, f"{undone} steps were undone: their numbers were not finite"))
        for name, source in self._sources.items():
            text = "frames arrive" if source["connected"] else "no frames, reconnecting"
            found.append(_item("source", source["connected"], f"{name}: {text}, lost {source['lost']} times"))
        return found

    @property
    def _sources(self) -> dict[str, Any]:
        told = self._status.get("sources")
        return {
            shown(name): {"connected": bool(source.get("connected")), "lost": source.get("lost", 0)}
            for name, source in (told.items() if isinstance(told, dict) else ())
            if isinstance(source, dict)
        }

    def _drift(self, recent: list[Point]) -> dict[str, Any]:
        """The stream has drifted if the last steps replace many more or fewer images than those before."""
        shares = [p["replaced"] for p in recent if p["replaced"] is not None]
        before, now = shares[:-N_NOW], shares[-N_NOW:]
        if len(before) < N_BEFORE:
            return _item("drift", True, f"known from step {N_NOW + N_BEFORE} on")
        old, new = fmean(before), fmean(now)
        noise = pstdev(before) / math.sqrt(N_NOW) + 0.005
        text = f"{100 * new:.1f} % replaced in the last {N_NOW} steps, {100 * old:.1f} % before"
        return _item("drift", abs(new - old) < 6 * noise, text)


N_NOW, N_BEFORE = 20, 50  # steps that are compared to detect drift


def shown(text: str) -> str:
    """Text that is safe to send: without passwords, and valid UTF-8 even for odd file names."""
    return redacted(text).encode("utf-8", "replace").decode()


def columns(points: list[Point]) -> dict[str, list[float | None]]:
    return {name: [point[name] for point in points] for name in COLUMNS}


def thinned(points: list[Point]) -> list[Point]:
    return points[:: max(1, -(-len(points) // MAX_POINTS))]


def _item(what: str, ok: bool, text: str) -> dict[str, Any]:
    return {"what": what, "ok": ok, "text": text}


def _json(path: Path) -> dict[str, Any]:
    with suppress(UserError):
        content = read_json(path)
        return content if isinstance(content, dict) else {}
    return {}


def find_runs(paths: list[Path]) -> list[Path]:
    """The run directories among these paths and directly inside them."""
    found: list[Path] = []
    for path in paths:
        if (path / "config.json").is_file():
            found.append(path)
        else:
            found += sorted(config.parent for config in path.glob("*/config.json"))
    return list(dict.fromkeys(found))
