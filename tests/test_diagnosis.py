import dataclasses

from streamclr.runs.doctor.diagnosis import Diagnosis, Measured, Suggestion
from streamclr.runs.doctor.machine import GIB, Machine

STEP = Measured(scoring=1.0, training=3.0, n_frames=100, checkpoint=100 * 2**20)


def diagnosis(**changes):
    machine = Machine("CPU", 2, 2, 4 * GIB, GIB, None, GIB, "3.11", "2.8", None, 2, {}, {}, [])
    plain = Diagnosis(machine, "synthetic:", 32, 25.0, STEP, GIB, 0.5, [])
    return dataclasses.replace(plain, **changes)


def test_what_is_passed_over_is_told():
    assert diagnosis().keeps_up
    late = diagnosis(fps=50.0)
    assert not late.keeps_up
    assert dict(late.rows())["as it is"] == "25.0 of 50 frames a second are passed over, 2,160,000 a day"


def test_a_disk_that_cannot_hold_the_checkpoints():
    assert diagnosis().is_well
    full = diagnosis(machine=dataclasses.replace(diagnosis().machine, disk_free=300 * 2**20))
    assert full.keeps_up
    assert not full.is_well
    assert "400 MiB are needed and the disk has less: make room" in dict(full.rows())["checkpoint"]


def test_the_pace_of_checkpoints_is_told():
    large = dataclasses.replace(STEP, checkpoint=GIB // 2)
    often = dict(diagnosis(step=large, checkpoint_hours=0.1).rows())["checkpoint"]
    assert "use a larger --checkpoint-steps" in often
    assert "only at the end" in dict(diagnosis(checkpoint_hours=None).rows())["checkpoint"]


def test_suggestions_are_numbered_with_their_figures():
    late = diagnosis(fps=50.0, suggestions=[Suggestion("--width 32", 1.5, 0.75), Suggestion("--size 16", 3.0, 1.5)])
    rows = dict(late.rows())
    assert rows["keeps up"] == "no: a step takes 2.00 of the 2 s in which its frames come at 50 a second"
    assert rows["change 1"] == "--width 32: 0.75, a step of 1.5 s, keeps up"
    assert rows["change 2"] == "--size 16: 1.50, a step of 3 s, better, not enough"
