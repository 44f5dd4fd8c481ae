"""Files from anywhere: whatever is wrong with one is a line that names it, and nothing in it is executed."""

import hashlib
import io
import json
import pickle
import random
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from streamclr import UserError
from streamclr.models.formats.reader import SEAL, n_threads, open_exported, sealed
from streamclr.models.predict import open_predictor
from support.images import random_images

onnx = pytest.importorskip("onnx")


def images(n, size=32):
    return random_images(n, size).numpy()


def complaint(file):
    with pytest.raises(UserError) as error:
        open_exported(file)
    told = str(error.value)
    assert str(file) in told
    return told


@pytest.fixture
def changed(exported_run, tmp_path):
    """The ONNX file with something changed in it, and its checksum right again."""

    def change(function):
        model = onnx.load(exported_run[1])
        function(model)
        kept = [entry for entry in model.metadata_props if entry.key != "sha256"]
        del model.metadata_props[:]
        model.metadata_props.extend(kept)
        (tmp_path / "changed.onnx").write_bytes(sealed(model.SerializeToString()))
        return tmp_path / "changed.onnx"

    return change


def saying(**about):
    def function(model):
        entry = next(entry for entry in model.metadata_props if entry.key == "streamclr")
        entry.value = json.dumps(json.loads(entry.value) | about)

    return function


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 24, 75])
def test_a_run_and_its_files_give_the_same_answers(exported_run, size):
    models = [open_predictor(path) for path in exported_run]
    expected, *others = (model.classify(images(33, size)) for model in models)
    assert expected.shape == (33, 5)
    assert np.abs(expected.sum(1) - 1).max() < 1e-5
    for found in others:
        assert np.abs(found - expected).max() < 1e-4
        assert (found.argmax(1) == expected.argmax(1)).all()
    assert {(tuple(model.classes), model.size) for model in models} == {(tuple("abcde"), 32)}


def test_the_seal_is_an_entry_of_the_metadata(exported_run):
    whole = exported_run[1].read_bytes()
    about = {entry.key: entry.value for entry in onnx.load(exported_run[1]).metadata_props}
    assert about["sha256"] == hashlib.sha256(whole[: -len(SEAL) - 64]).hexdigest()
    onnx.checker.check_model(onnx.load(exported_run[1]), full_check=True)


def test_what_is_no_exported_file(tmp_path, exported_run):
    picture, text = tmp_path / "a.onnx", tmp_path / "b.pt2"
    Image.new("RGB", (9, 9)).save(picture, "PNG")
    text.write_text("nothing of the kind")
    assert "is no whole ONNX file" in complaint(picture)
    assert "is no whole ONNX file" in complaint(text)
    (tmp_path / "empty.onnx").touch()
    assert "is empty" in complaint(tmp_path / "empty.onnx")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a/b", "c")
    assert "is no whole program of torch.export" in complaint(tmp_path / "other.zip")
    foreign = onnx.load(exported_run[1])
    del foreign.metadata_props[:]
    onnx.save(foreign, tmp_path / "foreign.onnx")
    assert "does not say that it is a classifier of streamclr" in complaint(tmp_path / "foreign.onnx")
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(program, tmp_path / "foreign.pt2")
    assert "does not say that it is a classifier of streamclr" in complaint(tmp_path / "foreign.pt2")


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"format_version": 2}, "has format version 2, and this streamclr knows 1: use a newer one"),
        ({"format_version": None}, "has format version None"),
        ({"classes": []}, "names no classes"),
        ({"classes": "abcde"}, "names no classes"),
        ({"classes": ["a", "b", "c", "d", 5]}, "names no classes"),
        ({"classes": ["a"]}, "has 5 classes, and names for 1"),
        ({"size": "32"}, "has '32' for size"),
        ({"size": True}, "has True for size"),
        ({"size": 10**9}, "size is 1000000000: use 8 to 4096 pixels"),
    ],
)
def test_metadata_that_cannot_be_used(changed, about, told):
    assert told in complaint(changed(saying(**about)))


def test_metadata_that_cannot_be_read(changed):
    for value in ("", "[]", "{", "5", "[" * 10**5):

        def function(model, value=value):
            model.metadata_props[0].value = value

        assert "cannot be read" in complaint(changed(function))


