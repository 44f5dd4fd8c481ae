"""Questions and answers in labels.sqlite of a run directory. An answer is on disk when `answer` returns."""

import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from streamclr.base.errors import UserError

SCHEMA = """
CREATE TABLE IF NOT EXISTS questions (
  key TEXT PRIMARY KEY,      -- of the image's pixels
  arrival INTEGER NOT NULL,  -- its number in the stream
  rank INTEGER NOT NULL,     -- the order in which to ask
  picture BLOB NOT NULL      -- PNG
) WITHOUT ROWID;
-- What a person is shown of a question, where that is more than its pixels.
CREATE TABLE IF NOT EXISTS thumbnails (
  key TEXT PRIMARY KEY REFERENCES questions ON DELETE CASCADE,
  jpeg BLOB NOT NULL
) WITHOUT ROWID;
-- Frames of the same scene as a question: they get its answer, and go with it.
CREATE TABLE IF NOT EXISTS companions (
  key TEXT NOT NULL REFERENCES questions ON DELETE CASCADE,
  arrival INTEGER NOT NULL,
  picture BLOB NOT NULL,
  PRIMARY KEY (key, arrival)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS classes (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE);
-- A request has a name that its sender makes, so that one that is sent twice counts once.
CREATE TABLE IF NOT EXISTS requests (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  request TEXT NOT NULL UNIQUE,
  kind TEXT NOT NULL,
  class INTEGER REFERENCES classes,
  time REAL NOT NULL,
  undone INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS answers (
  request INTEGER NOT NULL REFERENCES requests,
  key TEXT NOT NULL REFERENCES questions,
  PRIMARY KEY (key, request)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
-- What holds for each image is its last answer that was not undone. (SQLite takes the other columns from max's row.)
CREATE VIEW IF NOT EXISTS current AS
  SELECT key, kind, class, max(number) AS number FROM answers JOIN requests ON number = answers.request
  WHERE NOT undone GROUP BY key;
"""
KINDS = ("label", "skip", "unsure")
MAX_NAME_LENGTH = 100  # characters of a class name
NONE_OF_THESE = "none of these"  # the class of pictures that show nothing of the others


class Question(NamedTuple):
    key: str
    arrival: int
    rank: int


class Answer(NamedTuple):
    kind: str  # label, skip or unsure
    class_id: int | None
    number: int  # counts up in the order of arrival


class Conflict(UserError):
    """The request contradicts the stored state."""


class Missing(UserError):
    """There is no such class or question."""


