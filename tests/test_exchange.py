import base64
import csv
import io
import json
import random
import shutil
import time
import xml.etree.ElementTree as ET

import pytest
import torch
from PIL import Image

from streamclr.base.errors import UserError
from streamclr.labelling.exchange import HEAD, export_labels, import_labels
from streamclr.labelling.session import LabelSession
from streamclr.labelling.store import Labels, Question
from streamclr.records.directory import RunDirectory
from support.labelling import SIZE, colours, keys, make_run, opened, reach

NAMES = ["cat", 'Größe, "XL"', "=cmd|' /C calc'!A0", "+1", "-1", "@home", "'tis", "''", "猫 <&>", "a;b", "{choices}"]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    path = make_run(tmp_path_factory.mktemp("exchange") / "chosen", budget="20")
    opened(path).close()
    return path


@pytest.fixture
def session(chosen, tmp_path):
    one = opened(shutil.copytree(chosen, tmp_path / "run"))
    yield one
    one.close()


@pytest.fixture
def other(chosen, tmp_path):
    """The same questions, of which nobody has answered any."""
    one = opened(shutil.copytree(chosen, tmp_path / "other"))
    yield one
    one.close()


def answer_some(one, names=NAMES):
    """All kinds of answers: a label of each name, one skipped, one unsure, the others open."""
    numbers = {name: one.labels.add_class(name) for name in dict.fromkeys(names)}
    for i, name in enumerate(names):
        one.labels.answer(f"answer-{i}", "label", [one.questions[i].key], numbers[name])
    one.labels.answer("answer-s", "skip", [one.questions[len(names)].key])
    one.labels.answer("answer-u", "unsure", [one.questions[len(names) + 1].key])


def answers(one):
    """In words."""
    names = one.labels.classes()
    return {
        key: (answer.kind, names[answer.class_id] if answer.class_id else None)
        for key, answer in one.labels.answers().items()
    }


def dump(one):
    return "\n".join(one.labels._connection.iterdump())


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_there_and_back_it_is_the_same(session, other, tmp_path, kind):
    answer_some(session)
    file = tmp_path / f"labels.{kind}"
    assert export_labels(session, file) == 20
    before = dump(session)
    assert import_labels(session, file) == 0
    assert dump(session) == before
    assert import_labels(other, file) == len(NAMES) + 2
    assert answers(other) == answers(session)
    assert import_labels(other, file) == 0


def test_nothing_is_answered_and_nothing_comes_back(session, tmp_path):
    for name in ("labels.json", "labels.csv", "LABELS.CSV"):
        assert export_labels(session, tmp_path / name) == 20
        assert import_labels(session, tmp_path / name) == 0
    assert session.labels.answers() == {}


def test_an_answer_in_the_file_takes_the_place_of_the_one_before_and_none_leaves_it(session, tmp_path):
    file = tmp_path / "labels.csv"
    answer_some(session, ["cat", "dog"])
    first, second, third = keys(session)[:3]
    file.write_text(f"key,label\n{first},dog\n{second},\n{third},cat\n")
    assert import_labels(session, file) == 2
    assert [answers(session)[key] for key in (first, second, third)] == [("label", "dog")] * 2 + [("label", "cat")]


# ---- Label Studio ----------------------------------------------------------------------------------------------------


def tasks_of(one, tmp_path):
    export_labels(one, tmp_path / "tasks.json")
    return json.loads((tmp_path / "tasks.json").read_text("utf-8"))


