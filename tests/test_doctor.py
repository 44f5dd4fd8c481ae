import dataclasses
import json

import pytest

from streamclr import Learner
from streamclr.cli import run as commands
from streamclr.cli.entry import main
from streamclr.records.checkpoints import Checkpoints
from streamclr.runs.assemble import make_learner
from streamclr.runs.doctor import diagnose as doctor
from streamclr.runs.doctor.diagnose import (
    DoctorOptions,
    Measured,
    Suggestion,
    checkpoint_hours,
    diagnose,
    measure,
    suggest,
)
from streamclr.runs.doctor.machine import GIB
from support.camera import Camera
from support.images import random_images
from support.runs import run_plan

FAST = ["--width", "2", "--buffer", "8", "--size", "16"]
STEP = Measured(scoring=1.0, training=3.0, n_frames=100, checkpoint=100 * 2**20)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_that_keeps_up(capsys, tmp_path):
    assert main(["doctor", *FAST, "--fps", "0.01"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "verdict     keeps up: 8 frames arrive every 800 s, a step takes 0." in out
    assert "change 1" not in out
    assert not list(tmp_path.iterdir())  # it only looks


def test_a_run_that_does_not_keep_up_in_json(capsys):
    assert main(["doctor", *FAST, "--fps", "1e9", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ratio"] > 1
    assert not said["keeps_up"]
    assert said["step"]["n_frames"] == 8
    assert said["step"]["training"] > 0
    assert said["machine"]["n_cores"] > 0
    assert said["peak"] > 2**20
    changes = [suggestion["change"] for suggestion in said["suggestions"]]
    assert any(change.startswith("fewer frames, with fps=") for change in changes)
    assert all(suggestion["ratio"] < said["ratio"] for suggestion in said["suggestions"])


def test_the_verdict_comes_first_and_each_suggestion_when_it_is_measured(monkeypatch, capsys):
    def slowly(plan, step, fps):
        assert "verdict     too slow: 8 frames arrive every 8e-09 s" in capsys.readouterr().out
        yield Suggestion("--width 1", 1.0, 0.5)
        assert capsys.readouterr().out == "change 1    --width 1: a step takes 1 s, keeps up\n"
        yield Suggestion("--size 8", 2.0, 1.5)

    monkeypatch.setattr(commands, "suggest", slowly)
    assert main(["doctor", *FAST, "--fps", "1e9"]) == 1
    assert capsys.readouterr().out == "change 2    --size 8: a step takes 2 s, better, but still too slow\n"


def test_what_the_doctor_does_not_look_at_is_no_option(capsys):
    assert main(["doctor", "--serve"]) == 2
    assert "no option '--serve' in streamclr doctor" in capsys.readouterr().err


def slow_steps(monkeypatch, seconds_per_image):
    """Every learner that is made says that its steps take so long; returns the number of images of each step."""
    n_images, make = [], doctor.make_learner

    def made(plan):
        learner = make(plan)
        learn = learner.learn_many

        def learn_many(images, tracks=None):
            n_images.append(len(images))
            seconds = seconds_per_image * len(images)
            return dataclasses.replace(learn(images), seconds_scoring=seconds / 4, seconds_training=3 * seconds / 4)

        learner.learn_many = learn_many
        return learner

    monkeypatch.setattr(doctor, "make_learner", made)
    return n_images


@pytest.mark.parametrize(
    ("seconds_per_image", "n_images", "n_measured"),
    [
        (1e-4, [8, 8, 64, 64, 64, 64], 64),  # a fast machine measures all of it
        (0.125, [8, 8, 24, 24], 24),
        (1.0, [8, 8], 8),
    ],
)
def test_a_slow_step_is_measured_on_few_images_and_scaled(monkeypatch, seconds_per_image, n_images, n_measured):
    stepped = slow_steps(monkeypatch, seconds_per_image)
    step = measure(run_plan(width=1, buffer=64, batch=64, segment=64, size=8), "")
    assert stepped == n_images
    assert (step.n_measured, step.n_images, step.n_frames) == (n_measured, 64, 64)
    assert step.seconds == pytest.approx(64 * seconds_per_image)
    assert step.training == pytest.approx(3 * step.scoring)


def test_a_measurement_on_few_images_is_said(monkeypatch, capsys):
    slow_steps(monkeypatch, 1.0)
    monkeypatch.setattr(commands, "suggest", lambda *_: ())
    assert main(["doctor", "--width", "1", "--buffer", "64", "--size", "8", "--fps", "4"]) == 1
    out = capsys.readouterr().out
    assert "step        scoring 16 s, training 48 s, measured on 8 of 64 images" in out
    assert "verdict     too slow: 64 frames arrive every 16 s, a step takes 64 s" in out


def test_the_size_of_a_checkpoint_is_that_of_one_that_is_written(tmp_path):
    plan = run_plan(width=16, buffer=16, batch=16, segment=16, size=16)
    learner = make_learner(plan)
    learner.learn_many(random_images(16))
    written = Checkpoints(tmp_path / "checkpoints").save(1, {"learner": learner.state_dict()})
    assert measure(plan, "").checkpoint == pytest.approx(written, rel=0.03)


@pytest.mark.system
def test_the_rate_is_what_the_source_sends():
    config = DoctorOptions(width=2, buffer=8, size=16)
    assert diagnose(config)[1].fps == 30
    source = Camera(fps=200, last=61)  # in a tenth of the three seconds in which they are counted, and then no more
    try:
        camera = dataclasses.replace(config, source=source.url)
        assert diagnose(camera)[1].fps == 20
        source.last *= 2
        assert diagnose(dataclasses.replace(camera, fps=5))[1].fps == 5
    finally:
        source.close()


def test_a_buffer_larger_than_the_segment_is_full_when_it_is_measured(monkeypatch):
    batches = []
    update = doctor.make_learner

    def watched(config):
        learner = update(config)
        learn = learner.learn_many

        def learn_many(images, tracks=None):
            batches.append((len(learner.buffer), len(images)))
            return learn(images)

        learner.learn_many = learn_many
        return learner

    monkeypatch.setattr(doctor, "make_learner", watched)
    diagnose(DoctorOptions(width=2, buffer=16, segment=4, size=16, fps=0.01))
    assert set(batches) == {(8, 2), (16, 4)}


def test_a_change_of_scoring_alone_is_measured_without_training(monkeypatch):
    plan = run_plan(width=2, buffer=8, batch=8, segment=8, size=16)
    monkeypatch.setattr(Learner, "learn_many", lambda *_: pytest.fail("trained"))
    step = measure(plan, "", training=5.0)
    assert step.training == 5.0
    assert 0 < step.scoring < 5


def fake(seconds):
    """`measure` with a price for each plan."""
    tried = []

    def measured(plan, what, *_):
        tried.append(what)
        return Measured(0.0, seconds(plan), plan.segment, 0)

    return tried, measured


def test_suggestions_are_measured_mildest_first_until_one_keeps_up(monkeypatch):
    plan = run_plan(width=64, size=64, buffer=100, segment=100)
    tried, measured = fake(
        lambda c: 4 * (c.width / 64) ** 2 * (c.size / 64) ** 2 - (0.5 if c.rescore_every else 0) + c.segment / 1e6
    )
    monkeypatch.setattr(doctor, "measure", measured)
    found = {s.change: s.ratio <= 1 for s in suggest(plan, STEP, 100)}
    assert found == {
        "--rescore-every 50": False,
        "--width 16": True,  # 0.25 s of the second in which the frames come; 32 is a hair above
        "--size 16": True,
        "fewer frames, with fps=25 or every=4 in the source": True,
        "--segment 800": True,
    }
    assert tried == [
        *["--rescore-every 50", "--width 32", "--width 16", "--size 32", "--size 16"],
        *["--segment 200", "--segment 400", "--segment 800"],
    ]


def test_of_mobilenet_fewer_stages_or_a_smaller_size(monkeypatch):
    """It has no width."""
    plan = run_plan(encoder="mobilenet_v2", stem=None, policy="fifo", size=128, buffer=100, segment=100, train="all")
    tried, measured = fake(lambda c: 4 * (c.size / 128) ** 2 * {"all": 1, "3": 0.55, "1": 0.32}[c.train])
    monkeypatch.setattr(doctor, "measure", measured)
    found = [s.change for s in suggest(plan, STEP, 100)]
    assert tried == ["--train 3", "--train 1", "--size 64", "--segment 200", "--segment 400"]
    assert found[:2] == ["--train 1", "--size 64"]
    assert next(suggest(dataclasses.replace(plan, train="1"), STEP, 100)).change == "--size 64"


def test_what_does_not_help_is_not_told(monkeypatch):
    plan = run_plan(policy="fifo", width=8, size=64, stem="imagenet", buffer=100, segment=100)
    tried, measured = fake(lambda c: 4.0 * c.segment / 100)
    monkeypatch.setattr(doctor, "measure", measured)
    found = [s.change for s in suggest(plan, STEP, 100)]
    assert found == ["fewer frames, with fps=25 or every=4 in the source"]
    assert tried == ["--segment 200"]


def test_less_than_a_frame_a_second_is_every_nth(monkeypatch):
    plan = run_plan(policy="fifo", width=8, size=16, buffer=2, segment=2)
    monkeypatch.setattr(doctor, "measure", fake(lambda c: 1e9)[1])
    slow = Measured(0.0, 8.0, 2, 0)
    assert [s.change for s in suggest(plan, slow, 30)] == ["fewer frames, with every=120 in the source"]


def test_checkpoints_are_paced_as_the_run_does_it():
    large = dataclasses.replace(STEP, checkpoint=GIB // 2)
    assert checkpoint_hours(run_plan(checkpoint_minutes=10), STEP, 25) == pytest.approx(1 / 6)
    assert checkpoint_hours(run_plan(checkpoint_minutes=10), large, 25) == 0.5
    assert checkpoint_hours(run_plan(checkpoint_minutes=0), STEP, 25) is None
    assert checkpoint_hours(run_plan(checkpoint_steps=3), STEP, 1) == pytest.approx(3 * 100 / 3600)
