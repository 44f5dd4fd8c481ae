"""Frames in which something moved, and frames of certain hours."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamclr.streams.cameras.gates import MOTION, Hours, MotionGate, as_cells, changed, parse_motion

SIZE = 64


def still(seed=0, noise=0.0, light=0.0):
    """A picture of soft blobs, with noise on each pixel."""
    rng = np.random.default_rng(7)
    blobs = np.kron(rng.integers(60, 200, (4, 4, 3)), np.ones((SIZE // 4, SIZE // 4, 1)))
    pixels = blobs + light + np.random.default_rng(seed).normal(0, noise, (SIZE, SIZE, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def with_object(pixels, x, y, side):
    pixels = pixels.copy()
    pixels[y : y + side, x : x + side] = 255 - pixels[y : y + side, x : x + side].mean((0, 1)).round()
    pixels[y : y + side, x : x + side][pixels[y : y + side, x : x + side].mean(-1) > 100] = (0, 0, 0)
    return pixels


def test_the_first_frame_passes_and_a_still_scene_does_not():
    gate = MotionGate(MOTION)
    passed = [gate.lets_through(still(seed, noise=4), seed / 30) for seed in range(100)]
    assert passed == [True] + [False] * 99
    assert gate.n_scenes == 1


def test_light_that_changes_everywhere_alike_is_no_motion():
    assert changed(as_cells(still()), as_cells(still(light=30))) == 0


@given(st.integers(0, SIZE - 12), st.integers(0, SIZE - 12))
def test_what_comes_and_what_goes_is_seen_once(x, y):
    gate = MotionGate(MOTION)
    empty, full = still(), with_object(still(), x, y, 12)
    scenes = [empty, empty, full, full, full, empty, empty]
    assert [gate.lets_through(pixels, 10.0 * i) for i, pixels in enumerate(scenes)] == [
        True, False, True, False, False, True, False,
    ]  # fmt: skip
    assert gate.n_scenes == 3  # each after a pause


def test_slow_motion_adds_up():
    """Of an object that moves by a quarter of a pixel each frame some frames pass, and they are one scene."""
    gate = MotionGate(MOTION)
    passed = [gate.lets_through(with_object(still(), 10 + i // 4, 20, 16), i / 30) for i in range(100)]
    assert 8 <= sum(passed) <= 25
    assert gate.n_scenes == 1


def test_a_gate_goes_on_from_its_last_frame():
    first = MotionGate(MOTION)
    first.lets_through(still(), 0.0)
    again = MotionGate(MOTION, first.last)
    assert not again.lets_through(still(1, noise=4), 0.0)
    assert again.lets_through(with_object(still(), 30, 30, 12), 1.0)


@given(st.integers(8, 200))
def test_frames_of_any_size_have_cells(size):
    pixels = np.full((size, size, 3), 90, np.uint8)
    assert as_cells(pixels).shape == (32, 32)
    assert changed(as_cells(pixels), as_cells(pixels)) == 0


@pytest.mark.parametrize(
    ("text", "threshold"), [(None, None), ("off", None), ("on", MOTION), ("2", 2.0), ("0.25%", 0.25), ("1.5 %", 1.5)]
)
def test_motion_options(text, threshold):
    assert parse_motion(text) == threshold


# ----------------------------------------------------------------------------------------------------------------------
# Hours.


def moment(hour, minute=0):
    return time.mktime((2026, 11, 3, hour, minute, 30, 0, 0, -1))


minutes = st.integers(0, 24 * 60 - 1)


@given(minutes, minutes, minutes)
def test_a_minute_is_in_exactly_one_of_two_parts_of_the_day(start, end, minute):
    if start != end:
        inside = Hours(start, end).include(moment(*divmod(minute, 60)))
        assert inside != Hours(end, start).include(moment(*divmod(minute, 60)))
        assert inside == any((start + k) % 1440 == minute for k in range((end - start) % 1440))


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("06:00-20:00", [(6, 0), (19, 59)], [(5, 59), (20, 0), (0, 0)]),
        ("20:00-06:00", [(20, 0), (23, 59), (0, 0), (5, 59)], [(6, 0), (12, 0), (19, 59)]),
        ("0:00-24:00", [(0, 0), (23, 59)], []),
    ],
)
def test_hours(text, inside, outside):
    hours = Hours.parse(text)
    assert all(hours.include(moment(*when)) for when in inside)
    assert not any(hours.include(moment(*when)) for when in outside)


def test_hours_are_those_of_the_local_clock(monkeypatch):
    hours, midnight = Hours.parse("06:00-20:00"), 1_800_000_000 // 86400 * 86400  # UTC
    for zone, is_in in (("UTC", False), ("XYZ-7", True)):  # seven hours east
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert hours.include(midnight) == is_in
    monkeypatch.undo()
    time.tzset()
