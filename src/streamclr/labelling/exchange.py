"""Questions and answers as files for other tools: Label Studio's task JSON, and CSV."""

import base64
import csv
import io
import json
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
Read = tuple[int, str, str, str | None]  # line, key, kind of answer, name of the class


def export_labels(session: LabelSession, file: Path) -> int:
    """Write all questions, answered or not, with the classifier's predictions. The suffix of the file gives the
    format. Returns the number of questions."""
    write = {".json": _write_tasks, ".csv": _write_csv}.get(file.suffix.lower())
    if write is None:
        raise UserError(f"{file} has no known suffix: use .json (Label Studio) or .csv")
    beside = file.with_suffix(".xml") if write is _write_tasks else _pictures(file)
    for taken in (file, beside):
        if taken.exists():
            raise UserError(f"{taken} exists already and is not overwritten: give another name")
    if not file.parent.is_dir():
        raise UserError(f"no directory {file.parent} for {file.name}: make it, or give another name")
    session.labels.note("given", str(file.name))  # exported questions are never replaced
    if session.questions != session.labels.questions():
        raise UserError("the questions changed during the export: export again")
    return write(session, file)


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
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{file}, line {line}: not UTF-8 text: nothing was changed") from None
    known = {question.key for question in session.labels.questions()}
    answers: list[tuple[str, str, str | None]] = []
    seen: dict[str, int] = {}
    for line, key, kind, name in read(text, file):
        where = f"{file}, line {line}"
        if key not in known:
            raise UserError(f"{where}: no question {key[:40]!r} in {session.directory.path}: nothing was changed")
        if key in seen:
            raise UserError(f"{where}: {key} already has an answer in line {seen[key]}: nothing was changed")
        if name is not None:
            try:
                name = checked_name(name)
            except UserError as error:
                raise UserError(f"{where}: {error}: nothing was changed") from None
        seen[key] = line
        answers.append((key, kind, name))
    return session.labels.bring_in(answers)


# ----------------------------------------------------------------------------------------------------------------------


def _rows(session: LabelSession) -> list[dict[str, Any]]:
    """One row per question, the same for both formats."""
    answers, names = (session.labels.answers(), session.labels.classes())  # in this order: no answer without its class
    rows = []
    for row, question in enumerate(session.questions):
        answer, guess = answers.get(question.key), session.guess(row)
        rows.append(
            {
                "key": question.key,
                "arrival": question.arrival,
                "answer": answer.kind if answer else "",
                "label": names[answer.class_id] if answer and answer.class_id is not None else "",
                "prediction": names[guess["class"]] if guess else "",
                "probability": guess["probability"] if guess else "",
            }
        )
    return rows


def _write_tasks(session: LabelSession, file: Path) -> int:
    tasks = []
    for number, row in enumerate(_rows(session), 1):
        picture = session.labels.picture(row["key"])
        assert picture is not None
        image = "data:image/png;base64," + base64.b64encode(picture).decode()
        task: dict[str, Any] = {"id": number, "data": {"image": image, "key": row["key"], "arrival": row["arrival"]}}
        if row["answer"] == "unsure":  # Label Studio keeps unknown keys in data only
            task["data"]["answer"] = "unsure"
        task["annotations"] = [] if not row["answer"] else [_annotation(row)]
        guess = [{"result": [_choice(row["prediction"])], "score": row["probability"], "model_version": "streamclr"}]
        task["predictions"] = guess if row["prediction"] else []
        tasks.append(task)
    # One task per line, so that errors can name the line.
    lines = ",\n".join(json.dumps(task, ensure_ascii=False) for task in tasks)
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    choices = "\n".join(f'    <Choice value="{_escaped(name)}"/>' for name in session.labels.classes().values())
    file.with_suffix(".xml").write_text(INTERFACE.format(choices=choices), encoding="utf-8")
    return len(tasks)


def _annotation(row: dict[str, Any]) -> dict[str, Any]:
    """Answers other than labels are `was_cancelled`, Label Studio's word for skipped."""
    if row["answer"] == "label":
        return {"result": [_choice(row["label"])]}
    return {"result": [], "was_cancelled": True}


