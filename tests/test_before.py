"""Run directories and exported files of the version before (commit d87e83a) are read, used and resumed."""

import json
import shutil
import tarfile
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from streamclr.cli.entry import main
from streamclr.labelling.candidates import read_candidates, read_clips
from streamclr.labelling.session import LabelSession
from streamclr.records.directory import RunDirectory

KEPT = Path(__file__).parent / "fixtures" / "d87e83a.tar.xz"
NEEDS = {".onnx": "onnxruntime", ".pte": "executorch"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    path = tmp_path_factory.mktemp("before")
    with tarfile.open(KEPT) as archive:
        archive.extractall(path, filter="data")
    return path


@pytest.fixture
def home(unpacked, tmp_path, monkeypatch):
    shutil.copytree(unpacked, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["finished"], "run"),
        (["finished", "--fraction", "0.01"], "fraction"),
        (["finished", "--served"], "served"),
        pytest.param(["finished/finished.onnx"], "run", marks=pytest.mark.system),
        (["finished/finished.pt2"], "run"),
        pytest.param(["finished/finished.pte"], "run", marks=pytest.mark.system),
        (["finished/finished-pretrained"], "run"),
        (["labelled"], "labelled"),
    ],
    ids=["run", "fraction", "served", "onnx", "pt2", "pte", "pretrained", "labelled"],
)
def test_predictions_are_the_same(home, capsys, words, kept):
    if not find_spec(NEEDS.get(Path(words[0]).suffix, "torch")):
        pytest.skip(f"needs {NEEDS[Path(words[0]).suffix]}")
    assert main(["predict", *words, "--source", "synthetic:", "--images", "16"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [json.loads(line) for line in (home / f"predicted-{kept}.jsonl").read_text().splitlines()]
    assert len(found) == 16
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert (ours["image"], ours["class"]) == (theirs["image"], theirs["class"])
        assert ours["probability"] == pytest.approx(theirs["probability"], abs=1e-3)


def test_labels_train_and_are_exported(home, capsys):
    assert main(["label", "train", "labelled"]) == 0
    assert "classifier from 12 labels" in capsys.readouterr().out
    assert main(["label", "export", "labelled", "labels.csv"]) == 0
    assert "12 questions" in capsys.readouterr().out
    assert len((home / "labels.csv").read_text().splitlines()) == 13


def test_the_only_version_cannot_be_rolled_back(home, capsys):
    assert main(["rollback", "finished"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "version 1 is the first of finished" in line


def test_report(home):
    assert main(["report", "finished", "--out", "page.html"]) == 0
    page = (home / "page.html").read_text()
    assert "12.2" in page
    assert "finished" in page


@pytest.mark.system
def test_export_to_onnx(home, capsys):
    pytest.importorskip("onnxscript")
    assert main(["export", "finished", "--out", "again.onnx"]) == 0
    about = json.loads((home / "again.onnx.json").read_text())
    kept = json.loads((home / "finished" / "finished.onnx.json").read_text())
    assert about["matches"]
    assert about["metadata"] == kept["metadata"]


@pytest.mark.system
def test_a_stopped_run_goes_on(home, capsys):
    options = (
        "--source synthetic: --recipe paper --width 1 --buffer 16 --segment 16 --probes 0 --size 12 "
        "--checkpoint-steps 4 --images 480 --fractions 0.1 --rescore-every 4 --guards on --label-budget 8 "
        "--label-disk 12K --duty 20%"
    )
    before = [one.arrival for one in read_candidates(home / "stopped" / "candidates.bin")]
    assert main(["run", *options.split(), "--out", "stopped"]) == 0
    clips = read_clips(home / "stopped" / "candidates.bin")
    assert {len(clip) for clip in clips} == {1}  # the label queue goes on with single frames
    assert max(before) < 208 < max(clip[0].arrival for clip in clips)
    assert any(clip[0].arrival in before for clip in clips)
    assert "after step 13" in capsys.readouterr().err
    results = json.loads((home / "stopped" / "results.json").read_text())
    assert (results["steps"], results["images"]) == (30, 480)
    assert len((home / "stopped" / "journal.jsonl").read_text().splitlines()) == 30


def test_the_dashboard_shows_them(home):
    pytest.importorskip("fastapi")
    from streamclr.web.site import Site

    site = Site([home])
    states = {view.name: view.status() for view in site.views.values()}
    assert {name: (status["state"], status["step"]) for name, status in states.items()} == {
        "finished": ("finished", 10),
        "labelled": ("finished", 10),
        "stopped": ("stopped", 13),
    }
    assert all(wall.content["n"] >= 16 for wall in (view.wall for view in site.views.values()))


def test_the_labelling_page_goes_on(home):
    """The old answers count, and a new one is kept."""
    with closing(LabelSession(RunDirectory.existing(home / "labelled"))) as session:
        session.prepare(choose_anew=False)
        session.train()
        state = session.state()
        assert state["progress"]["labelled"] == 12
        assert [(one["name"], one["n"]) for one in state["classes"] if one["n"]] == [("tile", 6), ("star", 6)]
        star = next(one["id"] for one in state["classes"] if one["name"] == "star")
        session.labels.answer("one-more", "label", [session.questions[0].key], star)
        assert {one["n"] for one in session.state()["classes"]} == {0, 5, 7}
