"""The ExecuTorch program says what PyTorch says, by ExecuTorch's own runtime."""

import json
import re
import subprocess
import sys

import pytest
import torch

from streamclr.models.export import export
from streamclr.models.formats.executorch import MAX_SIDE, metadata, open_program
from streamclr.models.parity import classify
from support.images import random_images
from support.runs import MOBILENET, classifier_of, made_run

pytestmark = pytest.mark.system

pytest.importorskip("executorch")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return made_run(tmp_path_factory.mktemp("mobile") / "run")


@pytest.fixture(scope="module")
def program(directory):
    return export(directory, "executorch")


@pytest.fixture(scope="module")
def int8_program(directory):
    return export(directory, "executorch", int8=True)


def test_it_says_what_pytorch_says(directory, program):
    file, parity = program
    assert file.name == "run.pte"
    assert parity.problem is None
    assert parity.equal_classes == 1
    run, classifier = open_program(file.read_bytes()), classifier_of(directory)
    for height, width in [(32, 32), (31, 77), (100, 30), (7, 5), (1, 1), (481, 640), (1080, MAX_SIDE)]:
        images = random_images(2, MAX_SIDE)[..., :height, :width].contiguous()
        for found, expected in zip(run(images), classifier(images), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_int8(directory, program, int8_program):
    file, parity = int8_program
    assert file.name == "run-int8.pte"
    assert parity.n_bytes < program[1].n_bytes / 2
    assert parity.equal_classes > 0.7  # random weights on noise: all images look alike to them
    assert (parity.problem is None) == (parity.equal_classes >= 0.99)
    assert parity.looked_again is None
    images = random_images(16, 32, seed=5)
    exact = classify(classifier_of(directory), images)
    assert 1e-4 < (open_program(file.read_bytes())(images)[0] - exact).abs().max() < 0.2


@pytest.mark.parametrize("options", [{"stem": "imagenet"}, MOBILENET])
def test_a_single_pixel_in_the_last_stage(options, tmp_path):
    _, parity = export(made_run(tmp_path / "run", **options), "executorch")
    assert parity.problem is None
    assert parity.equal_classes == 1


def test_int8_of_mobilenet(tmp_path):
    _, parity = export(made_run(tmp_path / "run", **MOBILENET), "executorch", int8=True)
    assert parity.equal_classes > 0.5  # of five classes; random weights on noise


def test_it_tells_about_itself_and_not_of_the_machine(directory, program, int8_program):
    for (file, _), int8 in ((program, False), (int8_program, True)):
        content = file.read_bytes()
        about = json.loads(metadata(content))
        assert about == json.loads(file.with_name(f"{file.name}.json").read_text())["metadata"]
        assert (about["classes"], about["int8"], about["size"]) == (list("abcde"), int8, 32)
        assert not re.search(rb"site-packages|\.py\b|stack_trace", content)
        assert str(directory.path.parent).encode() not in content


def test_larger_pictures_are_refused(program):
    with pytest.raises(RuntimeError):
        open_program(program[0].read_bytes())(random_images(1, 8).repeat(1, 1, 1, MAX_SIDE // 8 + 1))


def test_the_command_says_nothing_of_what_the_exporters_say(directory, tmp_path):
    command = [sys.executable, "-m", "streamclr", "export", str(directory.path), "--format", "executorch"]
    out = tmp_path / "again.pte"
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.endswith(f"classifier: {out}\n")
