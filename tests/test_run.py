import dataclasses
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from streamclr import Learner, UserError, open_stream
from streamclr.base.errors import Stopped
from streamclr.base.files import write_json
from streamclr.base.tensors import load_tensors
from streamclr.models.heads import Heads
from streamclr.recipe import LOSSES, OPTIMIZERS
from streamclr.records.checkpoints import Checkpoints, Pace
from streamclr.records.directory import RunDirectory, new_directory
from streamclr.records.journal import files_of, lines_of
from streamclr.records.options import RunOptions
from streamclr.records.plan import RunPlan, open_run_stream, resolve
from streamclr.runs.assemble import make_learner
from streamclr.runs.evaluation import Extracted, labelled, other_frames, spread_over_tracks
from streamclr.runs.run import run
from streamclr.views import WEAK_VIEWS
from support.camera import write_clip
from support.images import make_folder
from support.processes import kill_and_restart
from support.runs import content, small_options, state_sha256


@pytest.fixture
def config(tmp_path):
    return small_options(tmp_path)


def test_a_run_leaves_everything_behind(config, tmp_path):
    path, results = run(config)
    assert path == tmp_path / "run"
    names = {
        "config.json",
        "journal.jsonl",
        "status.json",
        "model.safetensors",
        "classifier.safetensors",
        "classes.json",
    }
    assert {p.name for p in path.iterdir()} == names | {"buffer.safetensors", "results.json", "checkpoints"}
    directory = RunDirectory.existing(path)
    assert directory.results == json.loads(json.dumps(results))
    assert results["images"] == 50
    assert results["steps"] == 7  # 6 segments of 8, and one of 2
    assert results["labels"].keys() == {"0.1", "1.0"}

    steps = directory.steps()
    assert [step["number"] for step in steps] == list(range(1, 8))
    assert steps[-1]["seen"] == 50
    assert all(sum(step["classes"]) == 8 for step in steps)
    assert sum("accuracy" in step for step in steps) == 2

    filled = directory.config
    assert (filled.size, filled.stem, filled.segment, filled.batch, filled.epochs) == (16, "small", 8, 8, None)
    buffer = directory.load_buffer()
    assert buffer["images"].shape == (8, 3, 16, 16)
    assert buffer["labels"].bincount(minlength=2).tolist() == steps[-1]["classes"]


def test_saved_weights_are_the_learned_ones(config):
    path, results = run(config)
    directory = RunDirectory.existing(path)
    classifier = Heads(directory).load()
    assert classifier.classes == ["ant", "bee"]
    source = open_run_stream(directory.config).source
    from streamclr.classifier import Accuracy
    from streamclr.runs.evaluation import extract

    predicted = classifier.head(extract(classifier.model, source.test).features).argmax(1)
    assert Accuracy.of(predicted, torch.from_numpy(source.test.labels), 2).top1 == results["labels"]["1.0"]["accuracy"]
    small = Heads(directory).load(0.1)
    assert not torch.equal(small.head.linear.weight, classifier.head.linear.weight)
    with pytest.raises(UserError, match=r"no classifier for the fraction 0\.5: use 0\.1, 1\.0"):
        Heads(directory).load(0.5)


def test_the_seed_decides_the_run(config, tmp_path):
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path, _ = run(dataclasses.replace(config, seed=seed, out=str(tmp_path / name)))
        weights.append(load_tensors(path / "model.safetensors"))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not torch.equal(weights[0]["encoder.conv1.weight"], weights[2]["encoder.conv1.weight"])


def test_a_seed_in_the_source_is_the_streams_alone(config):
    a, b = (open_run_stream(dataclasses.replace(config, source=config.source + "?seed=9", seed=s)) for s in (1, 2))
    assert torch.equal(a.read(30), b.read(30))


def test_a_new_run_never_overwrites_an_old_one(config, tmp_path, monkeypatch):
    run(config)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="exists already"):
        run(config)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    monkeypatch.chdir(tmp_path)
    paths = [run(dataclasses.replace(config, out=None))[0] for _ in range(2)]
    assert [str(p) for p in paths] == ["runs/folder-contrast", "runs/folder-contrast-2"]