def test_a_task_has_its_picture_the_answer_and_the_prediction(session, tmp_path):
    """https://labelstud.io/guide/task_format and https://labelstud.io/guide/predictions"""
    answer_some(session, ["cat", "dog", "cat", "猫"])
    trained = session.train()
    (before := tmp_path / "before").mkdir()
    assert not any("score" in one for task in tasks_of(session, before) for one in task["predictions"])
    trained.is_calibrated = True  # four labels are too few to tell how certain a guess may be
    tasks = tasks_of(session, tmp_path)
    images = colours(90)
    names = session.labels.classes()
    for row, (task, question) in enumerate(zip(tasks, session.questions, strict=True)):
        head, data = task["data"]["image"].split(",")
        assert head == "data:image/png;base64"
        picture = torch.tensor(list(Image.open(io.BytesIO(base64.b64decode(data))).tobytes())).view(SIZE, SIZE, 3)
        assert torch.equal(picture.permute(2, 0, 1), images[question.arrival].long())
        assert task["data"]["key"] == question.key
        (prediction,) = task["predictions"]
        probability, best = trained.probabilities[row].max(0)
        assert prediction["score"] == pytest.approx(float(probability), abs=1e-4)
        assert prediction["model_version"] == "streamclr"
        choice = names[trained.classes[int(best)]]
        value = {"from_name": "label", "to_name": "image", "type": "choices", "value": {"choices": [choice]}}
        assert prediction["result"] == [value]
    assert [len(task["annotations"]) for task in tasks] == [1] * 6 + [0] * 14
    assert [task["annotations"][0]["result"][0]["value"] for task in tasks[:4]] == [
        {"choices": [name]} for name in ("cat", "dog", "cat", "猫")
    ]
    assert all(task["annotations"][0]["was_cancelled"] for task in tasks[4:6])


def test_without_a_classifier_there_is_no_prediction(session, tmp_path):
    answer_some(session, ["cat"])
    assert {len(task["predictions"]) for task in tasks_of(session, tmp_path)} == {0}


def test_the_labelling_interface_has_the_names_of_the_results(session, tmp_path):
    """https://labelstud.io/tags/choices"""
    answer_some(session)
    tasks_of(session, tmp_path)
    view = ET.fromstring((tmp_path / "tasks.xml").read_text("utf-8"))
    assert view.find("Image").attrib == {"name": "image", "value": "$image"}
    assert view.find("Choices").attrib == {"name": "label", "toName": "image", "choice": "single-radio"}
    assert [choice.attrib["value"] for choice in view.iter("Choice")] == NAMES


def annotation(number, name=None, **more):
    """As Label Studio exports one: https://labelstud.io/guide/task_format"""
    region = {"value": {"choices": [name]}, "id": "Dx_aB91ISN", "from_name": "label", "to_name": "image"}
    return {
        "id": 1000 + number,
        "completed_by": {"id": 1, "email": "person@example.com", "first_name": "", "last_name": ""},
        "result": [region | {"type": "choices", "origin": "manual"}] if name else [],
        "was_cancelled": False,
        "ground_truth": False,
        "created_at": f"2024-03-09T22:16:{number:02}.728353Z",
        "updated_at": "2024-03-09T22:16:08.728378Z",
        "draft_created_at": None,
        "lead_time": 4.288,
        "prediction": {},
        "result_count": 1,
        "unique_id": "b9ff1b2c-0000-4000-8000-000000000000",
        "import_id": None,
        "last_action": None,
        "task": number,
        "project": 3,
        "updated_by": 1,
        "parent_prediction": None,
        "parent_annotation": None,
        "last_created_by": None,
    } | more


def by_label_studio(tasks, answered):
    """What it gives back: numbers, times and keys of its own; of annotations that were imported only what it knows."""
    for number, task in enumerate(tasks, 71):
        old = [
            annotation(0) | {name: given[name] for name in ("result", "was_cancelled") if name in given}
            for given in task["annotations"]
        ]
        task |= {
            "id": number,
            "annotations": old + answered.get(task["data"]["key"], []),
            "file_upload": "0a1b2c3d-tasks.json",
            "drafts": [],
            "meta": {},
            "created_at": "2024-03-09T21:52:49.513742Z",
            "updated_at": "2024-03-09T22:16:08.746926Z",
            "inner_id": number - 70,
            "total_annotations": 1,
            "cancelled_annotations": 0,
            "total_predictions": 0,
            "comment_count": 0,
            "unresolved_comment_count": 0,
            "last_comment_updated_at": None,
            "project": 3,
            "updated_by": 1,
            "comment_authors": [],
        }
        for prediction in task["predictions"]:
            prediction |= {"id": 5, "created_ago": "3 hours", "cluster": None, "task": number}
    tasks = [dict(sorted(task.items(), key=lambda item: item[0][::-1])) for task in tasks]
    random.Random(0).shuffle(tasks)
    return tasks


