"""Questions and answers as files for other tools: Label Studio's task JSON, and CSV."""

import base64
import csv
import html
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamclr.base import cells as cell
from streamclr.base.errors import UserError
from streamclr.labelling.session import LabelSession
from streamclr.labelling.store import KINDS, checked_name

FROM, TO = "label", "image"  # names of the two parts in INTERFACE
INTERFACE = f"""<View>
  <Image name="{TO}" value="$image"/>
  <Choices name="{FROM}" toName="{TO}" choice="single-radio">
{{choices}}
  </Choices>
</View>
"""
HEAD = ["key", "image", "arrival", "answer", "label", "prediction", "probability"]
NOT_BLANK = re.compile(r"[^ \t\r\n]")
Read = tuple[int, str, str, str | None]  # line, key, kind of answer, name of the class


def export_labels(session: LabelSession, file: Path) -> int:
    """Write all questions, answered or not, with the classifier's predictions. The suffix of the file gives the
    format. Returns the number of questions."""
    write = {".json": _write_tasks, ".csv": _write_csv}.get(file.suffix.lower())
    if write is None:
        raise UserError(f"{file} has no known suffix: use .json (Label Studio) or .csv")
    beside = file.with_suffix(".xml") if write is _write_tasks else file.with_name(f"{file.stem}-images")
    for taken in (file, beside):
        if taken.exists():
            raise UserError(f"{taken} exists already and is not overwritten: give another name")
    if not file.parent.is_dir():
        raise UserError(f"no directory {file.parent} for {file.name}: make it, or give another name")
    session.labels.note("given", str(file.name))  # exported questions are never replaced
    if session.questions != session.labels.questions():
        raise UserError("the questions changed during the export: export again")
    write(session, file, beside)
    return len(session.questions)


def import_labels(session: LabelSession, file: Path) -> int:
    """Read the answers in a file of `export_labels` or Label Studio, all or none. Returns the number of new answers."""
    read = {".json": _read_tasks, ".csv": _read_csv}.get(file.suffix.lower())
    if read is None:
        raise UserError(f"{file} has no known suffix: use .json (Label Studio) or .csv")
    try:
        content = file.read_bytes()
        text = content.decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"cannot read {file} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise _wrong(file, content[: error.start].count(b"\n") + 1, "not UTF-8 text") from None
    known = {question.key for question in session.labels.questions()}
    answers: dict[str, tuple[int, str, str | None]] = {}
    for line, key, kind, name in read(text, file):
        if key not in known:
            raise _wrong(file, line, f"no question {key[:40]!r} in {session.directory.path}")
        if key in answers:
            raise _wrong(file, line, f"{key} already has an answer in line {answers[key][0]}")
        try:
            answers[key] = line, kind, None if name is None else checked_name(name)
        except UserError as error:
            raise _wrong(file, line, str(error)) from None
    return session.labels.bring_in([(key, kind, name) for key, (_, kind, name) in answers.items()])


def _wrong(file: Path, line: int, what: str) -> UserError:
    return UserError(f"{file}, line {line}: {what}: nothing was changed")


def _rows(session: LabelSession) -> Iterator[tuple[dict[str, Any], bytes]]:
    """One row and picture per question, the same for both formats."""
    answers, names = session.labels.answers(), session.labels.classes()  # in this order: no answer without its class
    for row, question in enumerate(session.questions):
        answer, guess = answers.get(question.key), session.guess(row)
        picture = session.labels.thumbnail(question.key) or session.labels.picture(question.key)
        assert picture is not None
        content = {
            "key": question.key,
            "arrival": question.arrival,
            "answer": answer.kind if answer else "",
            "label": names[answer.class_id] if answer and answer.class_id is not None else "",
            "prediction": names[guess["class"]] if guess else "",
            "probability": "" if guess is None or guess["probability"] is None else guess["probability"],
        }
        yield content, picture


def _write_tasks(session: LabelSession, file: Path, interface: Path) -> None:
    tasks = []
    for number, (row, picture) in enumerate(_rows(session), 1):
        image = f"data:image/{_kind(picture)};base64," + base64.b64encode(picture).decode()
        task: dict[str, Any] = {"id": number, "data": {"image": image, "key": row["key"], "arrival": row["arrival"]}}
        if row["answer"] == "unsure":  # Label Studio keeps unknown keys in data only
            task["data"]["answer"] = "unsure"
        label = {"result": [_choice(row["label"])]}
        skipped = {"result": [], "was_cancelled": True}  # Label Studio's word for it
        task["annotations"] = [label if row["answer"] == "label" else skipped] if row["answer"] else []
        guess = {"result": [_choice(row["prediction"])], "model_version": "streamclr"}
        if row["probability"] != "":
            guess["score"] = row["probability"]
        task["predictions"] = [guess] if row["prediction"] else []
        tasks.append(json.dumps(task, ensure_ascii=False))
    lines = ",\n".join(tasks)  # one task per line, so that errors can name the line
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    choices = "\n".join(f'    <Choice value="{html.escape(name)}"/>' for name in session.labels.classes().values())
    interface.write_text(INTERFACE.format(choices=choices), encoding="utf-8")


