"""The directory for the hub: the same answers wherever it is loaded, and one line for whatever is wrong with it."""

import dataclasses
import json
import math
import os
import re
import shutil
import stat
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import nn

from streamclr import Card, Learner, Pretrained, UserError, from_pretrained, resnet18, save_pretrained
from streamclr.base.files import sha256_of, write_json
from streamclr.classifier import Head
from streamclr.cli.entry import main
from streamclr.encoders.architecture import Architecture
from streamclr.encoders.inference import infer
from streamclr.encoders.mobilenet import mobilenet_v2
from streamclr.encoders.projection import ContrastiveModel
from streamclr.models.export import export, kind_of
from streamclr.models.heads import Heads
from streamclr.runs.assemble import make_learner
from streamclr.score import contrast_score
from support.images import random_images
from support.runs import made_run, run_plan

CLASSES = ["Äpfel", "猫 & <b>", "x,y"]
CARD = Card(
    "a camera", "contrast", 256, 12_800, 50, "the finished encoder", 0.8125, "16 test images, classifier from 9 labels"
)


def pictures(n, size, seed=0):
    """Noise under light of many colours: to an untrained encoder noise alone is all alike."""
    light = torch.rand(n, 3, 1, 1, generator=torch.Generator().manual_seed(seed))
    return (random_images(n, size, seed) * light).byte()