def test_an_unlabelled_stream_has_no_classifier(tmp_path):
    folder = make_folder(tmp_path / "images") / "ant"
    path, results = run(RunOptions(source=f"folder:{folder}", buffer=4, width=2, out=str(tmp_path / "run")))
    assert results["labels"] == {}
    assert results["images"] == 20
    with pytest.raises(UserError, match="has no classifier"):
        Heads(RunDirectory.existing(path)).load()


def tracked_folder(path, n_tracks=6, n=4):
    """Two classes of tracks, frames of one colour that gets brighter."""
    for name, colour in (("ant", (90, 20, 20)), ("bee", (20, 20, 90))):
        for track in range(n_tracks):
            (path / name / f"t{track}").mkdir(parents=True)
            for frame in range(n):
                picture = np.full((16, 16, 3), colour, np.uint8) + np.uint8(10 * track + frame)
                Image.fromarray(picture).save(path / name / f"t{track}" / f"{frame}.png")
    return f"folder:{path}"


def test_labels_are_spread_over_their_tracks_and_the_others_are_for_self_training(tmp_path):
    train, _ = labelled(open_stream(tracked_folder(tmp_path / "in")))
    known = Extracted(torch.rand(len(train), 2), torch.from_numpy(train.labels), *(torch.arange(len(train)),) * 2)
    tracks = torch.from_numpy(train.tracks)
    drawn = torch.zeros(len(train), dtype=torch.bool)
    drawn[[0, 5, 21]] = True
    own = spread_over_tracks(known, drawn, tracks)
    assert set(tracks[own.numbers].tolist()) == set(tracks[drawn].tolist())
    assert len(own.labels) == 12
    assert sorted(own.weights.tolist()) == [0.5] * 9 + [1.0] * 3
    assert torch.equal(own.labels, known.labels[own.numbers])  # of one class each
    images, scenes = other_frames(train, known, own, tracks)
    assert not set(scenes.tolist()) & set(tracks[drawn].tolist())
    assert len(scenes) == len(train) - 12
    assert images(np.array([0])).shape == (1, 3, 16, 16)
    assert other_frames(train, known, known, tracks) is None


def test_self_training_in_a_run(config, tmp_path, monkeypatch):
    monkeypatch.setattr("streamclr.stage_two.MIN_STEPS", 3)
    options = dataclasses.replace(config, source=tracked_folder(tmp_path / "in"), stc=None, images=40, fractions="0.2")
    path, results = run(dataclasses.replace(options, classifier="selftrained"))
    found = results["labels"]["0.2"]
    assert (found["classifier"], found["why"]) == ("selftrained", "self-trained: as asked")
    assert Heads(RunDirectory.existing(path)).load()
    out = tmp_path / "without"
    with pytest.raises(UserError, match="selftrained needs frames whose tracks are known"):
        run(dataclasses.replace(config, classifier="selftrained", out=str(out)))
    assert not out.exists()


def test_supervised_baselines(config):
    _, results = run(dataclasses.replace(config, supervised=True, fractions="1"))
    assert results["supervised"]["1.0"].keys() == {"end_to_end", "untrained_encoder"}


