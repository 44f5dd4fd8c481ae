"""`streamclr run --predict` as a whole: real processes, a real clip, kills, stops, labels that come while it learns."""

import csv
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from streamclr import UserError, open_stream
from streamclr.classifier import Classifier, Head
from streamclr.models.versions import Score, Version, Versions
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.run import run
from streamclr.streams.account import Account
from support.camera import Camera, write_clip
from support.images import make_folder
from support.processes import kill_and_restart
from support.runs import content, state_sha256
from support.waiting import until

STREAMCLR = [sys.executable, "-m", "streamclr"]
DOG = Path(os.environ.get("STREAMCLR_CLIPS", "../shared/data")) / "dog.mp4"


def predictions(path):
    file = path / "predictions.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def events(path):
    file = path / "events.jsonl"
    return [json.loads(line)["event"] for line in file.read_text().splitlines()] if file.exists() else []


def check(path, account):
    """Every frame that could be classified has its line, once and in order."""
    assert account.is_balanced
    lines = predictions(path)
    assert [line["image"] for line in lines] == list(range(len(lines)))
    assert len(lines) == account.predicted == account.classifiable
    return lines


@pytest.fixture
def config(tmp_path):
    return RunOptions(
        source=f"folder:{make_folder(tmp_path / 'images')}?stc=5", buffer=8, width=1, images=80, probes=0,
        fractions="1", classifier="linear", checkpoint_steps=2, out=str(tmp_path / "run"),
    )  # fmt: skip


def test_a_run_with_predictions_is_the_same_run(config, tmp_path):
    path, results = run(replace(config, predict=True))
    plain, _ = run(replace(config, out=str(tmp_path / "plain")))
    for name in ("model.safetensors", "buffer.safetensors", "classifier.safetensors"):
        assert (path / name).read_bytes() == (plain / name).read_bytes()
    assert len(check(path, Account.of(results["account"]))) == results["predictions"] == 80
    steps, _ = content(path)
    assert all("served" in step for step in steps)
    served = Versions(RunDirectory(path)).look()
    assert results["served"] == json.loads(json.dumps(served.about()))
    assert (len(served.trained_on), served.score.n) == (26, 6)
    assert json.loads((path / "status.json").read_text())["served"] == results["served"]


@pytest.mark.system
def test_on_two_threads_too(config, tmp_path):
    words = ["run", "--source", config.source, "--buffer", "16", "--width", "8", "--images", "64"]
    words += ["--probes", "0", "--fractions", "1", "--classifier", "linear", "--checkpoint-steps", "1"]
    for name, more in (("plain", []), ("predicting", ["--predict"])):
        command = [*STREAMCLR, *words, *more, "--out", str(tmp_path / name)]
        # Threads that wait do not spin: on a machine with other work they would for minutes.
        threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
        subprocess.run(command, check=True, capture_output=True, env=os.environ | threads)
    assert state_sha256_of_learner(tmp_path / "plain") == state_sha256_of_learner(tmp_path / "predicting")
    assert len(predictions(tmp_path / "predicting")) == 64


def state_sha256_of_learner(path):
    _, state = Checkpoints(path / "checkpoints").latest()
    Checkpoints(path / "learner").save(1, {"learner": state["learner"]})
    return json.loads((path / "learner" / f"{1:010}" / "manifest.json").read_text().splitlines()[1])["sha256"]