def made(
    width=4, size=24, encoder="resnet18", stem="small", norm="batch", classes=CLASSES, card=CARD, projection="plain"
):
    """A model that has seen a few images, and a classifier that standardises their features."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so that two of them are the same, bit by bit
    model = Architecture(encoder, width, stem, norm, projection).make_model()
    for seed in range(2):
        model(pictures(8, size, seed) / 255)
    head = Head(model.n_features, len(classes))
    head.fit_scale(infer(model, pictures(64, size), model.features))
    nn.init.normal_(head.linear.weight, std=0.3)
    nn.init.normal_(head.linear.bias, std=0.3)
    return Pretrained(model, head, classes, size, card)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "forest"
    save_pretrained(made(), path)
    return path


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "forest")


# ----------------------------------------------------------------------------------------------------------------------
# What was saved is what is loaded.


def test_round_trip(saved, tmp_path):
    model, loaded = made(), from_pretrained(saved)
    assert (loaded.classes, loaded.size, loaded.card) == (CLASSES, 24, CARD)
    assert loaded.architecture == ("resnet18", 4, "small", "batch", "plain")
    for height, width in [(24, 24), (61, 40), (9, 100)]:
        images = pictures(70, 100)[..., :height, :width].contiguous()
        probabilities, features = loaded(images)
        assert torch.equal(features, model(images)[1])
        torch.testing.assert_close(probabilities, model(images)[0], atol=1e-6, rtol=0)
        assert torch.equal(probabilities, loaded(images.numpy())[0])
    images = random_images(16, 24)
    assert torch.equal(contrast_score(loaded.model, images), contrast_score(model.model, images))
    save_pretrained(loaded, tmp_path / "again")
    for file in saved.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("encoder", ["resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize(("stem", "norm"), [("small", "group"), ("half", "batch"), ("imagenet", "group")])
def test_every_encoder(encoder, stem, norm, tmp_path):
    check_round_trip(made(2, 24, encoder, stem, norm), tmp_path)


def test_mobilenet_with_a_projection_head_that_has_batch_norm(tmp_path):
    model = made(None, 32, "mobilenet_v2", None, None, projection="batchnorm")
    assert check_round_trip(model, tmp_path).architecture == ("mobilenet_v2", None, None, None, "batchnorm")


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_compact(norm, tmp_path):
    loaded = check_round_trip(made(6, 32, "compact", None, norm, projection="batchnorm"), tmp_path)
    assert loaded.architecture == ("compact", 6, None, norm, "batchnorm")
    assert "streamclr.compact(width)" in (tmp_path / "m" / "README.md").read_text()


def check_round_trip(model, tmp_path):
    save_pretrained(model, tmp_path / "m")
    loaded = from_pretrained(tmp_path / "m")
    assert loaded.architecture == model.architecture
    images = random_images(5, 30)
    assert torch.equal(loaded(images)[1], model(images)[1])
    assert torch.equal(contrast_score(loaded.model, images), contrast_score(model.model, images))
    return loaded


def test_loading_draws_no_random_numbers(saved):
    before = torch.get_rng_state()
    from_pretrained(saved)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_classifier_is_folded():
    """Features far from zero and with little spread, where folding could lose digits."""
    head = Head(32, 5)
    generator = torch.Generator().manual_seed(0)
    features = 3 + 0.3 * torch.rand(200, 32, generator=generator)
    features[:, 7] = 0.25  # a feature that never moves
    head.fit_scale(features)
    nn.init.normal_(head.linear.weight, generator=generator)
    with torch.no_grad():
        head.linear.weight[:, 7] = 0  # nothing can have been learned from it
    from streamclr.models.pretrained import folded

    torch.testing.assert_close(folded(head)(features), head(features), atol=1e-4, rtol=0)


def test_going_on_to_learn(saved, tmp_path):
    loaded = from_pretrained(saved)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    learner = Learner(loaded.model, buffer=16, lr=1e-3)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.model.state_dict().items())
    learner.learn_many(random_images(16, 24))
    moved = {
        name.split(".")[0]
        for name, tensor in learner.model.state_dict().items()
        if not torch.equal(before[name], tensor)
    }
    assert moved == {"encoder", "head"}
    assert loaded(random_images(2, 24))[0].shape == (2, 3)


def test_a_learner_is_not_disturbed():
    """What is saved is its model at this moment, and nothing of it changes by that."""
    learner = Learner(resnet18(width=2), buffer=8)
    learner.learn_many(pictures(8, 16))
    learner.encoder.conv1.requires_grad_(False)
    taken = Pretrained(learner.model, Head(16, 2), ["a", "b"], 16)
    assert [p.requires_grad for p in learner.model.parameters()].count(False) == 1
    assert learner.model.training
    before = taken(pictures(4, 16))[1]
    learner.learn_many(pictures(8, 16, seed=1))
    assert torch.equal(taken(pictures(4, 16))[1], before)


def test_a_run_starts_from_it(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learner = make_learner(run_plan(init=str(saved), width=4, stem="small"))
    ours, theirs = learner.model.state_dict(), from_pretrained(saved).model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    learner = make_learner(run_plan(init=str(saved / "model.safetensors"), width=4, stem="small"))
    assert torch.equal(learner.model.encoder.conv1.weight, theirs["encoder.conv1.weight"])
    words = ["run", "--recipe", "paper", "--images", "64", "--buffer", "16", "--probes", "0", "--init", str(saved)]
    assert main([*words, "--width", "8", "--stem", "half"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("not a resnet18 of width 8 with the half stem and batch norm: give --width 4 --stem small")
    assert not list(tmp_path.iterdir())


def test_only_what_can_be_saved():
    head = Head(8, 2)
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1))
    with pytest.raises(UserError, match="the encoder is a Sequential: use resnet18"):
        Pretrained(ContrastiveModel(encoder), head, ["a", "b"], 24)
    for classes in (["a"], ["a", "a"]):
        with pytest.raises(UserError, match="1 different class names for 2 classes"):
            Pretrained(ContrastiveModel(resnet18(1)), head, classes, 24)
    with pytest.raises(UserError, match=r"the batch is torch\.float32"):
        made()(torch.zeros(1, 3, 8, 8))


# ----------------------------------------------------------------------------------------------------------------------
# The layout.


def test_config(saved):
    config = json.loads((saved / "config.json").read_text())
    assert (config["library_name"], config["format_version"]) == ("streamclr", 3)
    assert config["id2label"] == {"0": "Äpfel", "1": "猫 & <b>", "2": "x,y"}
    assert config["label2id"] == {"Äpfel": 0, "猫 & <b>": 1, "x,y": 2}
    assert config["image_mean"] == [0.485, 0.456, 0.406]
    assert config["card"] == dataclasses.asdict(CARD)
    assert config["sha256"] == sha256_of(saved / "model.safetensors")
    assert sorted(file.name for file in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert stat.S_IMODE(saved.stat().st_mode) == 0o755
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o644 for file in saved.iterdir())


class Block(nn.Module):
    """torchvision's BasicBlock, by its documentation."""

    def __init__(self, n_in, n_out, stride, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = norm(n_out)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = norm(n_out)
        self.downsample = None
        if stride > 1 or n_in != n_out:
            self.downsample = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), norm(n_out))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """torchvision's resnet18: same names, same structure."""

    def __init__(self, num_classes=1000, norm_layer=nn.BatchNorm2d):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = norm_layer(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [64, 64, 128, 256, 512]
        for i in range(4):
            blocks = (
                Block(widths[i], widths[i + 1], 2 if i else 1, norm_layer),
                Block(widths[i + 1], widths[i + 1], 1, norm_layer),
            )
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def run_the_card(monkeypatch, **models):
    """Run the code on the card in the working directory, as it stands there, with these models as torchvision's."""
    (code,) = re.findall("```python\n(import torch\n.*?)```", Path("README.md").read_text(), re.DOTALL)
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(models=types.SimpleNamespace(**models)))
    found = {"images": pictures(4, 32)}
    with torch.no_grad():
        exec(code, found)
    return found


