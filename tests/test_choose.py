import shlex
from dataclasses import replace

import pytest

from streamclr.cli.entry import main
from streamclr.cli.parser import parse
from streamclr.compute import memory
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream, resolve
from streamclr.runs import choose as choosing
from streamclr.runs.choose import Choice, choose, command
from streamclr.runs.doctor.diagnose import LOAD, MOST_TIMES, Measured, predicted_peak, slow_down
from support.camera import write_clip
from support.runs import run_plan

STEP = Measured(scoring=0.1, training=2.0, n_frames=64, checkpoint=1)  # frames of 64 arrive in 2.13 s at 30 a second


@pytest.fixture
def asked(tmp_path):
    """A recording that is read as a camera is: frames that the learner has no time for are lost."""
    clip = write_clip(tmp_path / "clip.mp4", n=8)
    return RunOptions(source=f"{clip}?overload=drop", encoder="compact", init="random", size=16)


def chosen(options, **how):
    stream = open_run_stream(options)
    return choose(options, resolve(options, stream), stream, **how)


@pytest.mark.parametrize(("fps", "segment"), [(1, 64), (10, 64), (30, 128), (60, 256), (1e6, 64 * MOST_TIMES)])
def test_a_slow_machine_takes_more_frames_for_each_update(fps, segment):
    plan, step = slow_down(run_plan(segment=64, buffer=64, batch=64), STEP, fps)
    assert plan.segment == step.n_frames == segment
    assert step.ratio(fps) <= LOAD or segment == 64 * MOST_TIMES
    assert step.training == STEP.training
    assert step.scoring == pytest.approx(STEP.scoring * segment / 64)


def test_what_is_chosen_keeps_up_and_is_said_with_the_command_that_asks_for_it(asked, monkeypatch):
    monkeypatch.setattr(choosing, "measure", lambda *_, **__: STEP)
    found = chosen(asked)
    assert found.plan.segment == 128
    what, pace, same = found.lines()
    assert "compact (random weights, all of it learns), 16x16 px" in what
    assert "an update of 64 images for every 128 new ones takes 2.2 s, they arrive in 4.3 s: keeps up" in pace
    _, again = parse(shlex.split(same.removeprefix("the same: streamclr ")))
    assert chosen(again).plan == found.plan


def test_a_machine_that_is_much_too_slow_is_told_so():
    plan = run_plan(segment=64)
    slow = Choice(plan, plan, 30.0, Measured(0, 21.3, 64, 1))
    assert "too slow, 90 % of the frames are passed over: use a lower fps=" in slow.lines()[1]


@pytest.mark.parametrize("own", [{"segment": 32}, {"source": "synthetic:"}])
def test_nothing_is_measured_where_there_is_nothing_to_choose(asked, monkeypatch, own):
    monkeypatch.setattr(choosing, "measure", lambda *_, **__: pytest.fail("measured"))
    found = chosen(replace(asked, **own))
    assert found.step is None
    assert found.plan.segment == own.get("segment", 64)


def test_a_run_that_goes_on_keeps_what_was_chosen_at_its_start(asked, monkeypatch, tmp_path):
    asked = replace(asked, out=str(tmp_path / "run"))
    monkeypatch.setattr(choosing, "measure", lambda *_, **__: STEP)
    first = chosen(asked).plan
    RunDirectory.of(first).close()
    monkeypatch.setattr(choosing, "measure", lambda *_, **__: pytest.fail("measured"))
    assert chosen(asked).plan == first


def test_a_plan_is_said_and_nothing_is_learned(asked, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = ["--encoder", "compact", "--init", "random", "--size", "16", "--plan"]
    assert main(["run", asked.source, *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert not (tmp_path / "runs").exists()


def test_the_command_hides_a_password():
    plan = run_plan(source="rtsp://me:secret@127.0.0.1/1", to=("mqtt://me:secret@broker/door",))
    assert "secret" not in command(plan, plan)


def test_the_command_names_the_source_as_it_was_given_and_has_all_that_was_given(asked, monkeypatch):
    monkeypatch.setattr(choosing, "measure", lambda *_, **__: STEP)
    own = replace(asked, images=300, predict=True, to=("a.jsonl", "mqtt://broker/door"), memory="2G", threshold=0.5)
    what, _, same = chosen(own).lines()
    assert what.startswith(f"{asked.source}: compact ")
    _, again = parse(shlex.split(same.removeprefix("the same: streamclr ")))
    for name in ("source", "images", "predict", "to", "memory", "threshold"):
        assert getattr(again, name) == getattr(own, name)


def test_saying_what_is_taken_changes_nothing_of_how_memory_is_allocated(asked, monkeypatch):
    """A prediction that left the allocator as it is under --memory made each step a third slower than was said."""
    monkeypatch.setattr(memory, "release_freed_memory", lambda: pytest.fail("freed memory is returned from now on"))
    assert predicted_peak(resolve(asked, open_run_stream(asked))) > 2**20
