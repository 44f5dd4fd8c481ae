"""The exported file is the classifier: same answers at any size, nothing of the machine in it, nothing hidden."""

import dataclasses
import json
import re
import resource
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from streamclr import UserError
from streamclr.cli.entry import main
from streamclr.encoders.inference import infer
from streamclr.encoders.preprocessing import resampling, scaled
from streamclr.models import export as export_module
from streamclr.models.export import FORMATS, describe, export
from streamclr.models.formats.onnx_file import make_onnx
from streamclr.models.formats.quantise import Calibration
from streamclr.models.formats.torch_program import make_torch, open_torch
from streamclr.models.heads import Heads
from streamclr.models.parity import Parity, compare
from streamclr.models.versions import Versions
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.run import run
from support.images import middle_square, random_images
from support.labelling import make_version
from support.runs import COMPACT, MOBILENET, classifier_of, made_run

onnx = pytest.importorskip("onnx")


@pytest.mark.system
def test_the_served_version_is_exported_with_its_own_encoder(tmp_path):
    """The one that a rollback pinned, not that of the newest encoder."""
    directory = made_run(tmp_path / "run", size=16)
    ours = Versions(directory)
    for seed in (1, 2):
        ours.take(make_version(directory, seed), ours.current)
    now, _ = ours.rollback()
    file, parity = export(directory, "torch", served=True)
    assert parity.problem is None
    program, images = open_torch(file.read_bytes()), random_images(6, 16, seed=3)
    expected = now.probabilities(images)
    assert torch.allclose(program(images)[0], expected, atol=1e-5)
    about = json.loads(file.with_name(f"{file.name}.json").read_text())["metadata"]
    assert about["state"] == "the encoder of step 7"
    assert about["accuracy"] == {"value": 0.8, "measured": "5 labels held back"}
    assert about["classes"] == ["red", "green", "blue"]
    with pytest.raises(UserError, match="both --served and --fraction"):
        export(directory, "torch", fraction=1.0, served=True)
    with pytest.raises(UserError, match="serves no version: run with --predict"):
        export(made_run(tmp_path / "other", size=16), "torch", served=True)


CLASSES = ["Äpfel", "猫 & <b>", "x,y"]
SIZE = 24


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A real run on a folder of three classes."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("export")
    rng = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (place / "images" / name).mkdir(parents=True)
        for number in range(40):
            pixels = rng.integers(0, 160, (SIZE, SIZE, 3)) + np.eye(3, dtype=int)[label] * 60
            Image.fromarray(pixels.astype(np.uint8)).save(place / "images" / name / f"{number}.png")
    options = {"recipe": "paper", "width": 4, "buffer": 24, "batch": 8, "probes": 0, "lr": 1e-3, "fractions": "0.5,1"}
    options["classifier"] = "linear"
    path, _ = run(RunOptions(source=f"folder:{place / 'images'}?size={SIZE}", out=str(place / "wald"), **options))
    return RunDirectory(path)


@pytest.fixture(scope="module")
def onnx_file(finished):
    return export(finished)


@pytest.fixture(scope="module")
def torch_file(finished):
    return export(finished, "torch")


def exact(directory, images):
    classifier = Heads(directory).load()
    features = infer(classifier.model, images, classifier.model.features)
    return classifier.head(features).softmax(1), features


def as_pillow(images, size):
    squares = [middle_square(image.permute(1, 2, 0).contiguous().numpy(), size) for image in images]
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)


def opened(file):
    (kind,) = (kind for kind in FORMATS.values() if kind.suffix == file.suffix)
    return kind.open(file.read_bytes())


def about_of(file):
    about = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert list(about) == ["streamclr", "sha256"]
    return about["streamclr"]


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 32, 96])
def test_scaling_is_pillows(size):
    rng = np.random.default_rng(size)
    for _ in range(25):
        height, width = sorted(int(n) for n in rng.integers(1, 300, 2))
        images = torch.from_numpy(rng.integers(0, 256, (1, 3, height, width), dtype=np.uint8))
        assert torch.equal(scaled(images, size), as_pillow(images, size).float())
        portrait = images.mT.contiguous()  # which Pillow may scale downwards first
        assert (scaled(portrait, size) - as_pillow(portrait, size)).abs().max() <= 1


@pytest.mark.parametrize("pixels", [0, 255])
def test_flat_pictures_stay_flat(pixels):
    for height, width in [(1, 1), (3, 700), (1500, 1100)]:
        images = torch.full((1, 3, height, width), pixels, dtype=torch.uint8)
        assert (scaled(images, 32) == pixels).all()


def test_nothing_is_scaled_that_fits():
    coarse, fine = resampling(32, 32, 32)
    assert torch.equal(coarse, 2**11 * torch.eye(32))
    assert not fine.any()


