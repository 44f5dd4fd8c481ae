import dataclasses

from streamclr.runs.doctor.diagnose import Diagnosis, Measured, Suggestion
from streamclr.runs.doctor.machine import GIB, Machine

STEP = Measured(scoring=1.0, training=3.0, n_frames=100, checkpoint=100 * 2**20)


def diagnosis(**changes):
    machine = Machine("CPU", 2, 2, 4 * GIB, GIB, None, GIB, "3.11", "2.8", None, 2, {}, {}, [])
    plain = Diagnosis(machine, "synthetic:", 32, 25.0, STEP, GIB, 0.5)
    return dataclasses.replace(plain, **changes)


def test_what_is_passed_over_is_told():
    assert diagnosis().keeps_up
    late = diagnosis(fps=50.0)
    assert not late.keeps_up
    assert dict(late.rows())["skipped"] == "25.0 of 50 frames a second, 2,160,000 a day"


def test_a_disk_that_cannot_hold_the_checkpoints():
    assert diagnosis().is_well
    full = diagnosis(machine=dataclasses.replace(diagnosis().machine, disk_free=300 * 2**20))
    assert full.keeps_up
    assert not full.is_well
    assert "they need 400 MiB, and the disk has less: free some space" in dict(full.rows())["checkpoint"]


def test_the_pace_of_checkpoints_is_told():
    large = dataclasses.replace(STEP, checkpoint=GIB // 2)
    often = dict(diagnosis(step=large, checkpoint_hours=0.1).rows())["checkpoint"]
    assert "use a larger --checkpoint-steps" in often
    assert "only at the end" in dict(diagnosis(checkpoint_hours=None).rows())["checkpoint"]


def test_the_verdict_says_how_fast_frames_arrive_and_how_long_a_step_takes():
    assert dict(diagnosis().rows())["verdict"] == "keeps up: 100 frames arrive every 4 s, a step takes 4 s"
    assert dict(diagnosis(fps=50.0).rows())["verdict"] == "too slow: 100 frames arrive every 2 s, a step takes 4 s"


def test_a_step_that_was_scaled_is_said():
    assert dict(diagnosis().rows())["step"] == "scoring 1 s, training 3 s"
    scaled = dataclasses.replace(STEP, n_measured=32, n_images=256)
    assert dict(diagnosis(step=scaled).rows())["step"] == "scoring 1 s, training 3 s, measured on 32 of 256 images"


def test_a_suggestion_says_whether_it_is_enough():
    assert str(Suggestion("--width 32", 1.5, 0.75)) == "--width 32: a step takes 1.5 s, keeps up"
    assert str(Suggestion("--size 16", 3.0, 1.5)) == "--size 16: a step takes 3 s, better, but still too slow"