class Labels:
    """Questions, classes and answers. Several threads and processes may use it at once."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._connection.executescript(SCHEMA)
            self._identity = path.stat().st_ino
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"cannot use {path} ({error})") from None
        self._lock = threading.Lock()

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all or nothing, and on disk afterwards."""
        with self._lock, self._connection:  # it commits, or rolls back
            if not self.path.exists() or self.path.stat().st_ino != self._identity:
                raise sqlite3.OperationalError(f"{self.path.name} was deleted")  # the answer would be lost
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def _value(self, query: str, *values: Any) -> Any:
        """The first column of the first row, if there is one."""
        rows = self._read(query, *values)
        return rows[0][0] if rows else None

    def questions(self) -> list[Question]:
        """The questions, in the order in which to ask them."""
        return [Question(*row) for row in self._read("SELECT key, arrival, rank FROM questions ORDER BY rank, key")]

    def picture(self, key: str) -> bytes | None:
        return self._value("SELECT picture FROM questions WHERE key = ?", key)

    def thumbnail(self, key: str) -> bytes | None:
        """A JPEG of a question for a person; None if its picture is all there is."""
        return self._value("SELECT jpeg FROM thumbnails WHERE key = ?", key)

    def companions(self, key: str) -> list[bytes]:
        """The pictures of the frames that get the answer to this question too, in the order of the stream."""
        rows = self._read("SELECT picture FROM companions WHERE key = ? ORDER BY arrival", key)
        return [picture for (picture,) in rows]

    def lasting(self) -> dict[str, Question]:
        """The questions that are never replaced: answered or exported ones."""
        answered = {key for (key,) in self._read("SELECT DISTINCT key FROM answers")}
        given = self.fact("given") is not None
        return {question.key: question for question in self.questions() if given or question.key in answered}

    def ask(
        self,
        questions: Iterable[tuple[Question, bytes]],
        at_most: int | None = None,
        companions: Mapping[str, Sequence[tuple[int, bytes]]] | None = None,
        thumbnails: Mapping[str, bytes] | None = None,
    ) -> None:
        """Replace the questions by these, each with its picture. Lasting questions stay, with their companions.

        at_most: with those that stay; the last of the new ones are left out.
        companions: of new questions, by key: the numbers in the stream and the pictures.
        thumbnails: of questions, by key, where there are any.
        """
        with self._change() as db:
            if not db.execute("SELECT 1 FROM facts WHERE name = 'given'").fetchone():
                db.execute("DELETE FROM questions WHERE key NOT IN (SELECT key FROM answers)")
            known = {key for (key,) in db.execute("SELECT key FROM questions")}
            for question, picture in questions:
                is_new = question.key not in known
                if not is_new or at_most is None or len(known) < at_most:
                    known.add(question.key)
                    db.execute(
                        "INSERT INTO questions (key, arrival, rank, picture) VALUES (?, ?, ?, ?) "
                        "ON CONFLICT (key) DO UPDATE SET rank = excluded.rank",
                        (*question, picture),
                    )
                    if jpeg := (thumbnails or {}).get(question.key):
                        db.execute("INSERT OR IGNORE INTO thumbnails VALUES (?, ?)", (question.key, jpeg))
                    own = (companions or {}).get(question.key, ()) if is_new else ()
                    db.executemany(
                        "INSERT OR REPLACE INTO companions (key, arrival, picture) VALUES (?, ?, ?)",
                        [(question.key, arrival, companion) for arrival, companion in own],
                    )

    def note(self, name: str, value: str) -> None:
        """Store a value under a name."""
        with self._change() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", [name, value])

    def fact(self, name: str) -> str | None:
        return self._value("SELECT value FROM facts WHERE name = ?", name)

    def classes(self) -> dict[int, str]:
        """Class names by number, in the order in which they were added."""
        return dict(self._read("SELECT id, name FROM classes ORDER BY id"))

    def add_class(self, name: str, request: str | None = None) -> int:
        """Add a class. Returns its number."""
        with self._change() as db:
            if request is not None and (known := _repeated(db, request, "class")):
                return known[1]
            number = _add_class(db, checked_name(name))
            if request is not None:
                _note(db, request, "class", number)
        return number

    def class_named(self, name: str) -> int:
        """The number of a class, which is added if there is none of this name."""
        with self._change() as db:
            known = db.execute("SELECT id FROM classes WHERE name = ?", [name]).fetchone()
            return known[0] if known else _add_class(db, checked_name(name))

    def rename_class(self, number: int, name: str) -> None:
        name = checked_name(name)
        with self._change() as db:
            if taken := db.execute("SELECT id FROM classes WHERE name = ? AND id != ?", [name, number]).fetchone():
                raise Conflict(f"class {taken[0]} already has the name {name!r}: use another name")
            if not db.execute("UPDATE classes SET name = ? WHERE id = ?", [name, number]).rowcount:
                raise Missing(f"no class {number}")

    def answers(self) -> dict[str, Answer]:
        """The current answer of each image, by its key."""
        rows = self._read("SELECT key, kind, class, number FROM current ORDER BY number")
        return {key: Answer(*rest) for key, *rest in rows}

    def change(self) -> int:
        """A number that changes when another connection has changed the database. Cheap to read."""
        return self._value("PRAGMA data_version")

    def imported(self) -> set[int]:
        """The numbers of the answers that `bring_in` added."""
        return {number for (number,) in self._read("SELECT number FROM requests WHERE request LIKE 'import-%/%'")}

    def n_answers(self) -> int:
        """How many answers were given and not undone."""
        return self._value("SELECT count(*) FROM answers JOIN requests ON number = answers.request WHERE NOT undone")

    def answer(self, request: str, kind: str, keys: Sequence[str], class_id: int | None = None) -> None:
        """Store one answer for one or several images. Repeating a request changes nothing."""
        if kind not in KINDS:
            raise UserError(f"unknown answer {kind!r}: use {', '.join(KINDS)}")
        if (kind == "label") != (class_id is not None):
            raise UserError(f"the answer {kind!r} has the class {class_id}: give one with a label only")
        with self._change() as db:
            _answer(db, request, kind, keys, class_id)

    def last(self, page: str = "") -> dict[str, Any] | None:
        """The answer that `undo` would undo. page: the beginning of the names of its requests; all if empty."""
        rows = self._read(
            "SELECT kind, class, (SELECT count(*) FROM answers WHERE request = number) FROM requests "
            "WHERE kind IN ('label', 'skip', 'unsure') AND NOT undone AND substr(request, 1, length(?)) = ? "
            "ORDER BY number DESC LIMIT 1",
            page,
            page,
        )
        return dict(zip(("kind", "class", "n"), rows[0], strict=True)) if rows else None

    def quiet(self) -> float:
        """Seconds since the last request."""
        return time.time() - (self._value("SELECT max(time) FROM requests") or 0.0)

    def undo(self, request: str, of: str | None = None, page: str = "") -> None:
        """Undo the answer of a request, or the last answer that is not undone yet, of one page or of all."""
        with self._change() as db:
            if _repeated(db, request, "undo"):
                return
            undone = db.execute(
                "UPDATE requests SET undone = 1 WHERE number = (SELECT max(number) FROM requests "
                "WHERE kind IN ('label', 'skip', 'unsure') AND NOT undone AND request = coalesce(?, request) "
                "AND substr(request, 1, length(?)) = ?)",
                [of, page, page],
            )
            if not undone.rowcount:
                raise Conflict("there is no answer to undo")
            _note(db, request, "undo", None)

    def bring_in(self, answers: Sequence[tuple[str, str, str | None]]) -> int:
        """Add imported answers (key, kind, class name), all or none. Returns the number of new answers."""
        now, request = self.answers(), f"import-{secrets.token_hex(16)}"
        new: dict[tuple[str, int | None], list[str]] = {}
        with self._change() as db:
            numbers = {name: number for number, name in db.execute("SELECT id, name FROM classes")}
            for key, kind, name in answers:
                if name is not None and name not in numbers:
                    numbers[name] = _add_class(db, checked_name(name))
                class_id = None if name is None else numbers[name]
                if key not in now or now[key][:2] != (kind, class_id):
                    new.setdefault((kind, class_id), []).append(key)
            for (kind, class_id), keys in new.items():
                _answer(db, f"{request}/{kind}/{class_id}", kind, keys, class_id)
        return sum(map(len, new.values()))


