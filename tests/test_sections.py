"""Each section of the benchmark in a tiny form: it runs, and each of its figures is a number."""

import re
from functools import partial

import pytest

from sections import growth, memory, predictions, report, scores
from sections.capture import capture
from sections.ranks import ranks
from sections.rivals import rivals
from sections.start import start_up
from sections.steps import overhead, scoring, stages, steps
from sections.subjects import make_clip
from streamclr.policy import POLICIES
from support.tiny import TINY

pytestmark = pytest.mark.system


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(report, "TABLES", {})
    monkeypatch.setattr(report, "QUESTIONS", {})
    report.begin("section", "")
    return report.TABLES["section"]


def figures(rows):
    """The numbers of each row, of which one at least is above 0."""
    found = [[float(n) for n in re.findall(r"(?<![\w.])\d+\.?\d*", row.measured)] for row in rows]
    assert [row.figure for row, numbers in zip(rows, found, strict=True) if not any(numbers)] == []
    return found


def test_steps(rows):
    steps((TINY,), turns=1)
    assert [re.sub(r"tiny: exact scores, |, [\d.]+ % of the.*", "", row.figure) for row in rows] == [
        "T = 1",
        "T = 20",
        "T = 50",
        "T = 50, and guards",
        "T = 50, guards, predictions and label candidates",
    ]
    assert "100.0 % of the buffer scored again" in rows[0].figure
    figures(rows)
    assert [bool(row.target) for row in rows] == [False, False, True, False, True]


def test_stages(rows):
    stages((TINY,), turns=1)
    assert len(figures(rows)) == 4
    assert [bool(row.target) for row in rows] == [False, False, True, True]


def test_scoring(rows):
    scoring(widths=(2,), turns=1)
    assert len(figures(rows)) == 4


def test_overhead(rows):
    overhead(width=2)
    assert len(figures(rows)) == 1


@pytest.mark.long
def test_rivals(rows):
    rivals({"compact": (2, 2.0)}, turns=1)
    assert len(figures(rows)) == 5
    assert [row.target[:16] for row in rows] == ["at least 2 times"] * 2 + [""] * 3


def test_prediction(rows):
    pytest.importorskip("onnxscript")
    predictions.prediction((TINY,), turns=1)
    assert len(figures(rows)) == 6


def test_predicting(rows):
    predictions.predicting(width=2, segment=8)
    assert len(figures(rows)) == 2


def test_capture(rows, tmp_path):
    pytest.importorskip("av")
    capture(32, 1, make_clip(tmp_path / "clip.mp4", n_frames=90, width=320, height=240))
    assert "our capture, of a plain PyAV loop (720p to 32 px)" in {row.figure for row in rows}


def test_start_up(rows):
    start_up(turns=1)
    assert len(figures(rows)) == 6


@pytest.mark.parametrize(
    ("part", "n"),
    [
        (partial(growth.buffers, TINY, ("32K", "128K"), 1), 2),
        (partial(growth.segments, TINY, (8, 24), 1), 2),
        (partial(growth.sizes, "from_scratch", (16, 32), 1), 1),
        (partial(growth.pools, 16, 2, 1), len(POLICIES)),
        (partial(growth.classes, (2, 4), 20, 1), 2),
        (partial(growth.labels, (30, 60)), 3),
    ],
    ids=["buffers", "segments", "sizes", "pools", "classes", "labels"],
)
def test_growth(rows, part, n):
    part()
    assert len(figures(rows)) == n


def test_growth_of_cameras(rows):
    pytest.importorskip("av")
    growth.cameras((1, 2), 1)
    assert len(rows) == 1
    assert "their processes take" in rows[0].measured


def test_chunks_and_memory(rows):
    memory.chunks(width=4, n=16)
    memory.memory((("GroupNorm, 16 px", "group", "small", 16, "600M", 600),), width=4)
    assert len(figures(rows)) == 9


def test_agreement(rows):
    scores.agreement(width=4, n_steps=1, n_unseen=512)
    assert len(figures(rows)) == 2


@pytest.mark.long
def test_ranks(rows):
    ranks()
    assert len(figures(rows)) == 2
