import json
import os
import subprocess
import sys
import time

import pytest
import torch

from streamclr.base.errors import UserError
from streamclr.base.tensors import load_metadata, load_tensors
from streamclr.guards import Guarded
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs import status as window
from streamclr.runs.prepare import prepare
from streamclr.runs.status import NEWEST, Window, look
from support.images import random_images


@pytest.fixture
def shown(tmp_path):
    """A learner after some steps, its directory and its window."""
    config = RunOptions(
        source="synthetic:", images=320, recipe="paper", width=4, buffer=16, guards="on", out=str(tmp_path / "run")
    )
    config, stream, learner = prepare(config)
    directory = RunDirectory.of(config)
    for images in stream.segments(16, until=96):
        learner.learn_many(images)
    yield learner, directory, Window(directory, learner, stream)
    directory.close()


def test_nothing_is_written_while_nobody_looks(shown):
    _, directory, window = shown
    window.update()
    assert [path.name for path in directory.path.iterdir()] == ["config.json"]


def test_who_looks_sees_the_status_and_the_buffer(shown):
    learner, directory, window = shown
    look(directory.path)
    window.update(checkpoint=3)
    status = json.loads((directory.path / "status.json").read_text())
    assert status["step"] == learner.n_steps == 6
    assert status["account"]["received"] == 96
    assert status["checkpoint"] == 3
    assert status["memory"] > 10**6
    buffer = directory.load_buffer()
    assert torch.equal(buffer["images"], learner.buffer.images)
    assert buffer["features"].shape == (16, learner.model.n_features)


def test_the_newest_frame_of_each_source_is_kept_for_who_looks(shown):
    _, directory, one = shown
    images = random_images(4, 32)
    one.saw(images[:2], "synthetic", ["", ""])
    one.saw(images[2:3], "rtsp://me:secret@door/1", [""])
    one.saw(images[:0], "yard", [])
    one.saw(images[2:], "rtsp://me:secret@door/1", ["", ""])
    one.update()
    assert not (directory.path / NEWEST).exists()  # nobody looks
    look(directory.path)
    one.update()
    tensors, about = load_tensors(directory.path / NEWEST), load_metadata(directory.path / NEWEST)["about"]
    assert [frame["name"] for frame in json.loads(about)] == ["synthetic", "rtsp://me:***@door/1"]
    assert torch.equal(tensors["0"], images[1])
    assert torch.equal(tensors["1"], images[3])
    assert all(abs(frame["time"] - time.time()) < 600 for frame in json.loads(about))


def test_what_left_is_what_was_there_and_is_not_with_the_scores_for_which_it_went(shown):
    learner, directory, _ = shown
    stream = prepare(RunOptions(source="synthetic:", images=320, recipe="paper", width=4, buffer=16, guards="on"))[1]
    stream.read(96)
    n_left = 0
    for images in stream.segments(16, until=320):
        before = set(learner.buffer.arrivals.tolist())
        learner.learn_many(images)
        left = learner.buffer.left()
        assert set(left["arrivals"].tolist()) == before - set(learner.buffer.arrivals.tolist())
        hidden = learner.policy.hidden
        for arrival, score in zip(left["arrivals"].tolist(), left["scores"].tolist(), strict=True):
            assert arrival in hidden or score <= float(learner.buffer.scores.min())
        n_left += len(left["ages"])
    assert n_left
    directory.save_buffer(learner, stream)


def test_a_look_lasts_only_for_a_while(shown):
    _, directory, window = shown
    look(directory.path)
    old = time.time() - 60
    os.utime(directory.path / "looked-at", (old, old))
    window.update()
    assert not (directory.path / "status.json").exists()


def test_pictures_of_the_buffer_take_a_small_share_of_the_time(shown, monkeypatch):
    """Each costs a second of a clock that stands still else: the next comes 200 seconds later."""
    _learner, directory, one = shown
    now, saved = [100.0], []

    def save(*_):
        saved.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(directory, "save_buffer", save)
    monkeypatch.setattr(window.time, "monotonic", lambda: now[0])
    for _ in range(600):
        look(directory.path)
        one.update()
        now[0] += 1.0
    assert saved == [100.0, 300.0, 500.0, 700.0]


def test_a_full_disk_does_not_end_the_run(shown, monkeypatch):
    _, directory, window = shown
    look(directory.path)

    def full(*_, **__):
        raise UserError("cannot write")

    monkeypatch.setattr(directory, "save_buffer", full)
    window.update()
    assert json.loads((directory.path / "status.json").read_text())["step"] == 6  # which still had room
    assert not (directory.path / "buffer.safetensors").exists()


def test_the_guard_that_hid_an_image_is_known(shown):
    learner, _directory, _ = shown
    assert isinstance(learner.policy, Guarded)
    black = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    before = learner.buffer.n_seen
    learner.learn_many(black)
    assert {arrival: guard for arrival, guard in learner.policy.hidden.items() if arrival >= before} == dict.fromkeys(
        range(before, before + 8), "blank"
    )


@pytest.mark.system
def test_serving_without_its_packages_is_one_line(tmp_path):
    code = (
        "import sys; sys.modules['uvicorn'] = None; from streamclr.cli.entry import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "run", "--source", "synthetic:", "--images", "320", "--serve"]
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'.[serve]'" in done.stderr
    assert not (tmp_path / "run").exists()
