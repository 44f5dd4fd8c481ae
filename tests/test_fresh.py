"""The package as somebody else gets it: installed, not editable, in an environment that has what was asked for."""

import csv
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.camera import write_two_scenes

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[1]
# What only developers, the pages, video, MQTT and SVHN need, by the names under which they are imported.
OTHERS = (
    "av fastapi httpx hypothesis mypy paho playwright pytest ruff schemathesis scipy starlette uvicorn xdist".split()
)
PRESENT = f"from importlib.util import find_spec; print(*filter(find_spec, {OTHERS}))"

LOAD = """
import sys
import torch
from streamclr import from_pretrained

model = from_pretrained(sys.argv[1])
probabilities, features = model(torch.randint(256, (3, 3, 50, 70), dtype=torch.uint8))
assert len(model.classes) == probabilities.shape[1] == 10
assert torch.allclose(probabilities.sum(1), torch.ones(3), atol=1e-5)
print(model.card.source, model.card.images, *features.shape)
"""

ONNX = """
import sys
import numpy as np
import onnxruntime
from streamclr import from_pretrained

images = np.random.default_rng(0).integers(0, 256, (5, 3, 40, 60), dtype=np.uint8)
session = onnxruntime.InferenceSession(sys.argv[2], providers=["CPUExecutionProvider"])
difference = from_pretrained(sys.argv[1])(images)[0].numpy() - session.run(["probabilities"], {"images": images})[0]
assert abs(difference).max() < 1e-4
"""


def call(*words, cwd, **environment):
    """A command whose failure is told with what it said."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STREAMCLR"))}
    clean |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd / ".cache"), **environment}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What a build may see; a copy, since a build leaves files behind, which the next would take for its own."""
    place = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    words = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(place / "index"),
        "setuptools",
    ]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no package index here, from which setuptools and the packages of an extra could be had")
    return place


def walk(python, place, formats, **environment):
    """From a stream to a classifier that somebody else loads, in an empty directory."""

    def streamclr(*words):
        return call(python, "-m", "streamclr", *words, cwd=place, **environment)

    options = ["--images", 64, "--buffer", 32, "--width", 2, "--probes", 0, "--fractions", 0.01]
    options += ["--classifier", "linear"]
    streamclr("run", "--source", "synthetic:?size=16", "--out", "run", *options)
    for name in formats:
        streamclr("export", "run", "--format", name)
        assert json.loads((place / "run" / f"{formats[name]}.json").read_text())["matches"]
    lines = streamclr("predict", "run", "--source", "synthetic:", "--images", 4).splitlines()
    assert [json.loads(line)["image"] for line in lines] == [0, 1, 2, 3]
    for exported in formats.values():
        again = streamclr("predict", f"run/{exported}", "--source", "synthetic:", "--images", 4).splitlines()
        assert [json.loads(line)["class"] for line in again] == [json.loads(line)["class"] for line in lines]
    told = call(python, "-c", LOAD, "run/run-pretrained", cwd=place, **environment)
    assert told == "the built-in stream 64 3 16\n"
    if "onnx" in formats:
        call(python, "-c", ONNX, "run/run-pretrained", "run/run.onnx", cwd=place, **environment)


def test_what_is_installed_is_whole_and_needs_none_of_the_others(source, tmp_path):
    """Without its dependencies, which are those of this environment but for the packages that are hidden."""
    site, place = tmp_path / "site", tmp_path / "empty"
    place.mkdir()
    call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, source, cwd=tmp_path)

    def files(path):
        return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and file.suffix != ".pyc"}

    assert files(site / "streamclr") == files(source / "src" / "streamclr")
    (site / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = staticmethod(\n"
        f"    lambda name, *rest: None if name.partition('.')[0] in {OTHERS} else find(name, *rest)\n"
        ")\n"
    )
    assert call(sys.executable, "-c", PRESENT, cwd=place, PYTHONPATH=str(site)).split() == []
    formats = {"pretrained": "run-pretrained"} | ({"onnx": "run.onnx"} if find_spec("onnxscript") else {})
    walk(sys.executable, place, formats, PYTHONPATH=str(site))


def test_a_wheel_outside_a_clone_goes_from_a_clip_to_predictions(tmp_path):
    """As `pipx` would install it: a wheel in an environment of its own, which sees the other packages of this one."""
    pytest.importorskip("av")
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("setuptools 77 or newer is needed to build a wheel without a package index")
    source, place, venv = (tmp_path / name for name in ("source", "empty", "venv"))
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    place.mkdir()
    build = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path, source)
    call(sys.executable, "-m", "pip", "wheel", "--quiet", *build, cwd=tmp_path)
    (wheel,) = tmp_path.glob("streamclr-*.whl")
    call(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python, streamclr = venv / "bin" / "python", venv / "bin" / "streamclr"
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    imported = call(python, "-c", "import streamclr; print(streamclr.__file__)", cwd=place)
    assert Path(imported.strip()).is_relative_to(site)
    hint = "from streamclr.base.extras import how_to_install; print(how_to_install('serve'))"
    assert call(python, "-c", hint, cwd=place) == "pip install fastapi segno uvicorn\n"  # there are no constraints here

    write_two_scenes(place / "clip.mp4")
    said = call(streamclr, "run", "clip.mp4", "--init", "random", "--out", "run", cwd=place)
    assert said.endswith("\nnext: streamclr label run (about 2 minutes)\n")
    call(streamclr, "label", "export", "run", "questions.csv", cwd=place)
    with (place / "questions.csv").open(newline="") as file:
        questions = list(csv.DictReader(file))
    rows = [(one["key"], "disc" if int(one["arrival"]) < 60 else "square") for one in questions]
    (place / "answers.csv").write_text("key,label\n" + "".join(f"{key},{name}\n" for key, name in rows))
    told = call(streamclr, "label", "import", "run", "answers.csv", cwd=place)
    assert f"{len(rows)} new answers" in told
    lines = call(streamclr, "predict", "run", "--source", "clip.mp4", cwd=place).splitlines()
    found = [json.loads(line)["class"] for line in lines]
    truth = ["disc"] * 60 + ["square"] * 60
    assert sum(a == b for a, b in zip(found, truth, strict=True)) >= 114  # 95 %


@pytest.mark.long
def test_a_fresh_environment_with_the_export_runtime_alone(source, tmp_path):
    place = tmp_path / "empty"
    place.mkdir()
    call(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = source / "constraints.txt"
    call(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{source}[export]", cwd=tmp_path)
    assert call(python, "-c", PRESENT, cwd=place).split() == []
    assert (tmp_path / "venv" / "bin" / "streamclr").exists()
    walk(python, place, {"pretrained": "run-pretrained", "onnx": "run.onnx"})