def test_fine_tuning_starts_from_the_given_weights(config, tmp_path):
    path, _ = run(config)
    tuned = dataclasses.replace(config, init=str(path / "model.safetensors"), stem="small")
    saved = load_tensors(path / "model.safetensors")["encoder.conv1.weight"]
    plan = resolve(tuned, open_run_stream(tuned))
    assert torch.equal(make_learner(plan).encoder.conv1.weight, saved)
    with pytest.raises(UserError, match="does not fit"):
        make_learner(dataclasses.replace(plan, width=4))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"images": 5}, "5 images are asked for, before one batch of 8"),
        ({"buffer": 100, "stc": None, "images": None}, "ends after 40 images, before one batch of 100"),
        ({"stc": None, "images": 100}, "ends after 40 images, before the 100 asked for: write passes=3"),
        ({"images": 50, "epochs": 2}, "both --images and --epochs"),
        ({"source": "synthetic:?stc=bogus", "stc": None}, "'bogus': use a whole number"),
        ({"stem": ""}, "stem is ''"),
        ({"init": ""}, "holds no model: it has no config.json"),
        ({"buffer": 10**15, "batch": 8, "segment": 8, "device": "meta"}, "no device 'meta'"),
        ({"images": 0}, "images is 0: use at least 1"),
        ({"images": None, "epochs": 0.0}, "epochs is 0"),
        ({"images": None, "epochs": float("nan")}, "epochs is nan"),
        ({"batch": 0}, "batch_size is 0"),
        ({"updates": 0}, "updates_per_segment is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"device": "tpu9"}, "no device 'tpu9'"),
        ({"lr": float("nan")}, r"lr \(nan\)"),
        ({"segment": 0}, "segment is 0"),
        ({"buffer": 1}, "buffer is 1: use at least 2 images"),
        ({"batch": 9}, "batch_size is 9"),
        ({"policy": "contrats"}, "did you mean 'contrast'"),
        ({"policy": "fifo", "rescore_every": 5}, "--rescore-every is for the policy contrast"),
        ({"policy": "contrast?beta=1"}, "has no option 'beta'"),
        ({"encoder": "resnet19"}, "did you mean 'resnet18'"),
        ({"stem": "big"}, "stem is 'big'"),
        ({"norm": "layer"}, "norm is 'layer'"),
        ({"fractions": "0.001"}, "less than one for each"),
        ({"fractions": "a"}, "a label fraction is 'a'"),
        ({"fractions": "2"}, "label fraction is 2.0"),
        ({"probes": -1}, "probes is -1"),
        ({"init": "nowhere.safetensors"}, "no file nowhere.safetensors"),
        ({"source": "synthetic:", "epochs": 1, "images": None}, "has no epochs"),
        ({"label_budget": "many"}, "label_budget is 'many': use a share as 1%"),
        ({"label_budget": "0"}, "label_budget is '0'"),
        ({"label_budget": "41"}, "label_budget is 41, and the stream has 40 images"),
        ({"label_budget": "20", "label_disk": "19K"}, "budget is 20 images, and 19K of disk holds 19 of 16 px"),
        ({"label_budget": "1%", "label_disk": "1K"}, "1K of disk holds 0 of 16 px: use a larger --label-disk"),
        ({"label_budget": "1%", "label_disk": "lots"}, "label_disk is 'lots': write a size"),
        ({"source": "synthetic:", "images": 0}, "images is 0: use at least 1"),
    ],
)
def test_bad_configurations_leave_nothing_behind(config, tmp_path, change, told):
    with pytest.raises(UserError, match=told) as error:
        run(dataclasses.replace(config, **change))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("budget", "images", "epoch", "asked"),
    [("10%", 5000, 4000, "400"), ("10%", 2000, 4000, "200"), ("7", 50, 40, "7"), ("10%", 1000, None, "100"),
     ("1%", 600, None, "50"), ("1%", 20, 40, "20")],
)  # fmt: skip
def test_a_label_budget_is_a_number_where_the_stream_has_an_end(config, budget, images, epoch, asked):
    """A share is of one pass over the images: the second shows nothing new."""
    stream = SimpleNamespace(epoch=epoch, n_images=None, live=False, size=16, in_time=False, train=None)
    filled = resolve(dataclasses.replace(config, label_budget=budget, images=images), stream)
    assert filled.label_budget == asked
    assert resolve(filled, stream) == filled  # as it is when the run goes on


def test_a_label_budget_of_a_stream_without_an_end_stays_a_share(config):
    stream = SimpleNamespace(epoch=None, n_images=None, live=True, size=16, in_time=True, train=None)
    assert resolve(dataclasses.replace(config, label_budget="1%", images=None), stream).label_budget == "1%"
    assert resolve(dataclasses.replace(config, label_budget="500", images=None), stream).label_budget == "500"


@pytest.mark.parametrize(
    ("options", "epoch", "train", "asked"),
    [
        ({}, None, None, "200"),
        ({"images": 30}, None, None, "30"),
        ({"images": 3000}, 40, None, "40"),
        ({"label_disk": "19K"}, None, None, "19"),
        ({"label_budget": "off"}, None, None, None),
        ({}, 40, "labelled images", None),
        ({"label_budget": "7"}, 40, "labelled images", "7"),
    ],
)
def test_a_run_without_labels_asks_a_person_and_is_never_refused_for_that(config, options, epoch, train, asked):
    stream = SimpleNamespace(epoch=epoch, n_images=None, live=True, size=16, in_time=True, train=train)
    plan = resolve(dataclasses.replace(config, **{"images": None} | options), stream)
    assert plan.label_budget == asked
    assert resolve(plan, stream) == plan


