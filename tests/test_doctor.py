import dataclasses
import json

import pytest

from streamclr import Learner
from streamclr.base.progress import Progress
from streamclr.cli.entry import main
from streamclr.runs.doctor import diagnose as doctor
from streamclr.runs.doctor.diagnose import DoctorOptions, checkpoint_hours, diagnose, suggested
from streamclr.runs.doctor.diagnosis import Measured
from streamclr.runs.doctor.machine import GIB
from support.camera import Camera

FAST = ["--width", "2", "--buffer", "8", "--size", "16"]
STEP = Measured(scoring=1.0, training=3.0, n_frames=100, checkpoint=100 * 2**20)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_that_keeps_up(capsys, tmp_path):
    assert main(["doctor", *FAST, "--fps", "0.01"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "keeps up    yes: a step takes 0.00 of the 800 s" in out
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


def test_the_rate_is_what_the_source_sends(monkeypatch):
    config = DoctorOptions(width=2, buffer=8, size=16)
    monkeypatch.setattr(doctor, "suggested", lambda *_: [])
    assert diagnose(config).fps == 30
    source = Camera(fps=200, last=61)  # in a tenth of the three seconds in which they are counted, and then no more
    try:
        camera = dataclasses.replace(config, source=source.url)
        assert diagnose(camera).fps == 20
        source.last *= 2
        assert diagnose(dataclasses.replace(camera, fps=5)).fps == 5
    finally:
        source.close()


def test_a_buffer_larger_than_the_segment_is_full_when_it_is_measured(monkeypatch):
    batches = []
    update = doctor.make_learner

    def watched(config):
        learner = update(config)
        learn = learner.learn_many

        def learn_many(images):
            batches.append((len(learner.buffer), len(images)))
            return learn(images)

        learner.learn_many = learn_many
        return learner

    monkeypatch.setattr(doctor, "make_learner", watched)
    diagnose(DoctorOptions(width=2, buffer=16, segment=4, size=16, fps=0.01))
    assert set(batches) == {(16, 4)}


def test_a_change_of_scoring_alone_is_measured_without_training(monkeypatch):
    config = DoctorOptions(width=2, buffer=8, segment=8, size=16, stem="small")
    monkeypatch.setattr(Learner, "_update", lambda _: pytest.fail("trained"))
    with Progress("", None) as bar:
        step = doctor.measured(config, bar, "", training=5.0)
    assert step.training == 5.0
    assert 0 < step.scoring < 5


def fake(seconds):
    """`measured` with a price for each configuration."""
    tried = []

    def measured(config, bar, what, *_, **__):
        tried.append(what)
        return Measured(0.0, seconds(config), config.segment, 0)

    return tried, measured


def test_suggestions_are_measured_mildest_first_until_one_keeps_up(monkeypatch):
    config = DoctorOptions(width=64, size=64, stem="small", buffer=100, segment=100)
    tried, measured = fake(
        lambda c: 4 * (c.width / 64) ** 2 * (c.size / 64) ** 2 - (0.5 if c.rescore_every else 0) + c.segment / 1e6
    )
    monkeypatch.setattr(doctor, "measured", measured)
    found = {s.change: s.ratio <= 1 for s in suggested(config, STEP, 100, Progress("", None))}
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


def test_what_does_not_help_is_not_told(monkeypatch):
    config = DoctorOptions(policy="fifo", width=8, size=64, stem="imagenet", buffer=100, segment=100)
    tried, measured = fake(lambda c: 4.0 * c.segment / 100)
    monkeypatch.setattr(doctor, "measured", measured)
    found = [s.change for s in suggested(config, STEP, 100, Progress("", None))]
    assert found == ["fewer frames, with fps=25 or every=4 in the source"]
    assert tried == ["--segment 200"]


def test_less_than_a_frame_a_second_is_every_nth(monkeypatch):
    config = DoctorOptions(policy="fifo", width=8, size=16, stem="small", buffer=2, segment=2)
    monkeypatch.setattr(doctor, "measured", fake(lambda c: 1e9)[1])
    slow = Measured(0.0, 8.0, 2, 0)
    assert [s.change for s in suggested(config, slow, 30, Progress("", None))] == [
        "fewer frames, with every=120 in the source"
    ]


def test_checkpoints_are_paced_as_the_run_does_it():
    large = dataclasses.replace(STEP, checkpoint=GIB // 2)
    assert checkpoint_hours(DoctorOptions(checkpoint_minutes=10), STEP, 25) == pytest.approx(1 / 6)
    assert checkpoint_hours(DoctorOptions(checkpoint_minutes=10), large, 25) == 0.5
    assert checkpoint_hours(DoctorOptions(checkpoint_minutes=0), STEP, 25) is None
    assert checkpoint_hours(DoctorOptions(checkpoint_steps=3), STEP, 1) == pytest.approx(3 * 100 / 3600)