@pytest.mark.parametrize("indent", [None, 2])
def test_what_label_studio_gives_back_is_read(session, tmp_path, indent):
    answer_some(session, ["cat", "dog", "cat"])
    session.train()
    before = answers(session)
    tasks = tasks_of(session, tmp_path)
    a, b, c, d, e, f = keys(session)[5:11]
    answered = {
        a: [annotation(1, "bird")],
        b: [annotation(1, was_cancelled=True)],
        c: [annotation(1, "bird"), annotation(2, "cat"), annotation(3, was_cancelled=True)],  # of three people
        d: [annotation(7, "dog"), annotation(2, "cat")],  # in any order: the one that was made last
        e: [annotation(1, was_cancelled=True), annotation(2, "bird", was_cancelled=True)],
        f: [annotation(1, "cat")],
        keys(session)[0]: [annotation(9, "bird")],  # somebody thinks otherwise
    }
    file = tmp_path / "project-3-at-2024-03-09-22-20-b9ff1b2c.json"
    file.write_text(json.dumps(by_label_studio(tasks, answered), ensure_ascii=indent is None, indent=indent), "utf-8")
    assert import_labels(session, file) == 7
    assert answers(session) == before | {
        a: ("label", "bird"),
        b: ("skip", None),
        c: ("label", "cat"),
        d: ("label", "dog"),
        e: ("skip", None),
        f: ("label", "cat"),
        keys(session)[0]: ("label", "bird"),
    }
    assert import_labels(session, file) == 0


def test_who_was_unsure_still_is_after_a_way_through_label_studio(session, tmp_path):
    answer_some(session, ["cat"])
    tasks = by_label_studio(tasks_of(session, tmp_path), {})
    (tmp_path / "back.json").write_text(json.dumps(tasks))
    before = answers(session)
    assert import_labels(session, tmp_path / "back.json") == 0
    assert answers(session) == before


def test_an_export_of_some_tasks_alone_is_read(session, tmp_path):
    tasks = tasks_of(session, tmp_path)[4:6]
    tasks[0]["annotations"] = [annotation(1, "cat")]
    del tasks[1]["annotations"], tasks[1]["predictions"]
    (tmp_path / "some.json").write_text(json.dumps(tasks))
    assert import_labels(session, tmp_path / "some.json") == 1


# ---- CSV -------------------------------------------------------------------------------------------------------------


def table_of(one, tmp_path):
    export_labels(one, tmp_path / "labels.csv")
    with (tmp_path / "labels.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_has_a_row_and_a_picture_for_each_question(session, tmp_path):
    answer_some(session, ["cat", "dog"])
    trained = session.train()
    (before := tmp_path / "before").mkdir()
    assert {row["probability"] for row in table_of(session, before)} == {""}
    trained.is_calibrated = True  # two labels are too few to tell how certain a guess may be
    rows = table_of(session, tmp_path)
    assert list(rows[0]) == HEAD
    assert [row["key"] for row in rows] == keys(session)
    assert [row["answer"] for row in rows[:5]] == ["label", "label", "skip", "unsure", ""]
    assert [row["label"] for row in rows[:3]] == ["cat", "dog", ""]
    assert all(row["prediction"] in ("cat", "dog") for row in rows)
    best = trained.probabilities.amax(1).tolist()
    assert [float(row["probability"]) for row in rows] == pytest.approx(best, abs=1e-4)
    for row in rows:
        assert (tmp_path / row["image"]).read_bytes() == session.labels.picture(row["key"])


def test_no_cell_is_a_formula(session, tmp_path):
    answer_some(session)
    session.train()
    for row in table_of(session, tmp_path):
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\r\n", "\n"),
        lambda text: text.replace("\r\n", "\r"),
        lambda text: text.rstrip(),
        lambda text: text.replace("\r\n", "\r\n\r\n"),
        lambda text: text + "\r\n \r\n".replace(" ", ""),
    ],
    ids=["bom", "lf", "cr", "no end of the last line", "empty lines", "empty lines at the end"],
)
def test_tables_as_other_programs_save_them(session, other, tmp_path, change):
    answer_some(session)
    table_of(session, tmp_path)
    text = (tmp_path / "labels.csv").read_bytes().decode()
    (tmp_path / "changed.csv").write_bytes(change(text).encode())
    assert import_labels(other, tmp_path / "changed.csv") == len(NAMES) + 2
    assert answers(other) == answers(session)