def test_no_room_for_the_label_queue_leaves_nothing_behind(config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("streamclr.labelling.candidates.os.posix_fallocate", full)
    with pytest.raises(UserError, match="no room for 40 candidates"):
        run(dataclasses.replace(config, label_budget="2"))
    assert not (tmp_path / "run").exists()
    unlabelled = f"folder:{tmp_path / 'images' / 'ant'}"  # nobody has asked for questions: it is no reason not to learn
    path, _ = run(dataclasses.replace(config, source=unlabelled, stc=None, images=20))
    (line,) = (path / "events.jsonl").read_text().splitlines()
    assert "no questions to a person: no room for 20 candidates" in line


def test_a_loss_that_is_not_finite_leaves_no_results(config, tmp_path):
    with pytest.raises(UserError, match="the loss at step 2 is not finite"):
        run(dataclasses.replace(config, lr=1e30))
    assert not (tmp_path / "run" / "results.json").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_options_in_the_source_are_used_and_recorded(config):
    asked = dataclasses.replace(config, source=config.source + "?stc=4&size=12", stc=None, size=None)
    source = open_run_stream(asked).source
    assert (source.stc, source.images(np.array([0])).shape[-1]) == (4, 12)


def test_a_run_is_found_again_from_another_directory(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = run(dataclasses.replace(config, source="folder:images", out="here"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert open_run_stream(RunDirectory.existing(tmp_path / path).config).read(2).shape == (2, 3, 16, 16)


@pytest.mark.parametrize("source", ["{}", "../{}"])
def test_the_default_directory_is_in_runs_whatever_the_source(config, tmp_path, monkeypatch, source):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    source = str(tmp_path / "images") if source == "{}" else "../images"
    path, _ = run(dataclasses.replace(config, source=source, out=None, probes=0))
    assert str(path) == "runs/folder-contrast"


def test_runs_that_start_together_get_directories_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: new_directory(None, tmp_path / "runs" / "x"), range(40)))
    assert len(set(paths)) == 40


def spoil(images):
    for image in images:
        image.write_bytes(image.read_bytes()[:100])


def test_a_run_on_a_folder_of_bad_files_leaves_nothing(config, tmp_path):
    spoil((tmp_path / "images").glob("*/*.png"))
    with pytest.raises(UserError, match="not one image of a whole pass can be read"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_a_run_passes_over_bad_files_and_counts_them(config, tmp_path, capsys):
    """The learner never sees them, in the stream or in stage two, and the buffer's labels are still right."""
    spoil(tmp_path / "images" / "ant" / f"{i}.png" for i in range(1, 20))
    path, results = run(config)
    account = results["account"]
    assert account["received"] == 50 == account["learned"] + account["rejected"]["truncated"]
    assert account["learned"] == results["images"] < 33
    assert results["n_test"] == 4  # bees: every fifth
    assert results["labels"]["1.0"]["n_labels"] == 17
    assert "left out: 15 of 32 labelled images cannot be read; the image" in capsys.readouterr().err
    buffer = RunDirectory(path).load_buffer()
    strongest = buffer["images"].float().mean((2, 3)).argmax(1)  # red ants, green bees
    assert torch.equal(buffer["labels"], strongest)


def test_a_run_with_bad_files_is_the_same_after_a_stop(config, tmp_path, monkeypatch):
    spoil(tmp_path / "images" / "bee" / f"{i}.png" for i in (0, 3, 4, 11))
    whole, results = run(dataclasses.replace(config, out=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        patch.setattr(Pace, "due", lambda self: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped):
            run(config)
    path, again = run(config)
    assert again["account"] == results["account"]
    assert results["account"]["rejected"]["truncated"] > 3
    assert content(path) == content(whole)


def test_epochs_are_passes_over_the_dataset(config):
    for epochs, images in ((None, 40), (2, 80), (0.5, 20)):
        asked = dataclasses.replace(config, images=None, epochs=epochs)
        assert resolve(asked, open_run_stream(asked)).images == images


@pytest.mark.parametrize(
    ("asked", "size", "positives"),
    [
        ({"source": "synthetic:"}, 64, "time"),
        ({"source": "synthetic:?size=48"}, 48, "time"),
        ({"source": "synthetic:", "size": 80}, 80, "time"),
        ({"source": "synthetic:", "encoder": "resnet18"}, 32, "time"),
        ({"source": "synthetic:", "encoder": "resnet18", "recipe": "paper"}, 32, "views"),
        ({"source": "synthetic:", "width": 8, "positives": "time"}, 32, "time"),
    ],
)
def test_a_public_encoder_gets_images_that_it_can_use(asked, size, positives):
    options = RunOptions(**asked)
    plan = resolve(options, open_run_stream(options))
    assert (plan.size, plan.positives) == (size, positives)


def test_shuffled_images_have_no_neighbours(config):
    """Runs of one class look like time, but the next image is another object of the class."""
    asked = dataclasses.replace(config, width=None, stem=None, images=64, size=64)
    assert resolve(asked, open_run_stream(asked)).positives == "views"


def test_a_plan_has_no_defaults_left_to_fill_in(config):
    plan = resolve(dataclasses.replace(config, images=None, epochs=2), open_run_stream(config))
    assert (plan.images, plan.epochs) == (80, None)
    assert (plan.size, plan.batch, plan.segment, plan.stem, plan.guards) == (16, 8, 8, "small", "off")
    with pytest.raises(TypeError, match="size"):
        RunPlan(batch=8, segment=8, stem="small", guards="off")


def test_a_run_directory_of_the_version_before_goes_on(config):
    """It has `auto` for the guards of a recorded stream."""
    directory = RunDirectory.of(resolve(config, open_run_stream(config)))
    directory.close()
    content = json.loads((directory.path / "config.json").read_text())
    write_json(directory.path / "config.json", content | {"guards": "auto"})
    assert directory.config.guards == "off"
    path, _ = run(config)
    assert path == directory.path


def test_a_configuration_that_is_no_plan_is_named(tmp_path):
    write_json(tmp_path / "config.json", dataclasses.asdict(RunOptions(batch=8)))
    with pytest.raises(UserError, match=r"config\.json has None for size"):
        _ = RunDirectory(tmp_path).config
    write_json(tmp_path / "config.json", {"batch": 8})
    with pytest.raises(UserError, match=r"config\.json has no size"):
        _ = RunDirectory(tmp_path).config


def test_a_foreign_or_damaged_run_directory_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        RunDirectory.existing(tmp_path)
    (tmp_path / "config.json").write_text('{"sauce": 1}')
    with pytest.raises(UserError, match="sauce"):
        _ = RunDirectory.existing(tmp_path).config
    for text in ("[]", '{"width": "a"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json"):
            _ = RunDirectory.existing(tmp_path).config
    for line in ("garbage", "{}", "[]"):
        (tmp_path / "journal.jsonl").write_text(line + "\n")
        with pytest.raises(UserError, match=r"journal\.jsonl, line 1 is damaged"):
            RunDirectory.existing(tmp_path).steps()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        _ = RunDirectory.existing(tmp_path).config


def test_new_directory_says_when_it_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the directory"):
        new_directory(tmp_path / "file" / "below", tmp_path)


POLICIES = ["contrast?rescore_every=3", "random", "selective-bp?beta=1", "k-center", "reservoir", "min-red", "scale"]


PARTS = [{"policy": policy} for policy in POLICIES]
PARTS += [{"loss": loss, "weak_view": weak_view} for loss, weak_view in zip(LOSSES, cycle(WEAK_VIEWS), strict=False)]
PARTS += [{"optimizer": optimizer} for optimizer in OPTIMIZERS]


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(parts.values()))
def test_a_run_that_is_stopped_at_every_step_is_the_same_run(config, tmp_path, parts, monkeypatch):
    config = dataclasses.replace(config, **parts, images=40)
    whole, _ = run(dataclasses.replace(config, out=str(tmp_path / "whole")))
    real = Learner.learn_many

    def learn_many(self, images, tracks=None):
        step = real(self, images)
        signal.raise_signal(signal.SIGTERM)
        return step

    monkeypatch.setattr(Learner, "learn_many", learn_many)
    stopped = dataclasses.replace(config, out=str(tmp_path / "stopped"))
    for _ in range(5):
        with pytest.raises(Stopped, match="goes on") as stop:
            run(stopped)
        assert stop.value.exit_code == 143
    path, results = run(stopped)
    assert results["steps"] == 5
    assert content(path) == content(whole)


def test_resume_finds_the_unfinished_run(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(config, out=None)
    with pytest.raises(UserError, match="no unfinished run"):
        run(dataclasses.replace(config, resume=True))
    finished, _ = run(config)
    with monkeypatch.context() as patch:
        patch.setattr(Pace, "due", lambda self: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Stopped) as stop:
            run(config)
    assert stop.value.exit_code == 130
    other = dataclasses.replace(config, lr=2e-3)
    with pytest.raises(UserError, match="no unfinished run"):
        run(dataclasses.replace(other, resume=True))
    path, _ = run(dataclasses.replace(config, resume=True))
    assert path == finished.with_name(finished.name + "-2")
    assert "going on after step 1" in capsys.readouterr().err
    assert content(path) == content(finished)
    with pytest.raises(UserError, match=r"lr is 0\.001 there, 0\.002 here"):
        run(dataclasses.replace(other, out=str(path)))


def test_two_processes_in_one_run_are_refused(config, tmp_path):
    directory = RunDirectory.of(resolve(config, open_run_stream(config)))
    with pytest.raises(UserError, match="another process is learning"):
        run(config)
    directory._lock.close()
    run(config)


@pytest.mark.system
@pytest.mark.parametrize("n_kills", [10, pytest.param(100, marks=pytest.mark.long)])
def test_kill_9_at_random_moments_loses_nothing(tmp_path, n_kills):
    words = ["run", "--source", "synthetic:?size=8", "--buffer", "8", "--width", "1", "--fractions", "0.1"]
    words += ["--images", str(120 * n_kills), "--checkpoint-steps", "1", "--probes", "0", "--classifier", "linear"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([sys.executable, "-m", "streamclr", *words, "--out", str(whole)], check=True, capture_output=True)
    assert kill_and_restart(killed, [*words, "--out", str(killed)], n_kills, seed=0) == n_kills
    assert content(killed) == content(whole)
    assert state_sha256(killed) == state_sha256(whole)


KILLED_AS_FILES_MOVE = """
import os, signal, sys
from streamclr.cli.entry import main
n, is_done = int(sys.argv[1]), sys.argv[2] == "done"
def wrapped(real):
    def call(source, target):
        global n
        n -= ".jsonl" in str(source)
        if n == 0 and not is_done:
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target)
        if n == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return call
os.rename, os.replace = wrapped(os.rename), wrapped(os.replace)
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.system
def test_kill_9_as_files_are_full_and_old_lines_are_thinned(tmp_path):
    """The journal moves on twice and is whole, the predictions eight times and are thinned."""
    words = ["run", "--source", "synthetic:?size=8", "--buffer", "8", "--width", "1", "--fractions", "0.1", "--predict"]
    words += ["--images", "4800", "--checkpoint-steps", "10", "--probes", "0", "--classifier", "linear"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([sys.executable, "-m", "streamclr", *words, "--out", str(whole)], check=True, capture_output=True)
    words += ["--log-disk", "256K", "--out", str(killed)]
    for attempt in range(6):
        moment = [str(1 + attempt % 3), ("done", "not done")[attempt // 3]]
        command = [sys.executable, "-c", KILLED_AS_FILES_MOVE, *moment, *words]
        assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    subprocess.run([sys.executable, "-m", "streamclr", *words], check=True, capture_output=True)
    assert state_sha256(killed) == state_sha256(whole)
    first, second = ([(s["number"], s["loss"]) for s in RunDirectory(run).steps()] for run in (killed, whole))
    assert first == second
    assert [number for number, _ in first] == list(range(1, 601))
    assert json.loads((killed / "results.json").read_text())["predictions"] == 4800
    images = [json.loads(line)["image"] for line in lines_of(killed / "predictions.jsonl")]
    assert images == sorted(set(images))
    assert images[-100:] == list(range(4700, 4800))
    assert images[0] == 0
    assert len(images) < 3000
    for name in ("journal.jsonl", "predictions.jsonl"):
        assert all(file.exists() for file in files_of(killed / name)[:2])
        assert sum(file.stat().st_size for file in killed.glob(f"*{name}*")) <= 2**18


def test_what_killed_processes_have_left_half_written_is_deleted(config, tmp_path):
    path, _ = run(config)
    (path / "results.json").unlink()
    left, young = path / ".buffer.safetensors.4321", path / ".labelled.safetensors.17"
    for file in (left, young):
        file.write_bytes(b"half of it")
    os.utime(left, (0, 0))
    run(config)
    assert not left.exists()
    assert young.exists()  # it may be under way in another process


def test_a_stream_without_an_image_leaves_nothing_and_says_so(tmp_path, monkeypatch, capsys):
    """Nobody is told to label what is not there."""
    (tmp_path / "empty").write_bytes(b"")
    out = str(tmp_path / "run")
    with (tmp_path / "empty").open() as nothing, monkeypatch.context() as patched:
        patched.setattr("sys.stdin", nothing)
        with pytest.raises(UserError, match="- has ended, and nothing was learned: there was no image in it"):
            run(RunOptions(source="-", size=16, width=1, recipe="paper", buffer=8, segment=8, out=out))
    assert "label" not in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.system
def test_kill_9_loses_nothing_of_what_is_in_the_loss(tmp_path):
    words = ["run", f"folder:{make_folder(tmp_path / 'images')}?stc=5", "--buffer", "8", "--width", "2"]
    words += ["--images", "240", "--checkpoint-steps", "1", "--probes", "0", "--classifier", "linear"]
    words += ["--loss", "byol?momentum=0.9", "--recipe", "paper", "--fractions", "1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_command = [sys.executable, "-m", "streamclr", *words, "--out", str(whole)]
    subprocess.run(run_command, check=True, capture_output=True)
    assert kill_and_restart(killed, [*words, "--out", str(killed)], 3, seed=7) == 3
    assert state_sha256(killed) == state_sha256(whole)


@pytest.mark.system
@pytest.mark.parametrize(("n_runs", "n_kills"), [(1, 3), pytest.param(10, 10, marks=pytest.mark.long)])
def test_chains_of_kills_on_a_recording(tmp_path, n_runs, n_kills):
    """A clip of a camera, guards and lazy scoring included: every chain ends in the state of the run left alone."""
    pytest.importorskip("av")
    clip = write_clip(tmp_path / "clip.mp4", n=300 * n_kills)
    words = [
        "run",
        "--source",
        f"{clip}?every=2&fps=11",
        "--size",
        "16",
        "--buffer",
        "8",
        "--segment",
        "3",
        "--batch",
        "4",
    ]
    words += ["--policy", "contrast", "--width", "1", "--rescore-every", "3", "--checkpoint-steps", "1"]
    whole = tmp_path / "whole"
    subprocess.run([sys.executable, "-m", "streamclr", *words, "--out", str(whole)], check=True, capture_output=True)
    total = 0
    for i in range(n_runs):
        out = tmp_path / f"chain{i}"
        kills = kill_and_restart(out, [*words, "--out", str(out)], n_kills, seed=1000 * i)
        assert kills == n_kills
        assert state_sha256(out) == state_sha256(whole)
        total += kills
    print(f"{n_runs} chains, {total} kills, all states equal")


def test_after_going_back_the_later_checkpoints_are_forgotten(config, tmp_path, monkeypatch):
    """Else the next start would find them, beside a journal that does not know them."""
    config = dataclasses.replace(config, checkpoint_steps=1)
    whole, _ = run(dataclasses.replace(config, out=str(tmp_path / "whole")))

    def stop_after(n):
        def due(self):
            self.count = getattr(self, "count", 0) + 1
            return signal.raise_signal(signal.SIGTERM) if self.count == n else True

        return due

    with monkeypatch.context() as patch:
        patch.setattr(Pace, "due", stop_after(5))
        with pytest.raises(Stopped):
            run(config)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.numbers() == [3, 4, 5]
    for number in (4, 5):
        (checkpoints.directory / f"{number:010}" / "manifest.json").write_bytes(b"{}")
    with monkeypatch.context() as patch:
        patch.setattr(Pace, "due", stop_after(1))
        with pytest.raises(Stopped):
            run(config)
    assert checkpoints.numbers() == [3, 4]
    path, _ = run(config)
    assert content(path) == content(whole)


def test_a_run_without_a_checkpoint_begins_anew_and_says_so(config, tmp_path, monkeypatch, capsys):
    whole, _ = run(dataclasses.replace(config, out=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        patch.setattr(Pace, "due", lambda self: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped, match="not saved"):
            run(config)
    path, _ = run(config)
    assert "begins anew" in capsys.readouterr().err
    assert content(path) == content(whole)