def _choice(name: str) -> dict[str, Any]:
    return {"from_name": FROM, "to_name": TO, "type": "choices", "value": {"choices": [name]}}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def _read_tasks(text: str, file: Path) -> list[Read]:
    found: list[Read] = []
    for line, task in _items(text, file):
        where = f"{file}, line {line}"
        try:
            data, key = task["data"], task["data"]["key"]
            given = list(task.get("annotations", task.get("completions", [])))
            if not isinstance(key, str) or not all(isinstance(one, dict) for one in given):
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{where}: not a task of this export, data.key is missing: nothing was changed") from None
        if not given:
            continue
        where = f"{where}, task {str(task.get('id'))[:40]}"  # Label Studio may write all tasks on one line
        made = [one for one in given if not one.get("was_cancelled")]
        if not made:
            found.append((line, key, "unsure" if data.get("answer") == "unsure" else "skip", None))
            continue
        # The last annotation that was not skipped counts, as in Label Studio's converter.
        one = max(reversed(made), key=lambda annotation: str(annotation.get("created_at", "")))
        try:
            choices = [
                name for result in one["result"] if result["type"] == "choices" for name in result["value"]["choices"]
            ]
        except (KeyError, TypeError):
            raise UserError(f"{where}: the annotation is not a choice of a class: nothing was changed") from None
        if len(choices) != 1 or not isinstance(choices[0], str):
            raise UserError(f"{where}: {len(choices)} classes in one annotation, use one: nothing was changed")
        found.append((line, key, "label", choices[0]))
    return found


def _items(text: str, file: Path) -> list[tuple[int, Any]]:
    """The items of a JSON list, each with the line where it begins."""
    decoder, items = json.JSONDecoder(), list[tuple[int, Any]]()
    place = counted = n_lines = 0  # position, and the position up to which lines are counted

    def blank() -> None:
        nonlocal place
        while place < len(text) and text[place] in " \t\r\n":
            place += 1

    def line() -> int:
        nonlocal n_lines, counted
        n_lines, counted = n_lines + text.count("\n", counted, place), place
        return n_lines + 1

    def end() -> list[tuple[int, Any]]:
        blank()
        if place < len(text):
            raise UserError(f"{file}, line {line()}: text after the list of tasks: nothing was changed")
        return items

    def expect(allowed: str) -> str:
        nonlocal place
        blank()
        if place >= len(text) or text[place] not in allowed:
            raise UserError(f"{file}, line {line()}: not a JSON list of tasks: nothing was changed")
        place += 1
        return text[place - 1]

    expect("[")
    blank()
    if text[place : place + 1] == "]":
        place += 1
        return end()
    while True:
        blank()
        began = line()
        try:
            item, place = decoder.raw_decode(text, place)
        except ValueError as error:
            number = getattr(error, "lineno", began)
            raise UserError(
                f"{file}, line {number}: not JSON ({getattr(error, 'msg', error)}): nothing was changed"
            ) from None
        except RecursionError:
            raise UserError(f"{file}, line {began}: nested too deeply: nothing was changed") from None
        items.append((began, item))
        if expect(",]") == "]":
            return end()


def _pictures(file: Path) -> Path:
    return file.with_name(f"{file.stem}-images")


def _write_csv(session: LabelSession, file: Path) -> int:
    """Write the table, and the pictures into a folder next to it."""
    folder = _pictures(file)
    folder.mkdir()
    rows = _rows(session)
    with file.open("w", encoding="utf-8", newline="") as out:
        table = csv.DictWriter(out, HEAD)
        table.writeheader()
        for row in rows:
            picture = session.labels.picture(row["key"])
            assert picture is not None
            (folder / f"{row['key']}.png").write_bytes(picture)
            safe = {name: cell.written(value) for name, value in row.items()}
            table.writerow(safe | {"image": f"{folder.name}/{row['key']}.png"})
    return len(rows)


def _read_csv(text: str, file: Path) -> list[Read]:
    lines = list(io.StringIO(text, newline=""))  # not splitlines, which splits at more characters than CSV does
    reader = csv.DictReader(lines, strict=True)
    found = []
    try:
        missing = [name for name in ("key", "label") if name not in (reader.fieldnames or [])]
        if missing:
            raise UserError(f"{file}, line 1: no column {missing[0]!r}: nothing was changed")
        for row in reader:
            if None in row.values() and reader.line_num == len(lines) and not text.endswith(("\n", "\r")):
                raise UserError(f"{file}, line {reader.line_num}: the file ends within a row: nothing was changed")
            name = cell.read(row["label"] or "")
            kind = (row.get("answer") or "").strip() or ("label" if name else "")
            if kind and kind not in KINDS:
                raise UserError(f"{file}, line {reader.line_num}: unknown answer {kind!r}: nothing was changed")
            if (kind == "label") != bool(name):
                what = "a label without a class" if kind == "label" else "a class without the answer 'label'"
                raise UserError(f"{file}, line {reader.line_num}: {what}: nothing was changed")
            if None in row:
                raise UserError(f"{file}, line {reader.line_num}: more cells than column names: nothing was changed")
            if kind:
                found.append((reader.line_num, (row["key"] or "").strip(), kind, name or None))
    except csv.Error as error:
        began = reader.line_num + 1  # first line of the row; after a stray quote it may reach to the end of the file
        raise UserError(f"{file}, line {began}: not CSV ({error}): nothing was changed") from None
    return found