def test_predictions_may_begin_and_end_in_the_middle_of_a_run(config, tmp_path, monkeypatch):
    """The option changes nothing that is learned: a run that was stopped goes on with it, or without."""
    import signal

    from streamclr.base.errors import Stopped
    from streamclr.records.checkpoints import Pace

    whole, _ = run(replace(config, out=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        patch.setattr(Pace, "due", lambda self: signal.raise_signal(signal.SIGTERM))
        for predict in (False, True, True, False, True):
            with pytest.raises(Stopped):
                run(replace(config, predict=predict))
    path, results = run(replace(config, predict=True))
    assert [line["image"] for line in predictions(path)] == [*range(8, 24), *range(32, 80)]
    assert results["predictions"] == 64
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_step_that_is_undone_was_classified(config, monkeypatch):
    from support.damage import at_steps, break_gradient

    at_steps(monkeypatch, [4], break_gradient)
    path, results = run(replace(config, predict=True))
    account = Account.of(results["account"])
    assert account.passed == {"undone": 8}
    assert len(check(path, account)) == 80


def test_a_learner_that_goes_back_takes_its_predictions_back(config, monkeypatch):
    from support.damage import at_steps, break_weight

    at_steps(monkeypatch, [6], break_weight)
    path, results = run(replace(config, predict=True))
    assert any("back to step 4" in event for event in events(path))
    assert len(check(path, Account.of(results["account"]))) == 80


def test_what_cannot_be_is_one_line_and_leaves_nothing(config, tmp_path):
    with pytest.raises(UserError, match="--predict takes memory that --memory does not count"):
        run(replace(config, predict=True, memory="2G"))
    assert not (tmp_path / "run").exists()


def test_an_error_before_the_first_step_leaves_nothing(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.png").write_bytes(b"junk")
    config = RunOptions(source=f"folder:{folder}?size=16", buffer=4, width=1, predict=True, out=str(tmp_path / "run"))
    with pytest.raises(UserError, match="not one image"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_a_stream_without_labels_says_so_once(config, tmp_path):
    pytest.importorskip("av")
    clip = write_clip(tmp_path / "clip.mp4", n=40)
    path, results = run(replace(config, source=str(clip), size=16, images=None, predict=True, label_budget="off"))
    assert results["served"] is None
    assert sum("no labels at hand" in event for event in events(path)) == 1
    lines = check(path, Account.of(results["account"]))
    assert len(lines) == 40
    assert {line["class"] for line in lines} == {None}


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("n_kills", [4, pytest.param(30, marks=pytest.mark.long)])
def test_kill_9_at_random_moments_loses_no_prediction_and_makes_none_twice(tmp_path, n_kills):
    pytest.importorskip("av")
    clip = write_clip(tmp_path / "clip.mp4", n=60 * n_kills + 200)
    words = ["run", "--source", f"{clip}", "--size", "16", "--buffer", "8", "--segment", "2", "--batch", "4"]
    words += ["--width", "1", "--checkpoint-steps", "1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*STREAMCLR, *words, "--out", str(whole)], check=True, capture_output=True)
    predicting = [*words, "--predict", "--out", str(killed)]
    assert kill_and_restart(killed, predicting, n_kills, seed=7) == n_kills
    results = RunDirectory(killed).results
    assert len(check(killed, Account.of(results["account"]))) == results["images"] > 200
    assert state_sha256_of_learner(killed) == state_sha256_of_learner(whole)
    assert state_sha256(killed) != state_sha256(whole)  # which has no predictions in its account


# The real process; its steps take as long as a hundred frames do, however fast the machine is.
SLOW = """
import sys, time
from pathlib import Path
from streamclr import learner
from streamclr.cli import entry
file, learn_many = Path(sys.argv[1]) / "predictions.jsonl", learner.Learner.learn_many
def n_lines():
    return file.read_bytes().count(b"\\n")
def slow_step(self, images, tracks=None):
    before = n_lines()
    while n_lines() < before + 100:
        time.sleep(0.01)
    return learn_many(self, images)
learner.Learner.learn_many = slow_step
sys.exit(entry.main(sys.argv[2:]))
"""


@pytest.mark.system
def test_a_run_on_a_camera_is_stopped_and_killed_and_goes_on(tmp_path):
    """A camera that is faster than the learner: the account adds up after SIGTERM, and after kill -9."""
    camera, path = Camera(fps=300), tmp_path / "run"
    words = ["run", "--source", f"{camera.url}#size=16", "--buffer", "32", "--segment", "32", "--width", "8"]
    words += ["--checkpoint-steps", "1"]
    command = [sys.executable, "-c", SLOW, str(path), *words, "--predict", "--out", str(path)]
    try:
        for how, code in (("terminate", 143), ("kill", -9), ("terminate", 143)):
            n_before = len(RunDirectory(path).steps()) if path.exists() else 0
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            until(lambda n=n_before: path.exists() and len(RunDirectory(path).steps()) >= n + 4, seconds=120)
            getattr(process, how)()
            assert process.wait(60) == code
            if how == "terminate":
                _, state = Checkpoints(path / "checkpoints").latest()
                account = Account.of(state["stream"]["account"])
                check(path, account)
                assert account.learned == state["stream"]["position"] == 32 * state["learner"]["n_steps"]
                assert account.passed["learner busy"] > 0
    finally:
        camera.close()


@pytest.mark.system
def test_a_rollback_while_the_run_goes_on(tmp_path):
    camera, path = Camera(fps=50), tmp_path / "run"
    words = ["run", "--source", f"{camera.url}#size=16", "--buffer", "8", "--width", "1", "--predict"]
    process = subprocess.Popen([*STREAMCLR, *words, "--out", str(path)], stderr=subprocess.DEVNULL)

    def newest():
        lines = predictions(path)
        return lines[-1]["version"] if lines else 0

    try:
        until(lambda: newest() is None, seconds=120)
        directory = RunDirectory(path)
        ours = Versions(directory)
        for number in (1, 2):
            model = directory.config.architecture.make_model()
            classifier = Classifier(model, Head(8, 2), ("a", "b"), directory.image_size)
            version = Version(classifier, 0, frozenset(), frozenset(), Score(0, 0, 0.0))
            ours.take(version, ours.current)
            until(lambda number=number: newest() == number, seconds=60)
        said = subprocess.run([*STREAMCLR, "rollback", str(path)], capture_output=True, text=True, check=True).stdout
        assert said.startswith("now serving version 1 (step 0, 0 labels")
        pinned = f"it is pinned: no new version takes its place before streamclr unpin {path}"
        assert said.endswith(f" instead of version 2\n{pinned}\n")
        until(lambda: newest() == 1, seconds=60)
        until(lambda: any("rolled back: version 1" in event for event in events(path)), seconds=60)
        assert ours.take(version, ours.look()) is None  # it is pinned
        said = subprocess.run([*STREAMCLR, "unpin", str(path)], capture_output=True, text=True, check=True).stdout
        assert said.startswith("unpinned: a better version may take the place of version 1 (step 0, ")
        until(lambda: any(event.startswith("version 1 is unpinned") for event in events(path)), seconds=60)
        again = subprocess.run([*STREAMCLR, "rollback", str(path)], capture_output=True, text=True, check=False)
        assert again.returncode == 2
        assert again.stderr == f"streamclr: version 1 is the first of {path}: there is none before it\n"
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
        camera.close()
    account = Account.of(Checkpoints(path / "checkpoints").latest()[1]["stream"]["account"])
    lines = check(path, account)
    versions = [line["version"] for line in lines]
    assert [version for version, _ in itertools.groupby(versions)] == [None, 1, 2, 1]


# ----------------------------------------------------------------------------------------------------------------------
# The whole on a real clip. The process is the real one; it only waits at some places, so that what happens at the same
# time really does: a step does not end before frames behind it are classified, and a version is not saved before frames
# are that came after the saving began.

STAGED = """
import json, os, sys, time
from pathlib import Path
from streamclr import learner
from streamclr.cli import entry
from streamclr.records import checkpoints as checkpoint
from streamclr.runs import challenger
path = Path(sys.argv[1])
log = (path.parent / "log.jsonl").open("a", buffering=1)

def n_lines():
    file = path / "predictions.jsonl"
    return file.read_bytes().count(b"\\n") if file.exists() else 0

def wait(condition, what):
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            print("waited in vain:", what, file=sys.stderr, flush=True)
            os._exit(3)
        time.sleep(0.01)

def note(**what):
    log.write(json.dumps(what) + "\\n")

saved, challengers = [], []
learn_many, save, fit_linear = learner.Learner.learn_many, checkpoint.Checkpoints.save, challenger.fit_linear

def staged_step(self, images, tracks=None):
    number, before = self.n_steps + 1, n_lines()
    if number in (5, 8, 11):  # the test gives labels, and says so
        (path.parent / f"labels-{number}").touch()
        wait(lambda: (path.parent / f"given-{number}").exists(), f"labels at step {number}")
    if number in (7, 10, 13):  # a version is being saved, or was refused: it must not be over before the clip is
        wait(lambda: len(saved) >= (number - 4) // 3 or refused(), f"a head at step {number}")
    if number == 15:
        wait(lambda: not (saved and saved[-1] not in os.listdir(path / "served")), "a version that is saved")
        challenger.fit_linear = worse
    step = learn_many(self, images)
    behind = min(289, 16 * (number + 1))  # frames of this step and the next
    wait(lambda: n_lines() >= behind, f"predictions during step {number}")
    note(step=number, before=before, after=n_lines())
    if number in (5, 8, 11):  # the labels are noticed, and an encoder can be given right after this step
        wait(lambda: challengers[0].wants and not challengers[0].is_busy, f"a challenger after step {number}")
    return step

init = challenger.Challenger.__init__

def staged_init(self, *arguments):
    init(self, *arguments)
    challengers.append(self)

def refused():
    file = path / "events.jsonl"
    return file.exists() and "is refused" in file.read_text()

def staged_save(self, number, state):
    if self.directory.name != "served":
        return save(self, number, state)
    before = n_lines()
    saved.append(f"{number:010}")
    wait(lambda: n_lines() > before or before == 289, f"predictions while version {number} is saved")
    note(version=number, before=before, after=n_lines())
    return save(self, number, state)

def worse(*arguments, **options):
    head = fit_linear(*arguments, **options)
    head.linear.weight.copy_(head.linear.weight.roll(1, 0))
    head.linear.bias.copy_(head.linear.bias.roll(1, 0))
    note(worse=True)
    return head

learner.Learner.learn_many, checkpoint.Checkpoints.save = staged_step, staged_save
challenger.Challenger.__init__ = staged_init
sys.exit(entry.main(sys.argv[2:]))
"""


def give_labels(path, n):
    """Made-up classes by the time of the frames, for so many of the questions, by the commands that people use."""
    file = path.parent / f"tasks-{n}.csv"
    subprocess.run([*STREAMCLR, "label", "export", str(path), str(file)], check=True, capture_output=True)
    with file.open(newline="") as read:
        rows = list(csv.DictReader(read))
    middle = sorted(int(row["arrival"]) for row in rows)[len(rows) // 2]
    names = {True: "early", False: "late"}
    each = dict.fromkeys(names.values(), 0)
    for row in rows:
        name = names[int(row["arrival"]) < middle]
        if not row["label"] and each[name] < n // 2:
            row["label"], row["answer"] = name, "label"
        each[name] += bool(row["label"])
    answered = path.parent / f"answered-{n}.csv"
    with answered.open("w", newline="") as out:
        table = csv.DictWriter(out, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    subprocess.run([*STREAMCLR, "label", "import", str(path), str(answered)], check=True, capture_output=True)


@pytest.mark.system
def test_a_real_clip_with_labels_that_come_while_it_learns(tmp_path):
    pytest.importorskip("av")
    if not DOG.exists():
        pytest.skip(f"{DOG} is not here")
    path = tmp_path / "run"
    words = ["run", "--source", str(DOG), "--size", "32", "--buffer", "32", "--segment", "16", "--batch", "16"]
    words += ["--width", "4", "--label-budget", "40", "--checkpoint-steps", "2", "--predict", "--out", str(path)]
    words += ["--label-disk", "256K"]  # no room for neighbouring frames: all questions are there from the start
    command = [sys.executable, "-c", STAGED, str(path), *words]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
        for step, n in ((5, 4), (8, 8), (11, 40)):
            until(lambda step=step: (tmp_path / f"labels-{step}").exists() or process.poll() is not None, seconds=200)
            assert process.poll() is None, (tmp_path / "stderr").read_text()
            give_labels(path, n)
            (tmp_path / f"given-{step}").touch()
        process.communicate(timeout=200)
    assert process.returncode == 0, (tmp_path / "stderr").read_text()
    results, log = RunDirectory(path).results, [json.loads(line) for line in (tmp_path / "log.jsonl").open()]

    lines = check(path, Account.of(results["account"]))
    assert len(lines) == results["predictions"] == results["images"] == 289

    steps = [line for line in log if "step" in line]
    assert len(steps) == 19
    assert all(line["after"] > 16 * line["step"] for line in steps[:-1])  # frames behind its own, while it went on
    saves = {line["version"]: line for line in log if "version" in line}
    assert saves[1]["after"] > saves[1]["before"]
    assert saves[2]["after"] > saves[2]["before"]

    versions = list(dict.fromkeys(line["version"] for line in lines))
    assert versions[:3] == [None, 1, 2]
    assert all((line["class"] is None) == (line["version"] is None) for line in lines)
    assert {line["class"] for line in lines} == {None, "early", "late"}
    assert all(0.5 <= line["probability"] <= 1 for line in lines if line["class"])

    told = events(path)
    assert sum("is served" in event for event in told) == len(saves)
    assert any("no label was held back to measure it" in event for event in told)  # of the first few labels
    assert {"worse": True} in log
    assert "is refused" in told[-1], told
    assert results["served"]["version"] == max(saves)
    # The last labels were measured on those held back. A head that is no better than the one before is refused.
    refused = [re.search(r"refused: (\d+) of (\d+) .* has (\d+) of", event) for event in told if "is refused" in event]
    assert all(int(found[1]) <= int(found[3]) for found in refused if found)
    assert max([results["served"]["held_back"], *(int(found[2]) for found in refused if found)]) >= 6


def test_what_is_served_classifies_other_images_too(config, capsys):
    from streamclr.cli.entry import main

    path, _ = run(replace(config, predict=True))
    classify = ["predict", str(path), "--source", config.source, "--images", "3"]
    assert main([*classify, "--served"]) == 0
    found = [json.loads(line)["class"] for line in capsys.readouterr().out.splitlines()]
    version = Versions(RunDirectory(path)).look()
    images = open_stream(config.source).read(3)
    assert found == [version.classes[i] for i in version.probabilities(images).argmax(1)]
    assert main([*classify, "--served", "--fraction", "1"]) == 2
    assert "both --served and --fraction" in capsys.readouterr().err
    shutil.rmtree(path / "served")
    assert main([*classify, "--served"]) == main(["rollback", str(path)]) == 2
    assert capsys.readouterr().err.count("serves no version: run with --predict, and give it labels\n") == 2


def test_a_damaged_version_is_passed_over_when_the_run_goes_on(config, tmp_path, capsys):
    path, _ = run(replace(config, predict=True))
    served = path / "served"
    shutil.copytree(served / f"{1:010}", served / f"{9:010}")  # its manifest says 1
    (path / "results.json").unlink()
    path, results = run(replace(config, predict=True))
    assert any("skipping version 9 for the one before" in event for event in events(path))
    assert results["served"]["version"] in (1, *range(2, 12))
    assert len(check(path, Account.of(results["account"]))) == 80