def test_graphs_that_reach_out(changed, tmp_path):
    def domain(model):
        model.graph.node[3].domain = "com.microsoft"

    def subgraph(model):
        model.graph.node[3].attribute.append(onnx.helper.make_attribute("body", onnx.GraphProto(name="g")))

    def outside(model):
        model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
        model.graph.initializer[0].external_data.add(key="location", value="/etc/hostname")

    def outside_constant(model):
        tensor = onnx.helper.make_tensor("t", 1, [1], [0.0])
        tensor.external_data.add(key="location", value="../secret")
        model.graph.node[3].attribute.append(onnx.helper.make_attribute("value", tensor))

    def function(model):
        model.functions.append(onnx.helper.make_function("own", "f", [], [], [], []))

    assert "uses operators of 'com.microsoft'" in complaint(changed(domain))
    assert "has a graph inside its graph" in complaint(changed(subgraph))
    assert "has weights in other files" in complaint(changed(outside))
    assert "has weights in other files" in complaint(changed(outside_constant))
    assert "defines functions of its own" in complaint(changed(function))


def test_graphs_that_are_none_of_ours(changed):
    def renamed(model):
        model.graph.input[0].name = "pictures"
        for node in model.graph.node:
            node.input[:] = ["pictures" if name == "images" else name for name in node.input]

    def unknown(model):
        model.graph.node[3].op_type = "Teleport"

    assert "does not take images" in complaint(changed(renamed))
    assert "onnxruntime cannot open" in complaint(changed(unknown))


def test_damage_anywhere_is_found_before_anything_is_made_of_it(exported_run, tmp_path, monkeypatch):
    """Every file that is cut off, and bytes changed in a thousand places, of the weights too."""
    import onnxruntime

    opened = []
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *a, **k: opened.append(1))
    whole, rng, file = exported_run[1].read_bytes(), random.Random(0), tmp_path / "damaged.onnx"
    for _ in range(1000):
        content = bytearray(whole)
        if rng.random() < 0.2:
            del content[rng.randrange(len(content)) :]
        else:
            place = rng.choice((rng.randrange(len(content)), len(content) - 1 - rng.randrange(600)))
            content[place] ^= rng.randrange(1, 256)
        file.write_bytes(content)
        complaint(file)
    assert not opened


REOPEN = """
import random, sys
from pathlib import Path
import numpy as np
from streamclr import UserError
from streamclr.models.formats import protobuf as wire
from streamclr.models.formats.reader import SEAL, open_exported, sealed
whole, file = Path(sys.argv[1]).read_bytes()[: -len(SEAL) - 64], Path(sys.argv[2])
is_graph = np.ones(len(whole), bool)
start = np.frombuffer(whole, np.uint8).ctypes.data
for graph in wire.parts(memoryview(whole), 7):
    for tensor in wire.parts(graph, 5):
        for weights in wire.parts(tensor, 9):
            if len(weights) > 64:
                place = np.frombuffer(weights, np.uint8).ctypes.data - start
                is_graph[place : place + len(weights)] = False
places = np.flatnonzero(is_graph).tolist()
images = np.zeros((2, 3, 32, 32), np.uint8)
for seed in range(int(sys.argv[3])):
    rng, content = random.Random(seed), bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 4))):
        content[rng.choice(places)] ^= 1 << rng.randrange(8)
    file.write_bytes(sealed(bytes(content)))
    try:
        open_exported(file).classify(images)
        print("answered")
    except UserError as error:
        assert str(file) in str(error)
        print("refused")
"""