def test_columns_in_another_order_with_notes_and_quotes_and_lines_in_them(session, tmp_path):
    """The end of a line in Unicode is none in CSV."""
    file, (first, second, *_) = tmp_path / "labels.csv", keys(session)
    file.write_text(
        f'label,notes,key\n"small\n  cat","a, ""quoted""\nsecond line",{first}\n 猫 ,odd\u2028\x85\x0cnote,{second}\n',
        encoding="utf-8",
    )
    assert import_labels(session, file) == 2
    assert answers(session) == {first: ("label", "small cat"), second: ("label", "猫")}


def test_an_apostrophe_that_somebody_wrote_stays(session, tmp_path):
    first, second, third, *_ = keys(session)
    (tmp_path / "l.csv").write_text(f"key,label\n{first},'n Hond\n{second},'=1\n{third},''tis\n")
    assert import_labels(session, tmp_path / "l.csv") == 3
    assert [answers(session)[key][1] for key in (first, second, third)] == ["'n Hond", "=1", "'tis"]


# ---- what does not fit -----------------------------------------------------------------------------------------------


def task(key, *annotations):
    return {"id": 7, "data": {"key": key}, "annotations": list(annotations)}


def lines(*tasks):
    return "[\n" + ",\n".join(one if isinstance(one, str) else json.dumps(one) for one in tasks) + "\n]\n"