def checked_name(name: str) -> str:
    name = " ".join(name.split())
    shown = name.replace("\u200c", "").replace("\u200d", "")  # joiners, which some scripts and emoji need
    if len(name) > MAX_NAME_LENGTH or not shown or not shown.isprintable():
        limit = f"use 1 to {MAX_NAME_LENGTH} printable characters"
        raise UserError(f"class name {name[:MAX_NAME_LENGTH]!r} not allowed: {limit}")
    return name


def _add_class(db: sqlite3.Connection, name: str) -> int:
    try:
        number = db.execute("INSERT INTO classes (name) VALUES (?)", [name]).lastrowid
    except sqlite3.IntegrityError:
        raise Conflict(f"the class {name!r} exists already") from None
    assert number is not None
    return number


def _note(db: sqlite3.Connection, request: str, kind: str, class_id: int | None) -> int:
    values = [request, kind, class_id, time.time()]
    number = db.execute("INSERT INTO requests (request, kind, class, time) VALUES (?, ?, ?, ?)", values).lastrowid
    assert number is not None
    return number


def _answer(db: sqlite3.Connection, request: str, kind: str, keys: Sequence[str], class_id: int | None) -> None:
    if _repeated(db, request, kind, class_id):
        return
    if class_id is not None and not db.execute("SELECT 1 FROM classes WHERE id = ?", [class_id]).fetchone():
        raise Missing(f"no class {class_id}")
    number = _note(db, request, kind, class_id)
    for key in dict.fromkeys(keys):
        if not db.execute("SELECT 1 FROM questions WHERE key = ?", [key]).fetchone():
            raise Missing("no such question: it may have been replaced; reload the page")
        db.execute("INSERT INTO answers (request, key) VALUES (?, ?)", [number, key])


def _repeated(db: sqlite3.Connection, request: str, kind: str, class_id: Any = ...) -> tuple[str, Any] | None:
    """The kind and class of a request that is stored already; None if it is new."""
    known = db.execute("SELECT kind, class FROM requests WHERE request = ?", [request]).fetchone()
    if known and (known[0] != kind or class_id not in (..., known[1])):
        raise Conflict("this request id was used for another request: use a new one")
    return known