def test_the_classifier_is_exactly_the_model(finished):
    images = random_images(64, SIZE)
    classifier = classifier_of(finished)
    model, head = classifier.model, classifier.head
    features = model.features(images / 255)
    assert torch.equal(classifier(images)[1], features)
    assert torch.equal(classifier(images)[0], head(features).softmax(1))


@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_the_file_says_what_pytorch_says(kind, finished, onnx_file, torch_file):
    shipment = opened(onnx_file[0] if kind == "onnx" else torch_file[0])
    for seed, n in enumerate((1, 2, 33, 200)):
        images = random_images(n, SIZE, seed)
        for found, expected in zip(shipment(images), exact(finished, images), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for height, width in [(SIZE, 40), (31, 77), (100, 30), (7, 5), (1, 1), (481, 640)]:
        images = random_images(2, 700)[..., :height, :width].contiguous()
        # Where Pillow rounds otherwise, in some portraits, the reference is the module itself.
        square = scaled(images, SIZE).byte() if height > width else as_pillow(images, SIZE)
        torch.testing.assert_close(shipment(images)[0], exact(finished, square)[0], atol=1e-4, rtol=0)


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    [
        {"stem": "imagenet", "norm": "group"},  # a single pixel in the last stage
        {"encoder": "resnet50"},
        COMPACT,
        MOBILENET,
    ],
)
@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_every_encoder(format, options, tmp_path):
    directory = made_run(tmp_path / "run", **options)
    file, parity = export(directory, format)
    assert parity.problem is None
    assert parity.n_images == 48
    images = random_images(33, 50)
    torch.testing.assert_close(opened(file)(images)[0], classifier_of(directory)(images)[0], atol=1e-4, rtol=0)


@pytest.mark.system
def test_pure_int8(finished, onnx_file, tmp_path):
    """The encoder is quantised, the rest is not; the file is smaller and says nearly the same."""
    file, parity = export(finished, int8=True, out=tmp_path / "pure.onnx", pure=True)
    assert parity.equal_classes >= 0.9  # what is below 99 % is said
    assert (parity.problem is None) == (parity.equal_classes >= 0.99)
    assert parity.looked_again is None
    assert parity.n_bytes == file.stat().st_size < onnx_file[0].stat().st_size / 2
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert json.loads(about_of(file))["int8"] is True
    assert str(tmp_path.parent).encode() not in file.read_bytes()
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        read = {makers[name].op_type for name in node.input if name in makers}
        if node.op_type == "Conv":
            assert read == {"DequantizeLinear"}
        elif node.op_type in ("MatMul", "Gemm", "Softmax"):
            assert "DequantizeLinear" not in read
    images = random_images(33, 60)
    assert (opened(file)(images)[0] - opened(onnx_file[0])(images)[0]).abs().max() < 0.2


@pytest.mark.system
def test_int8_looks_again_where_it_is_in_doubt(tmp_path):
    """Random weights find all noise alike, so that much is in doubt. The same run gives the same bytes."""
    directory = made_run(tmp_path / "run")
    file, parity = export(directory, int8=True)
    assert file.name == "run-int8.onnx"
    _, pure = export(directory, int8=True, out=tmp_path / "pure.onnx", pure=True)
    assert pure.equal_classes < parity.equal_classes
    assert parity.equal_classes >= 0.97  # of 48 images
    assert 0 < parity.looked_again < 1
    assert parity.n_bytes > 2 * pure.n_bytes
    assert json.loads(file.with_name("run-int8.onnx.json").read_text())["looked_again"] == parity.looked_again
    onnx.checker.check_model(onnx.load(file), full_check=True)
    calibration = Calibration.of(directory.load_buffer()["images"], pure=False)
    assert make_onnx(classifier_of(directory), json.loads(about_of(file)), calibration) == file.read_bytes()


@pytest.mark.system
@pytest.mark.parametrize("options", [{"norm": "group", "stem": "imagenet"}, COMPACT, MOBILENET])
def test_int8_of_every_encoder(options, tmp_path):
    """Layer upon layer of random weights makes much of a small error, the more so the deeper, and on each CPU a little
    otherwise: the second look mends most of it, and what is below 99 % is said."""
    directory = made_run(tmp_path / "run", **options)
    _, parity = export(directory, int8=True)
    _, pure = export(directory, int8=True, out=tmp_path / "pure.onnx", pure=True)
    assert 1 - parity.equal_classes < (1 - pure.equal_classes) / 2
    assert (parity.problem is None) == (parity.equal_classes >= 0.99)
    assert 0 < parity.looked_again < 1