def _kind(picture: bytes) -> str:
    return "jpeg" if picture.startswith(b"\xff\xd8") else "png"


def _choice(name: str) -> dict[str, Any]:
    return {"from_name": FROM, "to_name": TO, "type": "choices", "value": {"choices": [name]}}


def _read_tasks(text: str, file: Path) -> list[Read]:
    found: list[Read] = []
    for line, task in _items(text, file):
        try:
            data, key = task["data"], task["data"]["key"]
            given = list(task.get("annotations", task.get("completions", [])))
            if not isinstance(key, str) or not all(isinstance(one, dict) for one in given):
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise _wrong(file, line, "not a task of this export, data.key is missing") from None
        if not given:
            continue
        made = [one for one in given if not one.get("was_cancelled")]
        if not made:
            found.append((line, key, "unsure" if data.get("answer") == "unsure" else "skip", None))
            continue
        # The last annotation that was not skipped counts, as in Label Studio's converter.
        one = max(reversed(made), key=lambda annotation: str(annotation.get("created_at", "")))
        problem = ""
        try:
            results = [result["value"]["choices"] for result in one["result"] if result["type"] == "choices"]
            choices = [name for names in results for name in names]
            if len(choices) != 1 or not isinstance(choices[0], str):
                problem = f"{len(choices)} classes in one annotation, use one"
        except (KeyError, TypeError):
            problem = "the annotation is not a choice of a class"
        if problem:  # Label Studio may write all tasks on one line
            raise UserError(f"{file}, line {line}, task {str(task.get('id'))[:40]}: {problem}: nothing was changed")
        found.append((line, key, "label", choices[0]))
    return found


def _items(text: str, file: Path) -> list[tuple[int, Any]]:
    """The items of a JSON list, each with the line where it begins."""
    items: list[tuple[int, Any]] = []
    place, line = 0, 1

    def next_from(start: int) -> str:
        """The next character that is not blank, or "" at the end; `place` and `line` are where it is."""
        nonlocal place, line
        found = NOT_BLANK.search(text, start)
        before, place = place, found.start() if found else len(text)
        line += text.count("\n", before, place)
        return text[place : place + 1]

    mark = next_from(0)
    if mark == "[" and next_from(1 + place) == "]":
        mark = "]"
    while mark in ("[", ","):
        try:
            item, end = json.JSONDecoder().raw_decode(text, place)
        except ValueError as error:
            message = f"not JSON ({getattr(error, 'msg', error)})"
            raise _wrong(file, getattr(error, "lineno", line), message) from None
        except RecursionError:
            raise _wrong(file, line, "nested too deeply") from None
        items.append((line, item))
        mark = next_from(end)
        if mark == ",":
            next_from(place + 1)
    if mark != "]":
        raise _wrong(file, line, "not a JSON list of tasks")
    if next_from(place + 1):
        raise _wrong(file, line, "text after the list of tasks")
    return items


def _write_csv(session: LabelSession, file: Path, folder: Path) -> None:
    """Write the table, and the pictures into a folder next to it."""
    folder.mkdir()
    with file.open("w", encoding="utf-8", newline="") as out:
        table = csv.DictWriter(out, HEAD)
        table.writeheader()
        for row, picture in _rows(session):
            name = f"{row['key']}.{_kind(picture)}"
            (folder / name).write_bytes(picture)
            safe = {column: cell.written(value) for column, value in row.items()}
            table.writerow(safe | {"image": f"{folder.name}/{name}"})


def _read_csv(text: str, file: Path) -> list[Read]:
    lines = list(io.StringIO(text, newline=""))  # not splitlines, which splits at more characters than CSV does
    reader = csv.DictReader(lines, strict=True)
    found = []
    try:
        for name in ("key", "label"):
            if name not in (reader.fieldnames or []):
                raise _wrong(file, 1, f"no column {name!r}")
        for row in reader:
            line = reader.line_num
            if None in row.values() and line == len(lines) and not text.endswith(("\n", "\r")):
                raise _wrong(file, line, "the file ends within a row")
            name = cell.read(row["label"] or "")
            kind = (row.get("answer") or "").strip() or ("label" if name else "")
            if kind and kind not in KINDS:
                raise _wrong(file, line, f"unknown answer {kind!r}")
            if kind == "label" and not name:
                raise _wrong(file, line, "a label without a class")
            if kind != "label" and name:
                raise _wrong(file, line, "a class without the answer 'label'")
            if None in row:
                raise _wrong(file, line, "more cells than column names")
            if kind:
                found.append((line, (row["key"] or "").strip(), kind, name or None))
    except csv.Error as error:
        began = reader.line_num + 1  # first line of the row; after a stray quote it may reach to the end of the file
        raise _wrong(file, began, f"not CSV ({error})") from None
    return found
