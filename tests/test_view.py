import dataclasses
import fcntl
import itertools
import json
import os
import shutil
import time
from contextlib import closing

import pytest
import torch

from streamclr.base.errors import UserError
from streamclr.base.files import json_line, write_json
from streamclr.base.tensors import save_tensors
from streamclr.records.directory import RunDirectory
from streamclr.records.journal import Journal, files_of
from streamclr.runs.report import curves
from streamclr.step import Step
from streamclr.web import view
from streamclr.web.site import Site
from streamclr.web.view import MAX_POINTS, JournalTail, RunView, columns, find_runs, thinned
from support.runs import run_plan


def line(number, replaced=10, **more):
    step = Step(number, 32 * number, 4.0, 32 - replaced, replaced, 0.5, 0.3, 0.1, 0.2, spread=0.4)
    return json_line(dataclasses.asdict(step) | {"time": 1000.0 + number, "memory": 10**8} | more)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    config = run_plan(source="rtsp://me:secret@camera/1", images=None, out=None)
    write_json(path / "config.json", dataclasses.asdict(config))
    return path


def test_only_new_steps_are_told(run):
    journal, file = JournalTail(run / "journal.jsonl"), run / "journal.jsonl"
    assert journal.read() == (False, [])
    file.write_text(line(1) + line(2))
    anew, points = journal.read()
    assert (anew, [point["step"] for point in points]) == (False, [1, 2])
    with file.open("a") as out:
        out.write(line(3)[:40])
    assert journal.read() == (False, [])
    with file.open("a") as out:
        out.write(line(3)[40:] + line(4))
    assert [point["step"] for point in journal.read()[1]] == [3, 4]
    assert points[1]["replaced"] == 10 / 32
    assert points[1]["rate"] == 32


def test_a_run_that_goes_back_begins_anew(run):
    journal, file = JournalTail(run / "journal.jsonl"), run / "journal.jsonl"
    file.write_text("".join(map(line, range(1, 10))))
    journal.read()
    file.write_text("".join(map(line, range(1, 5))))
    anew, points = journal.read()
    assert anew
    assert [point["step"] for point in points] == [point["step"] for point in journal.points] == [1, 2, 3, 4]


def test_damaged_lines_are_passed_over(run):
    journal, file = JournalTail(run / "journal.jsonl"), run / "journal.jsonl"
    file.write_bytes(line(1).encode() + b"\xff\xfe{]\n[]\n3\n{}\n" + line(2).encode())
    assert [point["step"] for point in journal.read()[1]] == [1, 2]


def test_weeks_of_steps_are_thinned_to_what_a_chart_shows(run, monkeypatch):
    file = run / "journal.jsonl"
    file.write_text("".join(map(line, range(1, 8001))))
    whole = JournalTail(file)
    whole.read()
    monkeypatch.setattr(view, "MAX_JOURNAL_BYTES", 2**16)  # as if this were gigabytes
    sampled = JournalTail(file)
    sampled.read()
    for journal in (whole, sampled):
        assert journal.last["number"] == 8000
        steps = [point["step"] for point in thinned(journal.points)]
        assert MAX_POINTS / 3 < len(steps) <= MAX_POINTS
        assert steps == sorted(set(steps))
        assert steps[0] < 20
        assert steps[-1] > 7900
        gaps = [b - a for a, b in itertools.pairwise(steps)]
        assert max(gaps) < 100
    assert {len(column) for column in columns(whole.points).values()} == {len(whole.points)}


def test_a_journal_whose_file_moves_on_is_followed_and_shown_from_the_beginning(run):
    follower, path = JournalTail(run / "journal.jsonl"), run / "journal.jsonl"
    with closing(Journal(path, limit=40_000)) as journal:
        for number in range(1, 501):
            journal.write(json.loads(line(number)))
            if number % 25 == 0:
                anew, points = follower.read()
                assert not anew
                assert [point["step"] for point in points] == list(range(number - 24, number + 1))
    assert all(file.exists() for file in files_of(path))
    assert [point["step"] for point in follower.points] == list(range(1, 501))
    late = JournalTail(path)
    late.read()
    steps = [point["step"] for point in late.points]
    assert steps == sorted(set(steps))
    assert steps[0] <= 16
    assert steps[-30:] == list(range(471, 501))
    assert RunDirectory(run).steps()[-1] == late.last
    assert "images seen" in curves([("run", RunDirectory(run))])


def test_the_state_is_that_of_the_process(run):
    one = RunView(run)
    one.update()
    assert one.state == "stopped"
    with (run / "config.json").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        one.update()
        assert one.state == "waiting"
        (run / "journal.jsonl").write_text(line(1, time=time.time()))
        one.update()
        assert one.state == "learning"
    write_json(run / "results.json", {"account": {"received": 5, "learned": 5, "passed": {}, "rejected": {}}})
    one.update()
    assert one.state == "finished"
    assert one.status()["account"]["received"] == 5