CAT = annotation(1, "cat")
A, B, UNKNOWN = "A" * 32, "B" * 32, "f" * 32  # A and B stand for keys of questions
BAD_TASKS = {
    "unknown key": (lines(task(A, CAT), task(UNKNOWN, CAT)), "line 3: no question 'ffff"),
    "two answers": (lines(task(A, CAT), task(B, CAT), task(A, CAT)), "line 4: .* already has an answer in line 2"),
    "the same twice in one line": (json.dumps([task(A, CAT)] * 2), "line 1: .* already has an answer in line 1"),
    "bad JSON": (lines(task(A, CAT), '{"data": {"key": nonsense}}'), "line 3: not JSON"),
    "bad JSON within a task": ('[\n{\n"data":\n{"key": "x",\n,}}]', "line 5: not JSON"),
    "a string over two lines": (lines(task(A, CAT), '{"data": "a\nb"}'), "line 3: not JSON"),
    "no comma": (lines(task(A, CAT)).replace("\n]", "\n{}]"), "line 3: not a JSON list of tasks"),
    "cut within a task": (lines(task(A, CAT), task(B, CAT))[:-30], "line 3: not JSON"),
    "cut after a task": (lines(task(A, CAT), task(B, CAT))[:-3], "line 3: not a JSON list of tasks"),
    "cut after a comma": (lines(task(A, CAT)).rstrip("\n]") + ",\n", "line 3: not JSON"),
    "empty": ("", "line 1: not a JSON list of tasks"),
    "blank": ("\n \n", "line 3: not a JSON list of tasks"),
    "no list": (json.dumps(task(A, CAT)), "line 1: not a JSON list of tasks"),
    "two lists": (lines(task(A, CAT)) + lines(task(B, CAT)), "line 4: text after the list of tasks"),
    "an empty list and more": ("[]\n[]", "line 2: text after the list of tasks"),
    "no task": (lines(task(A, CAT), [1, 2]), "line 3: not a task of this export"),
    "a number": (lines(task(A, CAT), 12), "line 3: not a task of this export"),
    "no key": (lines(task(A, CAT), {"data": {"image": "x"}}), "line 3: not a task of this export"),
    "a key that is none": (lines(task(["x"], CAT)), "line 2: not a task of this export"),
    "annotations that are none": (lines(task(A, CAT), task(B, "cat")), "line 3: not a task of this export"),
    "JSON-MIN": (json.dumps([{"image": "x", "label": "cat", "id": 1}]), "line 1: not a task of this export"),
    "a box": (
        lines(task(A, CAT), task(B, CAT | {"result": [{"type": "choices", "value": {"x": 1}}]})),
        "line 3, task 7: the annotation is not a choice",
    ),
    "no result": (lines(task(A, {"id": 1})), "line 2, task 7: the annotation is not a choice"),
    "nothing chosen": (lines(task(A, CAT), task(B, annotation(1))), "line 3, task 7: 0 classes in one annotation"),
    "two chosen": (lines(task(A, CAT | {"result": CAT["result"] * 2})), "line 2, task 7: 2 classes in one annotation"),
    "a class that is no text": (lines(task(A, annotation(1, 12))), "line 2, task 7: 1 classes in one annotation"),
    "a long name": (lines(task(A, CAT), task(B, annotation(1, "x" * 101))), "line 3: class name .* not allowed"),
    "an empty name": (lines(task(A, CAT), task(B, annotation(1, " "))), "line 3: class name .* not allowed"),
    "half a character": (lines(task(A, annotation(1, "\ud83d"))), "line 2: class name .* not allowed"),
    "deep": ("[" * 100_000, "line 1: nested too deeply"),
    "deep in a task": (lines(task(A, CAT), '{"data":' * 100_000), "line 3: nested too deeply"),
    "a number of 5,000 digits": (lines(task(A, CAT), "9" * 5000), "line 3: not JSON"),
}
HEADING = "key,image,arrival,answer,label,prediction,probability\n"
ROW = f"{A},i.png,1,label,cat,,\n"
BAD_TABLES = {
    "unknown key": (HEADING + ROW + f"{UNKNOWN},,,label,cat,,\n", "line 3: no question 'ffff"),
    "no key": (HEADING + ",,,label,cat,,\n", "line 2: no question ''"),
    "two answers": (HEADING + ROW + ROW, "line 3: .* already has an answer in line 2"),
    "no column of labels": (HEADING.replace("label", "class") + ROW, "line 1: no column 'label'"),
    "no column of keys": ("id,label\n1,cat\n", "line 1: no column 'key'"),
    "semicolons": (HEADING.replace(",", ";") + ROW.replace(",", ";"), "line 1: no column 'key'"),
    "empty": ("", "line 1: no column 'key'"),
    "a kind that is none": (HEADING + f"{A},,,perhaps,,,\n", "line 2: unknown answer 'perhaps'"),
    "a label without a class": (HEADING + ROW + f"{B},,,label,,,\n", "line 3: a label without a class"),
    "a class without a label": (HEADING + f"{A},,,skip,cat,,\n", "line 2: a class without the answer 'label'"),
    "a comma without quotes": (HEADING + f"{A},i.png,1,label,a,b,,\n", "line 2: more cells than column names"),
    "a quote that is not closed": (HEADING + ROW + f'{B},i.png,1,label,"cat,,\n', "line 3: not CSV"),
    "text after a quote": (HEADING + f'{A},i.png,1,label,"cat"s,,\n', "line 2: not CSV"),
    "cut within the key": (HEADING + ROW + B[:20], "line 3: the file ends within a row"),
    "cut within the class": (HEADING + ROW + f"{B},i.png,2,label,d", "line 3: the file ends within a row"),
    "a long name": (HEADING + f"{A},,,label,{'x' * 101},,\n", "line 2: class name .* not allowed"),
    "a name with a bell": (HEADING + f"{A},,,label,a\x07b,,\n", "line 2: class name .* not allowed"),
    "a cell without an end": (HEADING + ROW + f'{B},"' + "x\n" * 100_000, "line 3: not CSV"),
}


@pytest.mark.parametrize(
    ("kind", "what"), [("json", what) for what in BAD_TASKS] + [("csv", what) for what in BAD_TABLES]
)
def test_what_does_not_fit_is_told_with_its_line_and_changes_nothing(session, tmp_path, kind, what):
    text, told = (BAD_TASKS if kind == "json" else BAD_TABLES)[what]
    text = text.replace(A, keys(session)[0]).replace(B, keys(session)[1])
    file, before = tmp_path / f"bad.{kind}", dump(session)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=rf"bad\.{kind}, {told}") as error:
        import_labels(session, file)
    assert "nothing was changed" in str(error.value)
    assert len(str(error.value)) < 500
    assert dump(session) == before


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_text_that_is_not_utf_8_is_told_with_its_line(session, tmp_path, start):
    before = dump(session)
    for name, content, line in (
        ("l.csv", b"key,label\n\xe9t\xe9,\n", 2),
        ("l.csv", b"key,label\nabc,\n,\xe9", 3),
        ("l.json", b'[\n{"data":\n{"key": "\xff"}}]', 3),
        ("l.csv", "key,label\n".encode("utf-16"), 1),
    ):
        (tmp_path / name).write_bytes(start + content)
        with pytest.raises(UserError, match=f"line {line}: not UTF-8 text: nothing was changed"):
            import_labels(session, tmp_path / name)
    assert dump(session) == before


