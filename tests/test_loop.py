import dataclasses
import errno
import json
import math
import os
import shutil
import signal
import time
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from streamclr import Learner, UserError, resnet18
from streamclr.base.errors import NotFinite
from streamclr.cli.entry import main
from streamclr.compute.finite import all_finite
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.directory import RunDirectory
from streamclr.records.journal import files_of, lines_of
from streamclr.records.options import RunOptions
from streamclr.runs.run import run
from streamclr.runs.service import Notifier
from support.damage import at_steps, break_gradient, break_moment, break_statistic, break_weight
from support.images import make_folder


@pytest.fixture
def config(tmp_path):
    return RunOptions(
        source=f"folder:{make_folder(tmp_path / 'images', size=8)}?stc=5", buffer=8, width=1, images=80, probes=0,
        fractions="1", classifier="linear", checkpoint_steps=1, out=str(tmp_path / "run"),
    )  # fmt: skip


def events(path):
    return [json.loads(line)["event"] for line in (path / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("damage", [break_gradient, break_statistic, break_weight])
def test_a_step_whose_numbers_break_changes_nothing(damage):
    learner = Learner(resnet18(width=1), buffer=8, seed=1)
    images = torch.randint(256, (3, 8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    learner.learn_many(images[0])
    with torch.no_grad():
        damage(learner)
    before = json.dumps(_plain(learner.state_dict()))
    with pytest.raises(NotFinite, match="step 2 is not finite"):
        learner.learn_many(images[1])
    state = learner.state_dict()
    state["buffer"]["n_seen"] -= 8  # the images keep their numbers in the stream
    assert json.dumps(_plain(state)) == before


def _plain(tree):
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, list) else tree


def test_a_broken_step_is_undone_and_the_run_goes_on(config, monkeypatch):
    at_steps(monkeypatch, [4], break_gradient)
    path, results = run(config)
    assert results["steps"] == 9  # of ten segments
    assert results["account"]["passed"] == {"undone": 8}
    assert results["account"]["learned"] == 72
    assert any("step undone: the gradient at step 4" in event for event in events(path))


@pytest.mark.parametrize("damage", [break_statistic, break_weight, break_moment])
def test_a_damaged_learner_goes_back_to_the_last_good_checkpoint(config, tmp_path, monkeypatch, damage):
    whole, _ = run(dataclasses.replace(config, out=str(tmp_path / "whole")))
    at_steps(monkeypatch, [4], damage)
    path, results = run(config)
    assert results["steps"] == 10
    assert any("back to step 3" in event for event in events(path))
    for name in ("model.safetensors", "buffer.safetensors"):
        assert (path / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("damage", [break_gradient, break_statistic, break_weight, break_moment])
def test_three_in_a_row_end_the_run_loudly_and_no_checkpoint_is_infected(config, tmp_path, monkeypatch, damage):
    saved = []
    real = Checkpoints.save

    def save(self, number, state):
        tensors = [*state["learner"]["model"].values(), *state["learner"]["optimizer"]["squares"]]
        saved.append(all_finite(tensors))
        return real(self, number, state)

    monkeypatch.setattr(Checkpoints, "save", save)
    at_steps(monkeypatch, [5, 5, 5], damage)
    with pytest.raises(UserError, match=r"3 (steps in a row|times after step)"):
        run(config)
    assert len(saved) >= 4
    assert all(saved)
    number, state = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert number == 4
    assert all_finite(list(state["learner"]["model"].values()))
    _, results = run(config)  # whatever it was is gone: it goes on
    assert results["steps"] == 10


def test_nan_in_the_input_is_refused():
    for images in (torch.full((4, 3, 8, 8), math.nan), torch.rand(4, 3, 8, 8)):
        with pytest.raises(UserError, match=r"torch\.float32: give torch\.uint8"):
            Learner(resnet18(width=1), buffer=4).learn_many(images)


def test_collapse_is_told_once(config, monkeypatch, capsys):
    real = Learner.learn_many

    def learn_many(self, images, tracks=None):
        return dataclasses.replace(real(self, images), spread=1e-5)

    monkeypatch.setattr(Learner, "learn_many", learn_many)
    path, _ = run(dataclasses.replace(config, images=400))
    assert sum("collapse: all projections are alike" in event for event in events(path)) == 1


def test_the_spread_tells_alike_from_different():
    learner = Learner(resnet18(width=2), buffer=8, seed=1)
    images = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
    assert learner.learn_many(images).spread > 0.01
    with torch.no_grad():
        learner.model.head[2].weight.zero_()
        learner.model.head[2].bias.fill_(1.0)
    assert abs(learner.learn_many(images).spread) < 1e-5


def loops_clock(monkeypatch, sleep, monotonic):
    """For the loop alone: other threads of this process have the real one."""
    clock = SimpleNamespace(time=time.time, sleep=sleep, monotonic=monotonic)
    monkeypatch.setattr("streamclr.runs.loop.time", clock)


def test_duty_rests_between_steps(config, monkeypatch):
    slept = []
    loops_clock(monkeypatch, slept.append, lambda: sum(slept))  # it stands still else
    path, _ = run(dataclasses.replace(config, duty="25%"))
    spent = sum(step["seconds_scoring"] + step["seconds_training"] for step in RunDirectory(path).steps())
    assert sum(slept) == pytest.approx(3 * spent)
    for duty in ("0", "0%", "120%", "much"):
        with pytest.raises(UserError, match="duty"):
            run(dataclasses.replace(config, duty=duty, out=None))


def test_no_memory_is_said_in_one_line(config, monkeypatch):
    def learn_many(self, images, tracks=None):
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"
        )

    monkeypatch.setattr(Learner, "learn_many", learn_many)
    with pytest.raises(UserError, match="no memory for a step"):
        run(config)


def test_metrics_are_served_while_it_learns(config, monkeypatch, capsys):
    import urllib.request

    pages, real = [], Learner.learn_many

    def learn_many(self, images, tracks=None):
        if self.n_steps == 5:
            address = capsys.readouterr().err.split("metrics: ")[1].split()[0]
            pages.append(urllib.request.urlopen(address, timeout=60).read().decode())
        return real(self, images)

    monkeypatch.setattr(Learner, "learn_many", learn_many)
    run(dataclasses.replace(config, metrics=0))
    assert "streamclr_steps_total 5" in pages[0]
    assert "streamclr_images_learned_total 40" in pages[0]
    assert "streamclr_checkpoint_step 4" in pages[0]  # that of step 5 came after


def test_a_stop_ends_a_rest(config, monkeypatch):
    from streamclr.base.errors import Stopped

    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            signal.raise_signal(signal.SIGTERM)

    loops_clock(monkeypatch, sleep, lambda: 0.0)  # the rest would never end
    with pytest.raises(Stopped):
        run(dataclasses.replace(config, duty="0.1%"))
    assert len(slept) == 3
    assert max(slept) <= 1  # seconds until a stop is heard


def test_a_journal_that_somebody_removed_costs_nothing_else(config, tmp_path, monkeypatch, capsys):
    from streamclr.base.errors import Stopped
    from streamclr.records.checkpoints import Pace

    with monkeypatch.context() as patch:
        patch.setattr(Pace, "due", lambda self: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped):
            run(config)
    (tmp_path / "run" / "journal.jsonl").unlink()
    _, results = run(config)
    assert results["steps"] == 10
    assert "has no line of step 1: it goes on with what is there" in capsys.readouterr().err


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", [3, 11, 20])
def test_a_run_whose_files_were_thinned_resumes_where_it_was(config, tmp_path, monkeypatch, step):
    """A file takes six lines of its journal, or one segment of predictions; every fourth step has a checkpoint."""

    def kill(learner):
        raise Killed

    config = dataclasses.replace(config, predict=True, checkpoint_steps=4, images=160)
    whole, _ = run(dataclasses.replace(config, out=str(tmp_path / "whole")))
    loss_of = {one["number"]: one["loss"] for one in RunDirectory(whole).steps()}
    assert len(loss_of) == 20
    monkeypatch.setattr("streamclr.records.directory.parse_limit", lambda _: 8000)
    with monkeypatch.context() as patch:
        at_steps(patch, [step], kill)
        with pytest.raises(Killed):
            run(config)
    path, results = run(config)
    assert results["steps"] == 20
    steps = RunDirectory(path).steps()
    assert {one["number"]: one["loss"] for one in steps}.items() < loss_of.items()
    assert [one["number"] for one in steps[-6:]] == list(range(15, 21))
    images = [json.loads(one)["image"] for one in lines_of(path / "predictions.jsonl")]
    assert images == sorted(set(images))
    assert images[-8:] == list(range(152, 160))
    assert len(images) < 160
    assert results["predictions"] == results["account"]["predicted"] == 160
    for name in ("journal.jsonl", "predictions.jsonl"):
        assert all(file.exists() for file in files_of(path / name))
        assert sum(file.stat().st_size for file in files_of(path / name)) <= 8000
    for name in ("model.safetensors", "buffer.safetensors"):
        assert (path / name).read_bytes() == (whole / name).read_bytes()


def test_points_of_the_learning_curve_are_thinned_last(config, monkeypatch):
    monkeypatch.setattr("streamclr.records.directory.parse_limit", lambda _: 8000)
    path, _ = run(dataclasses.replace(config, images=480, probes=5))
    steps = RunDirectory(path).steps()
    assert len(steps) < 25
    assert [one["number"] for one in steps if "accuracy" in one] == [12, 24, 36, 48, 60]


def test_events_of_several_threads_keep_to_the_limit_and_have_numbers(tmp_path):
    directory = RunDirectory(tmp_path, 20_000)
    threads = [Thread(target=lambda: [directory.tell("x" * 50, n) for n in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [json.loads(one)["number"] for one in lines_of(tmp_path / "events.jsonl")]
    assert found == sorted(set(found))
    assert found[-1] == 400
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 20_000


def test_a_checkpoint_that_cannot_be_read_now_is_not_thrown_away(config, tmp_path, monkeypatch):
    from pathlib import Path

    run(config)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    before, real = checkpoints.numbers(), Path.read_bytes

    def read_bytes(self):
        if self.name == "manifest.json":
            raise OSError(errno.EIO, "Input/output error")
        return real(self)

    (tmp_path / "run" / "results.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_bytes)
        with pytest.raises(UserError, match=r"cannot be read \(Input/output error\): try again"):
            run(config)
    assert checkpoints.numbers() == before
    assert run(config)[1]["steps"] == 10


def test_a_stop_is_not_forgotten_when_the_learner_is_damaged(config, monkeypatch):
    from streamclr.base.errors import Stopped

    def damage(learner):
        break_weight(learner)
        signal.raise_signal(signal.SIGTERM)

    at_steps(monkeypatch, [4], damage)
    with pytest.raises(Stopped, match="with step 3 saved"):
        run(config)


def test_a_disk_that_became_read_only_does_not_end_the_run(config, monkeypatch, capsys):
    real = os.write

    def write(fd, content):
        if "journal.jsonl" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(fd, content)

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("streamclr.records.journal.os.write", write)
    monkeypatch.setattr("streamclr.records.journal.os.truncate", refuse)
    _, results = run(config)
    assert results["steps"] == 10
    said = capsys.readouterr().err
    assert "the journal cannot be written" in said
    assert "no checkpoint of step" in said


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
@pytest.mark.parametrize("predict", [False, True])
def test_a_run_whose_directory_is_gone_ends_with_one_line(config, tmp_path, monkeypatch, capsys, how, predict):
    """Nothing is written where it was, and what is there now is left alone."""
    path, moved = tmp_path / "run", tmp_path / "elsewhere"

    def go(learner):
        path.rename(moved)
        if how == "removed":
            shutil.rmtree(moved)
        if how == "replaced":
            path.mkdir()
            shutil.copy(moved / "config.json", path / "config.json")

    at_steps(monkeypatch, [4], go)
    words = ["--source", config.source, "--images", "80", "--buffer", "8", "--width", "1", "--fractions", "1"]
    words += ["--label-budget", "8", "--checkpoint-steps", "1", *["--predict"] * predict]
    assert main(["run", *words, "--out", str(path)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        f"streamclr: {path} was removed or moved: the run ends after step 4, what its last checkpoint has not is lost"
    )
    assert [file.name for file in path.glob("*")] == ["config.json"] * (how == "replaced")
    if how == "moved":
        assert Checkpoints(moved / "checkpoints").numbers() == [1, 2, 3]


def test_a_run_that_waits_for_frames_notices_that_its_directory_is_gone(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run"
    (tmp_path / "watched").mkdir()
    monkeypatch.setattr(Notifier, "ready", lambda _: shutil.rmtree(path))
    assert main(["run", f"watch:{tmp_path / 'watched'}", "--width", "1", "--buffer", "8", "--out", str(path)]) == 2
    assert "was removed or moved: the run ends after step 0" in capsys.readouterr().err.splitlines()[-1]
    assert not path.exists()


@pytest.mark.system
def test_a_log_that_cannot_be_written_does_not_end_the_run(config, tmp_path):
    import subprocess
    import sys

    words = ["run", "--source", config.source, "--buffer", "8", "--width", "1", "--images", "40", "--probes", "0"]
    words += ["--classifier", "linear"]
    command = [sys.executable, "-m", "streamclr", *words, "--fractions", "1", "--out", str(tmp_path / "run")]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full, stdout=subprocess.PIPE, check=False).returncode == 0
    assert (tmp_path / "run" / "results.json").exists()


@pytest.mark.parametrize(("share", "probes", "n_points"), [(0, None, 0), (math.inf, None, 10), (0, 2, 2)])
def test_points_of_the_learning_curve_that_nobody_asked_for_take_little_time(
    config, monkeypatch, share, probes, n_points
):
    monkeypatch.setattr("streamclr.runs.loop.PROBING", share)
    path, _ = run(dataclasses.replace(config, probes=probes))
    assert sum("accuracy" in step for step in RunDirectory(path).steps()) == n_points