def test_passwords_of_sources_are_not_shown(run):
    event = {"time": "2026-01-01T00:00:00", "step": 1, "event": "rtsp://me:secret@camera/1: lost"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    status = {"sources": {"rtsp://me:secret@camera/1": {"connected": False, "lost": 2}}}
    (run / "status.json").write_text(json.dumps(status))
    one = RunView(run)
    one.update()
    told = json.dumps([one.about(), one.status()])
    assert "camera/1" in told
    assert "secret" not in told


def health(one):
    return {item["what"]: item["ok"] for item in one.status()["health"]}


def test_collapse_and_drift_are_told_and_their_absence_too(run):
    file, one = run / "journal.jsonl", RunView(run)
    file.write_text("".join(line(i, replaced=3 + i % 3) for i in range(1, 200)))
    one.update()
    assert health(one) == {"collapse": True, "drift": True}
    with file.open("a") as out:
        out.write("".join(line(i, replaced=30) for i in range(200, 230)))
    one.update()
    assert health(one)["drift"] is False
    with file.open("a") as out:
        out.write("".join(line(i, spread=1e-5) for i in range(230, 260)))
    one.update()
    assert health(one)["collapse"] is False


def test_events_are_the_last_twenty_each_once(run):
    file, one = run / "events.jsonl", RunView(run)
    for i in range(50):
        with file.open("a") as out:
            out.write(json.dumps({"time": "t", "step": i, "event": f"event {i}"}) + "\n")
        if i % 7 == 0:
            one.update()
    one.update()
    assert [event["step"] for event in one.events] == list(range(30, 50))


def test_runs_are_found_in_directories_that_hold_them(run, tmp_path):
    assert find_runs([run]) == find_runs([tmp_path]) == find_runs([tmp_path, run]) == [run]
    (tmp_path / "empty").mkdir()
    assert find_runs([tmp_path / "empty", tmp_path / "gone", run]) == [run]
    for path in ("gone", "run/config.json"):
        with pytest.raises(UserError, match="no run directory"):
            Site([run, tmp_path / path])


def test_a_directory_without_runs_waits_for_them(run, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    site = Site([tmp_path / "runs"])
    assert site.about() == []
    assert "no run in" in capsys.readouterr().err
    shutil.copytree(run, tmp_path / "runs" / "one")
    site.find_runs()
    assert [one["name"] for one in site.about()] == ["one"]


def messages(site):
    """What clients are told in a second, by event."""
    told = [*site._list(), *(message for run in list(site.views) for message in site._news(run))]
    parts = (message.removeprefix("event: ").split("\ndata: ") for message in told)
    return [(event, json.loads(content)) for event, content in parts]


def test_new_runs_appear_and_deleted_ones_go(run, tmp_path):
    (run / "journal.jsonl").write_text(line(1))
    site = Site([tmp_path])
    first = messages(site)
    assert [event for event, _ in first] == ["runs", "steps", "status", "now"]
    assert [one["name"] for one in first[0][1]["runs"]] == ["run"]
    assert messages(site) == []
    shutil.copytree(run, tmp_path / "another")
    site.find_runs()
    told = messages(site)
    assert [event for event, _ in told] == ["runs", "steps", "status", "now"]
    assert [one["name"] for one in told[0][1]["runs"]] == ["run", "another"]
    assert told[1][1]["reset"]
    shutil.rmtree(tmp_path / "another")
    site.find_runs()
    ((event, content),) = messages(site)
    assert (event, [one["name"] for one in content["runs"]]) == ("runs", ["run"])
    run.rename(tmp_path / "moved")
    site.find_runs()
    assert [one["name"] for one in messages(site)[0][1]["runs"]] == ["moved"]


def test_a_disk_that_fails_for_a_while_removes_no_run(run, monkeypatch):
    site = Site([run])

    def fails(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(view.RunView, "_identify", fails)
        site.find_runs()
    assert len(site.views) == 1


def test_one_run_hides_no_other(run, tmp_path, capsys):
    """A path that is gone, a run that cannot be read, one that was stopped before its first step."""
    (tmp_path / "some").mkdir()
    shutil.copytree(run, tmp_path / "some" / "one")
    site = Site([run, tmp_path / "some"])
    for name in ("empty", "broken"):
        shutil.copytree(tmp_path / "some" / "one", tmp_path / "some" / name)
    save_tensors(tmp_path / "some" / "empty" / "buffer.safetensors", {"images": torch.empty(0)})
    (tmp_path / "some" / "broken" / "config.json").write_text("{}{")
    site.find_runs()
    site.find_runs()
    assert {view.name for view in site.views.values()} == {"run", "one", "empty"}
    assert capsys.readouterr().err.count("cannot read broken, left out: ") == 1
    assert all(site._news(number) is not None for number in site.views)
    write_json(tmp_path / "some" / "broken" / "config.json", dataclasses.asdict(run_plan(source="synthetic:")))
    site.find_runs()
    assert len(site.views) == 4


def test_another_run_in_the_place_of_a_deleted_one_is_another(run):
    (run / "journal.jsonl").write_text(line(1) + line(2))
    os.utime(run / "config.json", (0, 0))  # or both are written in one tick of the file system's clock
    site = Site([run])
    (number,) = site.views
    site._news(number)
    shutil.rmtree(run)
    run.mkdir()
    write_json(run / "config.json", dataclasses.asdict(run_plan(source="synthetic:", images=7)))
    site.find_runs()
    assert site.views[number].config.images == 7
    (run / "journal.jsonl").write_text(line(1))
    told = [message for message in site._news(number) if message.startswith("event: steps")]
    assert len(told) == 1
    assert '"reset":true,"step":[1],' in told[0]


def test_the_images_of_all_ranks_are_told(run):
    (run / "journal.jsonl").write_text(line(1))
    (run / "ranks" / "1").mkdir(parents=True)
    one = RunView(run)
    _, points = one.update()
    assert one.status()["seen"] == points[0]["seen"] == 2 * 32
    write_json(run / "results.json", {"images": 70})
    one.update()
    assert one.status()["seen"] == 70
