import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from streamclr import UserError
from streamclr.checkpoint import load_tensors
from streamclr.run import RunConfig, RunDirectory, make_learner, new_directory, open_run_stream, resolved, run


def make_folder(root, n=20, size=16, classes=("ant", "bee")):
    """Two classes of noise around two colours."""
    rng = np.random.default_rng(0)
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(n):
            image = rng.integers(0, 100, (size, size, 3), np.uint8)
            image[..., c] += 120
            Image.fromarray(image).save(root / name / f"{i}.png")
    return root


@pytest.fixture
def config(tmp_path):
    folder = make_folder(tmp_path / "images")
    return RunConfig(
        source=f"folder:{folder}", buffer=8, width=2, lr=1e-3, stc=5, images=50, probes=2, fractions="0.1,1", seed=4,
        out=str(tmp_path / "run"),
    )  # fmt: skip


def test_a_run_leaves_everything_behind(config, tmp_path):
    path, results = run(config)
    assert path == tmp_path / "run"
    names = {"config.json", "journal.jsonl", "model.safetensors", "classifier.safetensors", "classes.json"}
    assert {p.name for p in path.iterdir()} == names | {"buffer.safetensors", "results.json"}
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
    model = directory.load_model()
    head, classes = directory.load_classifier()
    assert classes == ["ant", "bee"]
    source = open_run_stream(directory.config).source
    from streamclr.classifier import Accuracy, extract

    predicted = head(extract(model, source.test)).argmax(1)
    assert Accuracy.of(predicted, source.test.labels, 2).top1 == results["labels"]["1.0"]["accuracy"]
    small, _ = directory.load_classifier(0.1)
    assert not torch.equal(small.linear.weight, head.linear.weight)
    with pytest.raises(UserError, match=r"no classifier for the fraction 0\.5: use 0\.1, 1\.0"):
        directory.load_classifier(0.5)


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
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match="exists already"):
        run(config)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    monkeypatch.chdir(tmp_path)
    paths = [run(dataclasses.replace(config, out=None))[0] for _ in range(2)]
    assert [str(p) for p in paths] == ["runs/folder-contrast", "runs/folder-contrast-2"]


def test_an_unlabelled_stream_has_no_classifier(tmp_path):
    folder = make_folder(tmp_path / "images") / "ant"
    path, results = run(RunConfig(source=f"folder:{folder}", buffer=4, width=2, out=str(tmp_path / "run")))
    assert results["labels"] == {}
    assert results["images"] == 20
    with pytest.raises(UserError, match="has no classifier"):
        RunDirectory.existing(path).load_classifier()


def test_supervised_baselines(config):
    _, results = run(dataclasses.replace(config, supervised=True, fractions="1"))
    assert results["supervised"]["1.0"].keys() == {"end_to_end", "untrained_encoder"}


def test_fine_tuning_starts_from_the_given_weights(config, tmp_path):
    path, _ = run(config)
    tuned = dataclasses.replace(config, init=str(path / "model.safetensors"), stem="small")
    saved = load_tensors(path / "model.safetensors")["encoder.conv1.weight"]
    assert torch.equal(make_learner(tuned).encoder.conv1.weight, saved)
    with pytest.raises(UserError, match="does not fit"):
        make_learner(dataclasses.replace(tuned, width=4))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"images": 5}, "5 images are asked for, before one batch of 8"),
        ({"buffer": 100, "stc": None, "images": None}, "ends after 40 images, before one batch of 100"),
        ({"stc": None, "images": 100}, "ends after 40 images, before the 100 asked for: write passes=3"),
        ({"images": 50, "epochs": 2}, "both --images and --epochs"),
        ({"source": "synthetic:?stc=bogus", "stc": None}, "'bogus': use a whole number"),
        ({"stem": ""}, "stem is ''"),
        ({"init": ""}, "no file"),
        ({"buffer": 10**15, "batch": 8, "segment": 8, "device": "meta"}, "no device 'meta'"),
        ({"images": 0}, "0 images are asked for"),
        ({"images": None, "epochs": 0.0}, "epochs is 0"),
        ({"images": None, "epochs": float("nan")}, "epochs is nan"),
        ({"batch": 0}, "batch_size is 0"),
        ({"updates": 0}, "updates_per_segment is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"device": "tpu9"}, "no device 'tpu9'"),
        ({"lr": float("nan")}, r"lr \(nan\)"),
        ({"segment": 0}, "segment is 0"),
        ({"buffer": 1}, "buffer_size is 1"),
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
    ],
)
def test_bad_configurations_leave_nothing_behind(config, tmp_path, change, told):
    with pytest.raises(UserError, match=told) as error:
        run(dataclasses.replace(config, **change))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_leaves_no_results(config, tmp_path):
    with pytest.raises(UserError, match="the loss is"):
        run(dataclasses.replace(config, lr=1e30))
    assert not (tmp_path / "run" / "results.json").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_options_in_the_source_are_used_and_recorded(config):
    asked = dataclasses.replace(config, source=config.source + "?stc=4&size=12", stc=None, size=None)
    source = open_run_stream(asked).source
    assert (source.stc, source.images(torch.tensor([0])).shape[-1]) == (4, 12)


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


def test_a_run_that_fails_before_its_first_step_leaves_nothing(config, tmp_path):
    for image in (tmp_path / "images" / "ant").iterdir():
        if image.name != "0.png":
            image.write_bytes(image.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot read the image"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_epochs_are_passes_over_the_dataset(config):
    for epochs, images in ((None, 40), (2, 80), (0.5, 20)):
        asked = dataclasses.replace(config, images=None, epochs=epochs)
        assert resolved(asked, open_run_stream(asked)).images == images


def test_a_foreign_or_damaged_run_directory_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        RunDirectory.existing(tmp_path)
    (tmp_path / "config.json").write_text('{"sauce": 1}')
    with pytest.raises(UserError, match="sauce"):
        _ = RunDirectory.existing(tmp_path).config
    for content in ("[]", '{"width": "a"}'):
        (tmp_path / "config.json").write_text(content)
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