def test_files_that_are_none_are_said(session, tmp_path):
    (tmp_path / "folder.csv").mkdir()
    for name, told in (("missing.json", "cannot read"), ("folder.csv", "cannot read"), ("l.xlsx", "no known suffix")):
        with pytest.raises(UserError, match=told):
            import_labels(session, tmp_path / name)
    with pytest.raises(UserError, match="no known suffix"):
        export_labels(session, tmp_path / "labels.xlsx")
    for name in ("a.xml", "b-images"):
        (tmp_path / name).touch()
    for name, told in (("nowhere/a.json", "no directory"), ("a.json", "a.xml exists"), ("b.csv", "b-images exists")):
        with pytest.raises(UserError, match=told):
            export_labels(session, tmp_path / name)
    assert session.labels.fact("given") is None


def test_answers_for_another_run_are_refused(session, tmp_path):
    different = opened(make_run(tmp_path / "different", images=colours(90, seed=1), budget="20"))
    answer_some(different, ["cat"])
    for name in ("l.json", "l.csv"):
        export_labels(different, tmp_path / name)
        before = dump(session)
        with pytest.raises(UserError, match="no question"):
            import_labels(session, tmp_path / name)
        assert dump(session) == before


# ----------------------------------------------------------------------------------------------------------------------


def test_questions_that_another_process_chose_meanwhile_are_not_exported_half(tmp_path):
    path = make_run(tmp_path / "run", finished=False, step=1)
    one = opened(path)
    reach(path, 2)
    opened(path).close()
    if one.questions == one.labels.questions():
        pytest.skip("both encoders choose the same")
    with pytest.raises(UserError, match="export again"):
        export_labels(one, tmp_path / "tasks.json")
    one.prepare(choose_anew=False)
    assert export_labels(one, tmp_path / "tasks.json") == 30


def test_questions_that_were_exported_are_never_replaced(tmp_path):
    path = make_run(tmp_path / "run", finished=False, step=1)
    one = opened(path)
    export_labels(one, tmp_path / "tasks.json")
    before = set(keys(one))
    reach(path, 2)
    one.prepare()
    assert set(keys(one)) == before


def test_an_import_while_others_have_the_database_open(session, tmp_path):
    """As a server has; it sees the answers, and may write between."""
    server = Labels(session.labels.path)
    answer_some(session, ["cat"])
    file = tmp_path / "l.csv"
    file.write_text("key,label\n" + "".join(f"{key},dog\n" for key in keys(session)[5:]))
    assert import_labels(session, file) == 15
    server.answer("answer-x", "label", [keys(session)[5]], 1)
    assert len(server.answers()) == 18
    assert answers(session)[keys(session)[5]] == ("label", "cat")
    server.close()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """10,000 questions with pictures of a usual size."""
    path = make_run(tmp_path_factory.mktemp("many") / "run", images=colours(20), budget="10")
    one = LabelSession(RunDirectory(path))
    numbers = range(10_000)
    one.labels.ask((Question(f"{i:032x}", i, i), b"x" * 3000) for i in numbers)
    yield one
    one.close()


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_ten_thousand_answers_are_fast(many, tmp_path, kind):
    n, file = 10_000, tmp_path / f"l.{kind}"
    if kind == "json":
        image = "data:image/png;base64," + "A" * 3000
        tasks = [task(f"{i:032x}", annotation(1, f"class {i % 1000}")) for i in range(n)]
        for one in tasks:
            one["data"]["image"] = image
        file.write_text(lines(*tasks))
    else:
        file.write_text("key,label\n" + "".join(f"{i:032x},kind {i % 1000}\n" for i in range(n)))
    started = time.process_time()
    assert import_labels(many, file) == n
    assert time.process_time() - started < 5
    assert len(many.labels.answers()) == n