def test_metadata(finished, onnx_file, torch_file):
    file, parity = onnx_file
    about = json.loads(about_of(file))
    assert about["format_version"] == 1
    assert sorted(about["classes"]) == sorted(CLASSES)
    assert (about["size"], about["policy"], about["images_seen"]) == (SIZE, "contrast", 120)
    assert about["encoder"] == {"name": "resnet18", "width": 4, "stem": "small", "norm": "batch"}
    results = finished.results
    assert about["accuracy"]["value"] == results["labels"]["1.0"]["accuracy"]
    assert about["accuracy"]["measured"] == f"{results['n_test']} test images, classifier from 96 labels"
    assert torch.__version__.startswith(about["torch"])
    with zipfile.ZipFile(torch_file[0]) as archive:
        assert json.loads(archive.read("archive/extra/streamclr")) == about
    found = json.loads((file.parent / f"{file.name}.json").read_text())
    assert found["metadata"] == about
    assert found["images"] == {"buffer": 24, "test": results["n_test"]}
    assert (found["matches"], found["bytes"]) == (True, file.stat().st_size)
    assert found["largest_difference"] == parity.largest_difference <= 1e-4


def test_names_and_shapes(onnx_file):
    model = onnx.load(onnx_file[0])
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version >= 18

    def sizes(value):
        return value.name, [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert [sizes(value) for value in model.graph.input] == [("images", ["n", 3, "height", "width"])]
    assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [sizes(value) for value in model.graph.output] == [("probabilities", ["n", 3]), ("features", ["n", 32])]


def test_the_same_run_gives_the_same_bytes(finished, onnx_file, torch_file, tmp_path):
    """In another process, too, which says nothing of what the exporters say."""
    again = tmp_path / "again.onnx"
    command = [sys.executable, "-m", "streamclr", "export", str(finished.path), "--out", str(again)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.read_bytes() == onnx_file[0].read_bytes()
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) < 20
    assert done.stdout.endswith(f"classifier: {again}\n")
    assert make_torch(classifier_of(finished), json.loads(about_of(onnx_file[0])), None) == torch_file[0].read_bytes()


def test_nothing_of_the_machine(finished, onnx_file, torch_file):
    with zipfile.ZipFile(torch_file[0]) as archive:
        contents = [onnx_file[0].read_bytes(), *(archive.read(name) for name in archive.namelist())]
    for content in contents:
        assert not re.search(rb"site-packages|\.py\b|stack_trace", content)
        assert str(finished.path.parent).encode() not in content


# ----------------------------------------------------------------------------------------------------------------------


def complaint(capsys, *words):
    assert main(["export", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_errors_are_one_line(finished, onnx_file, tmp_path, capsys, monkeypatch):
    assert "is no run directory" in complaint(capsys, tmp_path)
    assert "no format 'tflite'" in complaint(capsys, finished.path, "--format", "tflite")
    assert "torch has no int8 here: use --int8 with onnx or executorch" in complaint(
        capsys, finished.path, "--format", "torch", "--int8"
    )
    assert "--pure is for --int8" in complaint(capsys, finished.path, "--pure")
    assert "wald.onnx exists already" in complaint(capsys, finished.path)
    assert "no directory" in complaint(capsys, finished.path, "--out", tmp_path / "none" / "a.onnx")
    assert "use 0.5, 1.0" in complaint(capsys, finished.path, "--fraction", "0.3", "--out", tmp_path / "a.onnx")
    monkeypatch.setattr(export_module, "find_spec", lambda name: None if name == "onnxscript" else 1)
    told = complaint(capsys, finished.path, "--out", tmp_path / "a.onnx")
    assert "needs onnxscript: pip install -c constraints.txt -e '.[export]'" in told
    monkeypatch.setattr(export_module, "find_spec", lambda name: None)
    told = complaint(capsys, finished.path, "--format", "executorch")
    assert "needs executorch: pip install -c constraints.txt -e '.[executorch]'" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.system
@pytest.mark.parametrize("most", [1_000, 100_000])  # bytes: not even the report, or the report but not the classifier
def test_a_full_disk_is_one_line(finished, tmp_path, most):
    command = [sys.executable, "-m", "streamclr", "export", str(finished.path), "--format", "torch"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "a.pt2")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith(f"streamclr: cannot write {tmp_path / 'a.pt2'} (File too large)")) == (
        2,
        True,
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(finished, tmp_path, number):
    out = tmp_path / "a.onnx"
    code = f"""
import os, streamclr.models.export as export
from streamclr.cli.entry import main
def compare(*_):
    os.kill(os.getpid(), {number:d})
export.compare = compare
raise SystemExit(main(["export", {str(finished.path)!r}, "--out", {str(out)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode in (130, -number)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_a_run_that_is_not_finished(tmp_path, capsys):
    """The encoder of its last checkpoint, with the classifier from a person's answers for just that encoder."""
    directory = made_run(tmp_path / "run")
    model, head = directory.load_model(), Heads(directory).load().head
    buffer = {"images": random_images(16, 32), "n_seen": 320}
    learner = {"model": model.state_dict(), "buffer": buffer, "n_steps": 7}
    directory.checkpoints.save(7, {"learner": learner})
    for name in ("results.json", "model.safetensors", "classifier.safetensors", "buffer.safetensors"):
        (directory.path / name).unlink()
    out = tmp_path / "a.pt2"
    assert "has no classifier" in complaint(capsys, directory.path, "--format", "torch", "--out", out)
    Heads(directory).save_labelled(head, list("abcde"), "the encoder of step 6", 5, None)
    assert "is for the encoder of step 6" in complaint(capsys, directory.path, "--format", "torch", "--out", out)
    Heads(directory).save_labelled(head, list("abcde"), "the encoder of step 7", 5, None)
    file, parity = export(directory, "torch", out=out)
    assert (parity.problem, parity.n_images) == (None, 16)
    about = json.loads(file.with_name("a.pt2.json").read_text())["metadata"]
    assert (about["state"], about["images_seen"], about["accuracy"]) == ("the encoder of step 7", 320, None)


@pytest.mark.system
def test_the_accuracy_of_a_persons_labels(tmp_path):
    directory = made_run(tmp_path / "run")
    head = Heads(directory).load().head

    def about(fraction=None):
        return describe(directory, Heads(directory).find(fraction), "", 0, None, False)["accuracy"]

    Heads(directory).save_labelled(head, list("vwxyz"), "the finished encoder", 4, None)
    assert about() is None  # too few to hold some back
    Heads(directory).save_labelled(head, list("vwxyz"), "the finished encoder", 30, 0.5)
    assert about() == {"value": 0.5, "measured": "cross-validation of 30 labels that a person gave"}
    assert about(1.0) is None  # that of the source's labels was not measured
    file, _ = export(directory, "torch")
    found = json.loads(file.with_name("run.pt2.json").read_text())["metadata"]
    assert (found["accuracy"]["value"], found["classes"]) == (0.5, list("vwxyz"))


def test_a_damaged_run(tmp_path, capsys):
    directory = made_run(tmp_path / "run")
    for name in ("model.safetensors", "classifier.safetensors", "buffer.safetensors", "config.json"):
        whole = (directory.path / name).read_bytes()
        (directory.path / name).write_bytes(whole[: len(whole) // 2])
        assert name in complaint(capsys, directory.path)
        (directory.path / name).write_bytes(whole)
    (directory.path / "classes.json").write_text('["a"]')
    assert "does not name the 5 classes" in complaint(capsys, directory.path)
    assert not list(directory.path.glob("*.onnx*"))


@pytest.mark.system
def test_what_does_not_match_is_said(finished, tmp_path, capsys, monkeypatch):
    """Of a run whose source is gone, too."""
    monkeypatch.setattr("streamclr.models.parity.MAX_DIFFERENCE", -1.0)
    images, out = finished.path.parent / "images", tmp_path / "a.pt2"
    images.rename(images.with_name("elsewhere"))
    try:
        assert main(["export", str(finished.path), "--format", "torch", "--out", str(out)]) == 1
    finally:
        images.with_name("elsewhere").rename(images)
    gone, problem = capsys.readouterr().err.splitlines()
    assert "without the source's test images" in gone
    assert "does not match PyTorch: probabilities differ by up to" in problem
    found = json.loads((tmp_path / "a.pt2.json").read_text())
    assert (found["matches"], found["images"]) == (False, {"buffer": 24, "test": 0})


def test_problems():
    fine = Parity(False, 10, 1e-5, 1.0, 1, 1, {}, {})
    assert fine.problem is None
    assert "more than 0.0001" in dataclasses.replace(fine, largest_difference=2e-4).problem
    assert dataclasses.replace(fine, largest_difference=float("nan")).problem
    int8 = dataclasses.replace(fine, int8=True, largest_difference=0.1, equal_classes=0.99)
    assert int8.problem is None
    assert "98.9 %" in dataclasses.replace(int8, equal_classes=0.989).problem


def test_compare_sees_other_answers(finished):
    classifier, images = classifier_of(finished), random_images(8, SIZE)

    def lies(images):
        probabilities, features = classifier(images)
        return probabilities.roll(1, 1), features

    parity = compare(classifier, lies, images, 1, int8=False)
    assert parity.equal_classes == 0
    assert parity.problem


def test_unknown_format(finished):
    with pytest.raises(UserError, match="no format"):
        export(finished, "tflite")