@pytest.mark.parametrize(
    ("stem", "norm"), [("imagenet", "batch"), ("small", "batch"), ("half", "batch"), ("imagenet", "group")]
)
def test_torchvisions_definition_takes_it(stem, norm, tmp_path, monkeypatch):
    """By the code on the card, as it stands there."""
    model = made(64, 32, stem=stem, norm=norm)
    save_pretrained(model, tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    found = run_the_card(monkeypatch, resnet18=ResNet18)
    loaded = from_pretrained(".")
    torch.testing.assert_close(found["logits"].softmax(1), loaded(found["images"])[0], atol=1e-4, rtol=0)
    with torch.no_grad():  # without rounding it is the same function
        images = ((found["images"] / 255 - found["mean"]) / found["std"]).double()
        exact = loaded.classifier.double().head(loaded.encoder.eval()(images))
        torch.testing.assert_close(found["net"].double()(images), exact, atol=1e-9, rtol=1e-9)
    # Strictly, without the two lines, where there is nothing to change.
    weights = {n: t for n, t in load_file("model.safetensors").items() if not n.startswith("projection.")}
    if (stem, norm) == ("imagenet", "batch"):
        ResNet18(num_classes=3).load_state_dict(weights, strict=True)
    elif norm == "batch":
        with pytest.raises(RuntimeError, match=r"conv1\.weight"):
            ResNet18(num_classes=3).load_state_dict(weights, strict=True)


class TorchvisionsMobileNetV2(nn.Module):
    """As torchvision defines it: the same `features`, then pooling, and dropout before the linear layer."""

    def __init__(self, num_classes):
        super().__init__()
        self.features = mobilenet_v2().features
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, x):
        return self.classifier(nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1)).flatten(1))


