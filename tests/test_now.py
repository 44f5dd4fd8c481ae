import dataclasses
import io
import json
from contextlib import closing

import numpy as np
import pytest
from PIL import Image

from streamclr.base.files import write_json
from streamclr.base.tensors import save_tensors
from streamclr.records.journal import Journal
from streamclr.runs.status import NEWEST
from streamclr.web import now
from streamclr.web.now import N_IN_A_ROW, Newest, Predictions
from streamclr.web.view import RunView
from support.images import random_images
from support.runs import run_plan


def write_newest(path, images, names, time=1000.0):
    tensors = {str(i): image for i, image in enumerate(images)}
    save_tensors(path / NEWEST, tensors, about=json.dumps([{"name": name, "time": time} for name in names]))


def line(name, time, source=None, image=0):
    more = {} if source is None else {"source": source}
    return json.dumps({"image": image, "class": name, "probability": 0.9, "version": 1, "time": time} | more) + "\n"


def test_each_frame_has_a_picture_under_a_key_of_its_own_and_the_last_one_is_still_there(tmp_path):
    images, newest = random_images(3), Newest(tmp_path)
    newest.update()
    assert newest.frames == []
    write_newest(tmp_path, images[:2], ["door", "yard"])
    newest.update()
    first = newest.frames
    assert [(frame["name"], frame["side"]) for frame in first] == [("door", 16), ("yard", 16)]
    for frame, image in zip(first, images, strict=False):
        shown = np.array(Image.open(io.BytesIO(newest.pictures[frame["picture"]])))
        assert np.array_equal(shown, image.permute(1, 2, 0).numpy())
    newest.update()
    assert newest.frames is first  # nothing new
    for time in (2000.0, 3000.0):
        write_newest(tmp_path, images[2:], ["door"], time)
        newest._changed = 0
        newest.update()
    assert len(newest.pictures) == 2  # this one, and the one before
    assert newest.frames[0]["time"] == 3000.0


@pytest.mark.parametrize("about", ["", "{", "[{}]", '[{"name": "a", "time": "x"}]', '[{"name": "a", "time": 1}, 2]'])
def test_damaged_frames_are_none(tmp_path, about):
    save_tensors(tmp_path / NEWEST, {"0": random_images(1)[0]}, about=about)
    newest = Newest(tmp_path)
    newest.update()
    assert newest.frames == []


def test_the_class_of_a_frame_is_that_of_its_own_line(tmp_path):
    lines = [line(name, 10.0 + i, "door") for i, name in enumerate("abc")] + [line("z", 11.0, "yard")]
    (tmp_path / "predictions.jsonl").write_text("".join(lines))
    one = Predictions(tmp_path)
    one.update()
    assert [one.at("door", time).class_name for time in (10.0, 10.9, 11.0, 11.999, 99.0)] == ["a", "a", "b", "c", "c"]
    assert one.at("yard", 99.0).class_name == "z"
    assert one.at("garden", 99.0) is None


def test_a_flicker_is_no_change(tmp_path):
    file, one = tmp_path / "predictions.jsonl", Predictions(tmp_path)
    names = ["empty"] * 20 + ["fox"] * (N_IN_A_ROW - 1) + ["empty"] * 5 + ["fox", "hare"] * 20 + ["fox"] * 20
    file.write_text("".join(line(name, 100 + i / 30) for i, name in enumerate(names)))
    one.update()
    assert [(change["before"], change["class"]) for change in one.changes] == [(None, "empty"), ("empty", "fox")]


def test_a_slow_camera_changes_too(tmp_path):
    names = ["empty", "empty", "empty", "fox", "empty", "fox", "fox", "fox"]
    (tmp_path / "predictions.jsonl").write_text("".join(line(name, 100 + 2 * i) for i, name in enumerate(names)))
    one = Predictions(tmp_path)
    one.update()
    assert [change["class"] for change in one.changes] == ["empty", "fox"]
    assert one.changes[-1]["time"] == 112


def test_sources_change_each_for_itself(tmp_path):
    both = [line(name, 100 + i, source) for i in range(20) for source, name in (("door", "fox"), ("yard", "hare"))]
    (tmp_path / "predictions.jsonl").write_text("".join(both))
    one = Predictions(tmp_path)
    one.update()
    assert [(change["source"], change["class"]) for change in one.changes] == [("door", "fox"), ("yard", "hare")]


def test_classes_of_the_last_hour_are_counted(tmp_path):
    file, one = tmp_path / "predictions.jsonl", Predictions(tmp_path)
    assert one.counts() is None
    file.write_text(line("old", 0) + line(None, 3500) + line("fox", 3600) + line("fox", 3601) + line("hare", 3660))
    one.update()
    counts = one.counts()
    assert counts == {"n": 3, "minutes": 2, "until": 3660, "classes": [["fox", 2], ["hare", 1]], "others": 0}
    with file.open("a") as out:
        out.write(line("hare", 3661) + line("hare", 3662)[:20])
    one.update()
    assert one.counts()["classes"] == [["fox", 2], ["hare", 2]]
    with file.open("a") as out:
        out.write(line("hare", 3662)[20:] + "\xff{]\n[]\n{}\n")
    one.update()
    assert one.counts()["classes"] == [["hare", 3], ["fox", 2]]
    file.write_text(line("fox", 3600))  # cut: the run went on from a checkpoint
    one.update()
    assert one.counts()["classes"] == [["fox", 1]]
    with file.open("a") as out:
        out.writelines(line(f"class {i}", 9000) for i in range(50))
    one.update()
    assert (one.counts()["n"], len(one.counts()["classes"]), one.counts()["others"]) == (50, 12, 38)


def test_no_prediction_is_missed_where_the_file_moves_on(tmp_path):
    one = Predictions(tmp_path)
    with closing(Journal(tmp_path / "predictions.jsonl", limit=20_000)) as journal:
        for image in range(1000):
            journal.write(json.loads(line("fox" if image < 600 else "hare", 1000 + image, image=image)))
            if image % 20 == 19:
                one.update()
    assert (tmp_path / "predictions.jsonl.2").exists()
    assert one.counts()["classes"] == [["fox", 600], ["hare", 400]]
    assert [change["class"] for change in one.changes] == ["fox", "hare"]
    late = Predictions(tmp_path)  # opened now it knows what is left
    late.update()
    assert 100 < late.counts()["n"] < 250


def test_of_weeks_of_predictions_only_the_end_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(now, "MAX_READ_BYTES", 10_000)
    (tmp_path / "predictions.jsonl").write_text("".join(line("fox", 100 + i / 1000) for i in range(5000)))
    one = Predictions(tmp_path)
    one.update()
    assert 80 < one.counts()["n"] < 130
    assert one.until == pytest.approx(104.999)


def test_what_a_page_is_told_of_now_has_no_password(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    plan = run_plan(source="rtsp://me:secret@door/1,rtsp://me:secret@yard/1", images=None, predict=True)
    write_json(path / "config.json", dataclasses.asdict(plan))
    source = "rtsp://me:secret@door/1"
    write_newest(path, random_images(2), [source, "yard"])
    (path / "predictions.jsonl").write_text("".join(line("fox\udcff", 999 + i / 100, source) for i in range(50)))
    told = RunView(path).now()
    text = json.dumps(told)
    assert "secret" not in text
    assert text.isascii()
    assert [frame["class"] for frame in told["frames"]] == ["fox\udcff", None]
    assert told["changes"][0]["source"] == "rtsp://me:***@door/1"
    assert told["classifier"] is told["labels"] is None
