"""`predict`, with runs and files, from any source, where there is torch and where there is none."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import streamclr
from streamclr import UserError
from streamclr.cli.entry import main
from streamclr.models.formats.reader import Predictor
from streamclr.models.predict import Prediction, csv_writer, json_printer, of_source, table_printer
from streamclr.streams.datasets import registry as data
from streamclr.streams.datasets.images import ArrayImages, DatasetSource
from support.camera import jpeg
from support.cifar import as_binary, make_batches, write
from support.images import random_images

NOT_THERE = ("torch", "safetensors", "rich", "matplotlib", "onnx", "scipy")


@pytest.fixture
def pictures(tmp_path):
    (tmp_path / "pictures").mkdir()
    for number, image in enumerate(random_images(9, 40)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "pictures" / f"{number}.png")
    (tmp_path / "pictures" / "3.png").write_bytes(b"nonsense")
    return tmp_path / "pictures"


@pytest.fixture
def without_torch(tmp_path):
    """Runs the command line in a process in which, and in whose children, these packages are not installed."""
    place = tmp_path / "not there"
    place.mkdir()
    for name in NOT_THERE:
        (place / f"{name}.py").write_text(f"raise ModuleNotFoundError({f'No module named {name!r}'!r}, name={name!r})")
    before = [str(Path(streamclr.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]

    def run(*words, given=None):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(place), *before])}
        command = [sys.executable, "-m", "streamclr", *map(str, words)]
        return subprocess.run(
            command, capture_output=True, input=given, env=environment, timeout=300, check=False, cwd=tmp_path
        )

    return run


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def same(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        probability, its = one.pop("probability", 0), other.pop("probability", 0)
        assert (one.pop("time", None) is None) == (other.pop("time", None) is None)
        assert one == other
        assert abs(probability - its) < 1.5e-4  # one in the last of the four digits that are printed


# ----------------------------------------------------------------------------------------------------------------------


def source_of(kind, pictures, tmp_path):
    """A source of every kind, whose images are the same each time, and what comes on standard input."""
    if kind == "dataset":
        data.get("cifar10", write(tmp_path / "official", as_binary(make_batches(10))))
        return "cifar10?stc=2", [], None
    if kind == "folder":
        return f"folder:{pictures}", [], None
    if kind == "pattern":
        return f"{pictures}/[0-5].png", [], None
    if kind == "stdin":
        return "-", ["--images", "4"], b"".join(jpeg(number) for number in range(4))
    (pictures / "3.png").unlink()
    if kind == "watch":
        return f"watch:{pictures}", ["--images", "5"], None
    from support.camera import write_clip

    pytest.importorskip("av")
    clip = write_clip(tmp_path / "clip.mp4", n=6)
    if kind == "video":
        return str(clip), [], None
    (tmp_path / "cameras.txt").write_text(f"# two\n{clip}\n{shutil.copy(clip, tmp_path / 'other.mp4')}\n")
    return str(tmp_path / "cameras.txt"), [], None


@pytest.mark.parametrize("kind", ["folder", "pattern", "dataset", "stdin", "watch", "video", "list"])
def test_an_onnx_file_needs_no_torch_and_says_what_the_run_says(
    kind, exported_run, without_torch, pictures, tmp_path, monkeypatch
):
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "cache"))
    source, more, given = source_of(kind, pictures, tmp_path)
    run, file, _ = exported_run
    expected = subprocess.run(
        [sys.executable, "-m", "streamclr", "predict", run, "--source", source, *more],
        capture_output=True,
        input=given,
        timeout=300,
        check=True,
    )
    found = without_torch("predict", file, "--source", source, *more, given=given)
    assert (found.returncode, found.stderr) == (0, b"")
    same(lines(found.stdout), lines(expected.stdout))


@pytest.fixture(scope="module")
def mobile(exported_run, tmp_path_factory):
    """The classifier as a program of ExecuTorch, which takes long to make."""
    pytest.importorskip("executorch")
    file = tmp_path_factory.mktemp("mobile") / "exported"
    assert main(["export", str(exported_run[0]), "--format", "executorch", "--out", str(file)]) == 0
    return file


@pytest.mark.parametrize("words", [["--int8"], "mobile", ["--format", "pretrained"]])
def test_whatever_export_wrote(words, exported_run, pictures, tmp_path, capsys, request):
    if words == "mobile":
        file = request.getfixturevalue("mobile")
    else:
        file = tmp_path / "exported"
        assert main(["export", str(exported_run[0]), *words, "--out", str(file)]) in (0, 1)
    capsys.readouterr()
    told = []
    for model in (exported_run[0], file):
        assert main(["predict", str(model), "--source", f"folder:{pictures}"]) == 0
        told.append(lines(capsys.readouterr().out))
    if "--int8" in words:
        assert [line.get("rejected") for line in told[0]] == [line.get("rejected") for line in told[1]]
        assert sum(a.get("class") == b.get("class") for a, b in zip(*told, strict=True)) >= 7
    else:
        same(*told)
    assert main(["predict", str(file), "--source", f"folder:{pictures}", "--fraction", "1"]) == 2
    assert "exported has one classifier" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: c[: len(c) // 2], lambda c: c[:999] + b"~" + c[1000:]])
def test_a_damaged_program_of_executorch(damage, mobile, pictures, tmp_path, capsys):
    file = tmp_path / "a.pte"
    file.write_bytes(damage(mobile.read_bytes()))
    capsys.readouterr()
    assert main(["predict", str(file), "--source", f"folder:{pictures}"]) == 2
    assert capsys.readouterr().err.startswith(f"streamclr: {file} is damaged, or no classifier of streamclr")


def test_without_torch_what_needs_it_is_one_line(exported_run, without_torch, pictures, tmp_path):
    run, _, program = exported_run
    for words in (
        ("predict", run, "--source", f"folder:{pictures}"),
        ("predict", program, "--source", f"folder:{pictures}"),
        ("predict", exported_run[1], "--source", "synthetic:"),
        ("run",),
        ("run", "--help"),
    ):
        done = without_torch(*words)
        assert done.stderr == b"streamclr: this needs torch: pip install -c constraints.txt -e .\n"
        assert (done.returncode, done.stdout) == (2, b"")
    assert without_torch("--help").returncode == without_torch("predict", "--help").returncode == 0
    done = without_torch("predict", tmp_path / "none.onnx", "--source", f"folder:{pictures}")
    assert b"none.onnx is no run directory, and nothing that 'streamclr export' wrote" in done.stderr


@pytest.mark.long
def test_a_device_with_onnxruntime_numpy_and_pillow_alone(exported_run, pictures, tmp_path):
    """A new environment from PyPI, in which nothing of torch is installed."""
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv" / "bin" / "pip", "install", "-q", "-c", root / "constraints.txt"]
    subprocess.run([*pip, "onnxruntime", "numpy", "pillow"], check=True)
    shutil.copytree(root / "src", tmp_path / "clone" / "src")  # a build leaves its files there
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(root / name, tmp_path / "clone")
    subprocess.run([*pip, "--no-deps", tmp_path / "clone"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    listed = subprocess.run([*pip[:1], "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in ("torch", "safetensors", "rich"))
    command = [tmp_path / "venv/bin/streamclr", "predict", exported_run[1], "--source", f"folder:{pictures}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    expected = subprocess.run(
        [sys.executable, "-m", "streamclr", "predict", exported_run[0], "--source", f"folder:{pictures}"],
        capture_output=True,
        text=True,
        check=True,
    )
    same(lines(done.stdout), lines(expected.stdout))
    megabytes = sum(file.stat().st_size for file in (tmp_path / "venv").rglob("*") if file.is_file()) / 1e6
    print(f"{megabytes:.0f} MB")
    assert megabytes < 400


# ----------------------------------------------------------------------------------------------------------------------


def test_json_table_and_csv_say_the_same(exported_run, pictures, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["predict", str(exported_run[1]), "--source", f"folder:{pictures}"]
    assert main([*words, "--top", "2", "--csv", "found.csv"]) == 0
    told = lines(capsys.readouterr().out)
    assert [line["image"] for line in told] == list(range(9))
    assert told[3] == {"image": 3, "file": str(pictures / "3.png"), "rejected": "not an image"}
    for line in told[:3]:
        first, second = line["top"]
        assert first == {"class": line["class"], "probability": line["probability"]}
        assert first["probability"] >= second["probability"]
    content = (tmp_path / "found.csv").read_bytes()
    assert content.count(b"\r\n") == content.count(b"\n") == 10
    with (tmp_path / "found.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = ["image", "file", "source", "time", "class", "probability", "rejected"]
    assert list(rows[0]) == [*columns, "P(a)", "P(b)", "P(c)", "P(d)", "P(e)"]
    for row, line in zip(rows, told, strict=True):
        assert (row["image"], row["file"], row["class"], row["rejected"]) == (
            str(line["image"]),
            line["file"],
            line.get("class", ""),
            line.get("rejected", ""),
        )
        if "class" in line:
            assert float(row["probability"]) == line["probability"]
            assert abs(sum(float(row[f"P({name})"]) for name in "abcde") - 1) < 1e-5
            assert abs(float(row[f"P({line['class']})"]) - line["probability"]) <= 1e-4
    assert main([*words, "--table"]) == 0
    head, *table = capsys.readouterr().out.splitlines()
    assert head.split() == ["image", "class", "probability"]
    assert table[3].split(None, 1) == ["3", f"rejected: not an image  {pictures / '3.png'}"]
    for row, line in zip(table, told, strict=True):
        if "class" in line:
            assert row.split() == [str(line["image"]), line["class"], f"{line['probability']:.4f}", line["file"]]


@pytest.mark.system
def test_a_source_that_has_no_frame_says_why_and_what_was_rejected_is_told(exported_run, tmp_path, capsys):
    file = str(exported_run[1])
    assert main(["predict", file, "--source", "http://127.0.0.1:9/x?retries=1"]) == 2
    told = capsys.readouterr().err
    assert "refused" in told
    assert "not one frame could be classified" in told.splitlines()[-1]
    command = [sys.executable, "-m", "streamclr", "predict", file, "--source", "stdin:"]
    place = (whole := jpeg(2)).index(b"\xff\xc0") + 5  # of height and width
    bad = whole[:place] + b"\xff\xdc" * 2 + whole[place + 4 :]
    for given, n_lines, told, code in (
        (jpeg(0) + bad + jpeg(1), 2, b"rejected: 1 ", 0),
        (b"nonsense", 0, b"not one frame could be classified", 2),
    ):
        done = subprocess.run(command, input=given, capture_output=True, timeout=120, check=False)
        assert (done.returncode, len(lines(done.stdout))) == (code, n_lines)
        assert told in done.stderr


def test_a_file_name_that_is_no_text_is_written_as_it_can_be(exported_run, pictures, tmp_path, capsys):
    os.rename(pictures / "0.png", os.fsencode(pictures) + b"/\xff.png")
    assert (
        main(["predict", str(exported_run[1]), "--source", f"folder:{pictures}", "--csv", str(tmp_path / "a.csv")]) == 0
    )
    assert "\\udcff.png" in (tmp_path / "a.csv").read_text("utf-8")


def test_errors_are_one_line_and_leave_nothing_behind(exported_run, pictures, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.csv").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    file, source = str(exported_run[1]), f"folder:{pictures}"
    for words, told in (
        ([file, "--source", source, "--csv", "taken.csv"], "taken.csv exists already: give another --csv"),
        ([file, "--source", source, "--csv", "no/such/place.csv"], "No such file or directory: no/such/place.csv"),
        ([file, "--source", source, "--images", "0"], "images is 0: use at least 1"),
        ([file, "--source", source, "--top", "0"], "top is 0: use at least 1"),
        ([file, "--source", source, "--top", "many"], "--top is 'many': use a whole number"),
        ([file, "--source", source, "--fraction", "0.5"], "--fraction is for a run"),
        ([file, "--source", "nowhere", "--csv", "new.csv"], "no source 'nowhere'"),
        ([str(pictures / "0.png"), "--source", source, "--csv", "new.csv"], "0.png is a source, no classifier"),
        ([str(pictures), "--source", source], "pictures is no run directory, and nothing"),
        ([file, "--source", source, "--tabel"], "did you mean '--table'"),
    ):
        assert main(["predict", *words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert told in captured.err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "taken.csv").read_text() == "mine"


def test_onnxruntime_that_is_not_installed_is_named(exported_run, pictures, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["predict", str(exported_run[1]), "--source", f"folder:{pictures}"]) == 2
    assert "run.onnx needs onnxruntime: pip install -c constraints.txt onnxruntime" in capsys.readouterr().err


def test_a_full_disk_is_named(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "full.csv").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"exists already"), csv_writer(tmp_path / "full.csv", ["a"]):
        pass

    class Full(type(tmp_path)):
        def open(self, *args, **kwargs):
            return Path("/dev/full").open("w", **kwargs)

    with pytest.raises(UserError, match=r"cannot write .*No space left"), csv_writer(Full("a"), ["a"]) as told:
        told([Prediction(0, np.ones(1))])


# ----------------------------------------------------------------------------------------------------------------------


def counting(size, at_once):
    """A model of two classes that notes how many images it gets at once."""

    def classify(images):
        at_once.append(len(images))
        share = images[:, 0, 0, 0] / 255
        return np.stack([1 - share, share], 1)

    return Predictor(["dark", "bright"], size, classify)


@pytest.mark.parametrize(("size", "most"), [(32, 64), (8, 1024), (300, 1)])
def test_large_images_come_fewer_at_once(size, most):
    images = np.zeros((200, 3, size, size), np.uint8)
    images[:, 0, 0, 0] = np.arange(200)
    own = ArrayImages(images, np.zeros(200), ())
    at_once = []
    found = [
        a for batch in of_source(counting(size, at_once), DatasetSource(own, None, None, None), 200) for a in batch
    ]
    assert [answer.image for answer in found] == list(range(200))
    assert [round(255 * answer.probabilities[1]) for answer in found] == list(range(200))
    assert max(at_once) == min(most, 199)


def test_probabilities_that_are_no_numbers_are_told():
    own = ArrayImages(np.zeros((3, 3, 8, 8), np.uint8), np.zeros(3), ())
    broken = Predictor(["a", "b"], 8, lambda images: np.full((len(images), 2), np.nan))
    with pytest.raises(UserError, match="no numbers"):
        next(of_source(broken, DatasetSource(own, None, None, None), 3))


def test_class_names_are_safe_in_a_spreadsheet_and_on_a_terminal(tmp_path, capsys):
    names = ["=1+1", 'x,"y"', "猫", "\x1b[31mred\nline", "e\u0301" * 50]
    with csv_writer(tmp_path / "a.csv", names) as told:
        told([Prediction(i, np.eye(5)[i]) for i in range(5)])
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert [row[4] for row in rows] == ["'=1+1", *names[1:]]
    assert not any(text.startswith(("=", "+", "-", "@")) for text in head)
    told = table_printer(names, 2)
    for i in range(5):
        told(Prediction(i, 0.6 * np.eye(5)[i] + 0.4 * np.eye(5)[(i + 1) % 5]))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 6
    assert {line.index("0.6000") for line in out.splitlines()[1:3]} == {52}
    told = json_printer(names, 9)
    told(Prediction(0, np.full(5, 0.2)))
    line = json.loads(capsys.readouterr().out)
    assert [entry["class"] for entry in line["top"]] == names  # a tie: in their own order


def test_an_endless_source_is_told_frame_by_frame(exported_run, pictures):
    """Each line comes when its frame has come, while the source goes on."""
    (pictures / "3.png").unlink()
    for form in ([], ["--table"]):
        command = [
            sys.executable,
            "-m",
            "streamclr",
            "predict",
            exported_run[1],
            "--source",
            f"watch:{pictures}",
            *form,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            if form:
                assert "class" in process.stdout.readline()
            for _ in range(8):
                assert process.stdout.readline()
            Image.new("RGB", (40, 40)).save(pictures / ".new.png")
            (pictures / ".new.png").rename(pictures / f"new{len(form)}.png")  # whole, should we be held up in between
            assert process.stdout.readline().split()[0 if form else 1].startswith("8")
            assert process.poll() is None
        finally:
            process.kill()
            process.communicate()
        (pictures / f"new{len(form)}.png").unlink()


def test_ctrl_c_keeps_the_rows_that_were_written(exported_run, pictures, tmp_path):
    import signal

    (pictures / "3.png").unlink()
    words = ["predict", exported_run[1], "--source", f"watch:{pictures}", "--csv", tmp_path / "a.csv"]
    process = subprocess.Popen(
        [sys.executable, "-m", "streamclr", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(8):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    try:
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, told) == (130, "streamclr: interrupted\n")
    with (tmp_path / "a.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) >= 8


def test_answers_go_out_and_frames_say_where_they_are_from(exported_run, tmp_path, capsys):
    pytest.importorskip("av")
    from support.camera import write_clip

    clip, out = write_clip(tmp_path / "clip.mp4", n=30), tmp_path / "out.jsonl"
    words = ["predict", str(exported_run[1]), "--source", f"{clip}", "--to", str(out)]
    assert main([*words, "--every-frame", "--smooth", "1", "--snapshot"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(answers) == len(lines) == 30
    for line, answer in zip(lines, answers, strict=True):
        assert line["source"] == str(clip)
        assert {key: answer[key] for key in line} == line
        assert answer["snapshot"]
    assert main([*words, "--threshold", "1"]) == 0  # it is never so sure: one answer, and no change
    assert [json.loads(line)["class"] for line in out.read_text().splitlines()[30:]] == ["unknown"]


def test_answers_that_did_not_arrive_are_told(exported_run, pictures, held_port, capsys):
    words = ["predict", str(exported_run[1]), "--source", f"folder:{pictures}", "--every-frame"]
    assert main([*words, "--to", f"http://127.0.0.1:{held_port}/s-ecret"]) == 0
    told = capsys.readouterr().err
    assert f"http://127.0.0.1:{held_port}/***: Connection refused: its answers wait" in told
    assert "answers were not sent" in told
    assert "s-ecret" not in told