def test_torchvisions_mobilenet_takes_it(tmp_path, monkeypatch):
    """By the code on the card, as it stands there."""
    save_pretrained(made(None, 32, "mobilenet_v2", None, None), tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    found = run_the_card(monkeypatch, mobilenet_v2=TorchvisionsMobileNetV2)
    with torch.no_grad():
        loaded = from_pretrained(".")
        images = ((found["images"] / 255 - found["mean"]) / found["std"]).double()
        exact = loaded.classifier.double().head(loaded.encoder.eval()(images))
        torch.testing.assert_close(found["net"].double()(images), exact, atol=1e-9, rtol=1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# Saving: whole or not at all, over nothing.


def test_nothing_is_overwritten(saved, tmp_path):
    model = made()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for taken in ("file", "full"):
        with pytest.raises(UserError, match=f"{taken} exists already"):
            save_pretrained(model, tmp_path / taken)
    with pytest.raises(UserError, match="no directory"):
        save_pretrained(model, tmp_path / "none" / "m")
    (tmp_path / "empty").mkdir()
    save_pretrained(model, tmp_path / "empty")
    assert from_pretrained(tmp_path / "empty").classes == CLASSES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


def test_nothing_is_saved_that_could_not_be_loaded(tmp_path):
    broken = made()
    with torch.no_grad():
        broken.encoder.bn1.weight[0] = math.nan
    for model, told in [
        (made(card=dataclasses.replace(CARD, accuracy=81.25)), "config.json has .* for card"),
        (made(card=Card(accuracy=math.nan)), "Out of range float values"),
        (Pretrained(made().model, made().classifier.head, CLASSES, 5000), "config.json has 5000 for image_size"),
        (broken, r"model\.safetensors is damaged: bn1\.weight has values that are not finite"),
    ]:
        with pytest.raises(UserError, match=f"^cannot save {re.escape(str(tmp_path / 'm'))}: {told}"):
            save_pretrained(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    real, n_calls = os.write, [0]

    def full(*args):
        n_calls[0] += 1
        if n_calls[0] == 2:  # config.json, after the weights
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr("streamclr.records.checkpoints.os.write", full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(made(), tmp_path / "m")
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------------------
# Loading: whatever is wrong is one line that names the file.


def complaint(path):
    with pytest.raises(UserError) as error:
        from_pretrained(path)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 1000
    return text


def edited(path, **changes):
    config = json.loads((path / "config.json").read_text())
    for name, value in changes.items():
        if value is ...:
            del config[name]
        else:
            config[name] = value
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format_version": 4}, "has format_version 4, and this streamclr reads 3: install a newer one"),
        ({"format_version": 10**30}, "install a newer one"),
        ({"format_version": True}, "has True for format_version"),
        ({"format_version": ...}, "lacks format_version"),
        ({"library_name": "timm"}, "is no model of streamclr, library_name is 'timm'"),
        ({"library_name": ...}, "streamclr export RUN --format pretrained"),
        ({"width": 10**9}, "has 1000000000 for width: it must be null, or a whole number, 1 to 16384"),
        ({"width": 2**14}, "model.safetensors does not fit: bn1.bias is [4] of F32, not [16384] of F32"),
        ({"width": 0}, "has 0 for width"),
        ({"width": 4.0}, "has 4.0 for width"),
        ({"encoder": "resnet50"}, "model.safetensors does not fit"),
        ({"encoder": ["resnet18"]}, "has ['resnet18'] for encoder: it must be resnet18 or resnet34 or resnet50"),
        ({"stem": "imagenet"}, "conv1.weight is [4, 3, 3, 3] of F32, not [4, 3, 7, 7] of F32"),
        ({"norm": "layer"}, "has 'layer' for norm"),
        ({"norm": "group"}, "bn1.num_batches_tracked is not known"),
        ({"projection_size": 64}, "projection.2.weight is [128, 32] of F32, not [64, 32] of F32"),
        ({"image_size": 4097}, "has 4097 for image_size"),
        ({"image_mean": [0, 0]}, "for image_mean: it must be three numbers"),
        ({"image_mean": [0, 0, 1e300]}, "for image_mean"),
        ({"image_std": [0, 1, 1]}, "has [0, 1, 1] for image_std"),
        ({"id2label": {}}, "for id2label"),
        ({"id2label": ["a"]}, "for id2label"),
        ({"id2label": {"1": "a", "0": "b"}}, "for id2label"),
        ({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}, "fc.bias is [3] of F32, not [2] of F32"),
        ({"id2label": {"0": "a", "1": "b", "2": "a"}}, "label2id is not id2label the other way round"),
        ({"card": None}, "has None for card"),
        ({"card": {}}, "for card: it must be an object of source, policy"),
        ({"card": dataclasses.asdict(CARD) | {"accuracy": 81.25}}, "for card"),
        ({"card": dataclasses.asdict(CARD) | {"images": "many"}}, "for card"),
        ({"card": dataclasses.asdict(CARD) | {"steps": True}}, "for card"),
        ({"sha256": "0" * 64}, "its SHA-256 differs"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "has keys that are not known: ['auto_map']"),
        ({"torch": "x" * 10**6, "stem": "x" * 10**6}, "for stem: it must be null, or small or half or imagenet"),
    ],
)
def test_a_wrong_config(copied, changes, told):
    assert told in complaint(edited(copied, **changes))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "is no model of streamclr"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"library_name": "streamclr", "width": NaN}', "NaN is no number"),
        (b'{"library_name": "streamclr", "width": -Infinity}', "-Infinity is no number"),
        (b'{"width": ' + b"9" * 10_000 + b"}", "cannot be read"),
        (b" " * (2**24 + 1), "it has 16777217 bytes"),
    ],
)
def test_what_is_no_config(copied, content, told):
    (copied / "config.json").write_bytes(content)
    assert told in complaint(copied)