@pytest.mark.parametrize("n", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_a_damaged_graph_with_a_right_checksum_ends_no_process(n, exported_run, tmp_path):
    """What somebody makes on purpose: onnxruntime answers or refuses, in a process of its own that comes to its end."""
    command = [sys.executable, "-c", REOPEN, str(exported_run[1]), str(tmp_path / "x.onnx"), str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split()
    print({word: told.count(word) for word in sorted(set(told))})
    assert set(told) <= {"answered", "refused"}
    assert len(told) == n


# ----------------------------------------------------------------------------------------------------------------------
# Programs of torch.export


@pytest.fixture
def repacked(exported_run, tmp_path):
    """The program with some of its members changed."""

    def change(**members):
        file = tmp_path / "changed.pt2"
        with zipfile.ZipFile(exported_run[2]) as old, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                content = old.read(name)
                for ending, function in members.items():
                    if name.endswith(ending):
                        content = function(content)
                if content is not None:
                    new.writestr(name, content)
        return file

    return change


def test_a_program_is_read_but_not_run(repacked):
    """Whatever is in the places that torch.export.load would unpickle or evaluate."""
    evil = pickle.dumps(Evil())
    file = repacked(**{"sample_inputs/model.pt": lambda _: evil, "models/model.json": lambda _: b"__import__('os')"})
    assert open_exported(file).classify(images(2)).shape == (2, 5)
    assert not Evil.was_made


class Evil:
    was_made = False

    def __reduce__(self):
        return setattr, (Evil, "was_made", True)


def test_the_evil_is_evil():
    pickle.loads(pickle.dumps(Evil()))
    assert Evil.was_made
    Evil.was_made = False


def as_json(function):
    def change(content):
        value = json.loads(content)
        function(value)
        return json.dumps(value).encode()

    return change


@pytest.mark.parametrize(
    ("ending", "function", "told"),
    [
        ("weights_config.json", lambda c: c["config"].popitem(), "is missing"),
        ("weights_config.json", lambda c: next(iter(c["config"].values())).update(use_pickle=True), "is pickled"),
        (
            "weights_config.json",
            lambda c: c["config"]["model.encoder.conv1.weight"].update(path_name="../extra/streamclr"),
            "no whole program",
        ),
        (
            "weights_config.json",
            lambda c: c["config"]["model.encoder.conv1.weight"]["tensor_meta"].update(dtype=5),
            "no whole program",
        ),
        (
            "weights_config.json",
            lambda c: c["config"]["model.encoder.conv1.weight"]["tensor_meta"].update(sizes=[{"as_int": 108}]),
            "does not fit the model",
        ),
        ("weights_config.json", lambda c: c.clear(), "no whole program"),
        ("extra/streamclr", lambda c: c["encoder"].update(width=10**9), "describes no encoder|does not fit"),
        ("extra/streamclr", lambda c: c["encoder"].update(width="4"), "describes no encoder"),
        ("extra/streamclr", lambda c: c["encoder"].update(width=True), "describes no encoder"),
        ("extra/streamclr", lambda c: c["encoder"].update(width=None), "describes no encoder"),
        ("extra/streamclr", lambda c: c["encoder"].update(stem=["small"]), "describes no encoder"),
        ("extra/streamclr", lambda c: c["encoder"].update(norm=None), "describes no encoder"),
        ("extra/streamclr", lambda c: c["encoder"].update(name=["resnet18"]), "describes no encoder"),
        ("extra/streamclr", lambda c: c["encoder"].update(name="vit"), "describes no encoder"),
        ("extra/streamclr", lambda c: c["encoder"].update(name="mobilenet_v2"), "does not fit"),
        ("extra/streamclr", lambda c: c.update(encoder=None), "describes no encoder"),
        ("extra/streamclr", lambda c: c.update(format_version=2), "has format version 2"),
        ("extra/streamclr", lambda c: c.update(classes=["a"]), "does not fit the model"),
    ],
)
def test_programs_that_cannot_be_used(repacked, ending, function, told):
    file = repacked(**{ending: as_json(function)})
    with pytest.raises(UserError, match=told) as error:
        open_exported(file)
    assert str(file) in str(error.value)


def test_a_compressed_program_is_refused(exported_run, tmp_path):
    with zipfile.ZipFile(exported_run[2]) as old, zipfile.ZipFile(tmp_path / "a.pt2", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert "torch does not compress" in complaint(tmp_path / "a.pt2")


def test_a_damaged_program(exported_run, tmp_path):
    """Where a byte is in nothing that is read (names of members, padding) the answers are the same."""
    whole, rng, file = exported_run[2].read_bytes(), random.Random(0), tmp_path / "damaged.pt2"
    expected, n_refused = open_exported(exported_run[2]).classify(images(2)), 0
    for number in range(60):
        content = bytearray(whole)
        if number < 20:
            del content[rng.randrange(4, len(content)) :]
        else:
            content[rng.randrange(4, len(content))] ^= rng.randrange(1, 256)
        file.write_bytes(content)
        try:
            found = open_exported(file).classify(images(2))
        except UserError:
            n_refused += 1
        else:
            assert np.array_equal(found, expected)
    assert n_refused > 50


def test_threads_as_torch_has_them(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert n_threads() == 3
    for odd in ("0", "", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", odd)
        assert n_threads() >= 1


def test_a_message_of_several_lines_is_printed_as_one(changed, capsys):
    from streamclr.cli.entry import main

    def unknown(model):
        model.graph.node[3].op_type = "Tele\nport"

    assert main(["predict", str(changed(unknown)), "--source", "synthetic:"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_bytes_of_a_picture_in_a_zip(tmp_path):
    (tmp_path / "a.pt2").write_bytes(b"PK\x03\x04" + io.BytesIO(bytes(200)).read())
    assert "no whole program" in complaint(tmp_path / "a.pt2")