def test_other_directories(copied, tmp_path):
    assert "holds no model: it has no config.json" in complaint(tmp_path / "none")
    assert "config.json cannot be read" in complaint(_with(tmp_path, "pickle", "config.json", b"\x80\x04K\x01."))
    run = made_run(tmp_path / "run")
    assert "streamclr export RUN --format pretrained" in complaint(run.path)
    (copied / "model.safetensors").unlink()
    assert "no file" in complaint(copied)
    (copied / "model.safetensors").mkdir()
    assert "no file" in complaint(copied)


def _with(place, name, file, content):
    (place / name).mkdir()
    (place / name / file).write_bytes(content)
    return place / name


def test_many_classes_take_no_memory(copied):
    """A config that is small enough to be read; the file of weights has three."""
    names = {str(i): str(i) for i in range(150_000)}
    edited(copied, id2label=names, label2id={name: int(name) for name in names})
    assert "fc.bias is [3] of F32, not [150000] of F32" in complaint(copied)


def resaved(path, change):
    """The weights with a change, as somebody would who also puts the checksum right."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return edited(path, sha256=sha256_of(path / "model.safetensors"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("fc.bias"), "fc.bias is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is not known"),
        (lambda t: t.update({"fc.bias": torch.zeros(4)}), "fc.bias is [4] of F32, not [3] of F32"),
        (lambda t: t.update({"fc.bias": torch.zeros(3).half()}), "fc.bias is [3] of F16, not [3] of F32"),
        (lambda t: t.update({"fc.bias": torch.tensor([0, math.nan, 0])}), "fc.bias has values that are not finite"),
        (lambda t: t["layer4.1.conv2.weight"].view(-1)[7:8].fill_(-math.inf), "layer4.1.conv2.weight has values"),
        (lambda t: t.clear(), "and 123 more"),
    ],
)
def test_wrong_weights(copied, change, told):
    line = complaint(resaved(copied, change))
    assert told in line
    assert "model.safetensors" in line


def test_other_peoples_weights(copied):
    (copied / "model.safetensors").write_bytes(save({f"bert.layer.{i}": torch.zeros(2) for i in range(500)}))
    assert re.search(r"model\.safetensors does not fit: .*; and \d+ more$", complaint(copied))
    for content in (b"", b"\x80\x04K\x01.", b"PK\x03\x04" + b"\0" * 100, b"\xff" * 64, b"\0" * 8):
        (copied / "model.safetensors").write_bytes(content)
        assert "model.safetensors is not a whole safetensors file" in complaint(copied)


def test_every_cut_and_every_flipped_bit_of_the_weights_is_found(copied):
    file = copied / "model.safetensors"
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*rng.integers(0, header, 50), *rng.integers(header, len(whole), 30), 0, 7, 8, len(whole) - 1]
    for place in map(int, places):
        file.write_bytes(whole[:place])
        assert "model.safetensors" in complaint(copied)
        flipped = bytes([whole[place] ^ (1 << int(rng.integers(8)))])
        file.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        assert "model.safetensors" in complaint(copied)
    file.write_bytes(whole + b"\0")
    assert "model.safetensors" in complaint(copied)
    file.write_bytes(whole)
    from_pretrained(copied)


def test_a_damaged_config_is_one_line_or_no_matter(copied):
    """A letter of a class name may flip unseen, for people may edit this file. No other exception comes of it."""
    file = copied / "config.json"
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    refused = []
    for place in map(int, rng.integers(0, len(whole), 150)):
        flipped = bytes([whole[place] ^ (1 << int(rng.integers(8)))])
        for damaged in (whole[:place], whole[:place] + flipped + whole[place + 1 :]):
            if damaged.rstrip() == whole.rstrip():
                continue
            file.write_bytes(damaged)
            try:
                from_pretrained(copied)
            except UserError as error:
                refused.append(str(error))
    assert len(refused) > 150
    assert all(str(copied) in line and "\n" not in line for line in refused)


# ----------------------------------------------------------------------------------------------------------------------
# The command.


def test_export(tmp_path, capsys):
    directory = made_run(tmp_path / "run", width=8)
    assert main(["export", str(directory.path), "--format", "pretrained"]) == 0
    path = directory.path / "run-pretrained"
    assert capsys.readouterr().out.endswith(f"classifier: {path}\n")
    found = json.loads((directory.path / "run-pretrained.json").read_text())
    assert found["matches"] is True
    assert found["largest_difference"] < 1e-5  # float32: the order of sums is the processor's (1.4e-6 seen)
    assert found["bytes"] == sum(file.stat().st_size for file in path.iterdir())
    loaded, images = from_pretrained(path), random_images(48, 32)
    torch.testing.assert_close(loaded(images)[0], Heads(directory).load()(images)[0], atol=1e-5, rtol=0)
    assert loaded.card == Card("the built-in stream", "contrast", 256, 48, None, "the finished encoder", None, None)
    for words, told in [
        ([], "run-pretrained exists already"),
        (["--int8"], "pretrained has no int8 here: use --int8 with onnx or executorch"),
        (["--out", str(tmp_path / "no" / "m")], "no directory"),
    ]:
        assert main(["export", str(directory.path), "--format", "pretrained", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("rtsp://user:hunter2@camera.local:554/1#fps=5", "a camera"),
        ("http://10.0.0.7/video?token=hunter2", "a camera"),
        ("camera:/dev/video0", "a camera"),
        ("folder:/home/ann/forest?size=24", "a folder of pictures"),
        ("watch:/home/ann/forest", "a folder of pictures"),
        ("video:/home/ann/dog.mp4", "a recording"),
        ("list:/home/ann/cameras.txt", "several cameras or recordings"),
        ("imagenet:/home/ann/imagenet", "ImageNet"),
        ("cifar10:/home/ann/cifar?stc=500", "cifar10"),
        ("-", "pictures on standard input"),
    ],
)
def test_nothing_of_the_source_but_its_kind(source, kind, tmp_path):
    assert kind_of(source) == kind
    directory = made_run(tmp_path / "run", width=1)
    config = dataclasses.asdict(directory.config) | {"source": source}
    write_json(directory.path / "config.json", config)
    path, _ = export(directory, "pretrained", out=tmp_path / "m")
    for file in path.iterdir():
        assert not re.search(rb"hunter2|camera\.local|10\.0\.0|/home|/dev|ann\b", file.read_bytes())
        assert str(tmp_path).encode() not in file.read_bytes()
