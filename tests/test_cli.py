import csv
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from streamclr.cli.entry import main
from streamclr.cli.parser import parse
from support.camera import write_clip
from support.commands import COMMANDS
from support.images import make_folder
from support.labelling import make_run
from support.runs import made_run

FAST = ["--width", "2", "--buffer", "8", "--images", "40", "--probes", "2", "--stc", "5", "--lr", "1e-3"]
FAST += ["--classifier", "linear"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return f"folder:{make_folder(tmp_path / 'images')}"


def test_run_eval_predict_report(folder, tmp_path, capsys):
    assert main(["run", "--source", folder, *FAST, "--fractions", "0.1,1", "--out", "r"]) == 0
    out = capsys.readouterr().out
    assert "10 % labels" in out
    assert "report: r/report.html" in out
    assert (tmp_path / "r" / "report.html").exists()

    assert main(["eval", "r", "--fractions", "0.25"]) == 0
    assert "25 % labels" in capsys.readouterr().out
    results = json.loads((tmp_path / "r" / "results.json").read_text())
    assert results["labels"].keys() == {"0.25"}
    assert results["steps"] == 5  # what the run said is still there

    assert main(["predict", "r", "--source", folder, "--images", "7"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["image"] for line in lines] == list(range(7))
    assert all(line["class"] in ("ant", "bee") and 0 < line["probability"] <= 1 for line in lines)
    assert main(["predict", "r", "--source", folder]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 40

    assert main(["report", "r"]) == 0
    assert main(["report", "r", "r", "--out", "both.html"]) == 0
    assert (tmp_path / "both.html").exists()


def test_label_export_import_train_and_predict(folder, tmp_path, capsys):
    """A stream without labels: those of a person are all that there are."""
    unlabelled, table = folder + "/ant", tmp_path / "l.csv"
    assert (
        main(["run", "--source", unlabelled, "--width", "2", "--buffer", "8", "--label-budget", "10", "--out", "r"])
        == 0
    )
    out = capsys.readouterr().out
    assert "no classifier yet" in out
    assert out.endswith("\nnext: streamclr label r (about 2 minutes)\n")
    assert main(["label", "train", "r"]) == 0
    told = "no classifier yet: the labels are of fewer than two classes; next: streamclr label r\n"
    assert capsys.readouterr().out == told
    assert main(["predict", "r", "--source", folder]) == 2
    assert capsys.readouterr().err == (
        "streamclr: r has no classifier yet: label some images, which takes about 2 minutes: streamclr label r\n"
    )

    assert main(["label", "export", "r", "l.csv"]) == 0
    assert capsys.readouterr().out == "10 questions, answered or not, in l.csv\n"
    with table.open(newline="") as file:
        head, *rows = csv.reader(file)
    for i, row in enumerate(rows):
        row[head.index("label")] = ("worker", "queen")[i % 2]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    assert main(["label", "import", "r", "l.csv"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("10 new answers from l.csv\nclassifier from 10 labels, ")
    assert out.endswith(" % right on labels held back: streamclr predict r --source …\n")
    assert main(["predict", "r", "--source", folder, "--images", "3"]) == 0
    assert all(json.loads(line)["class"] in ("worker", "queen") for line in capsys.readouterr().out.splitlines())
    assert main(["label", "import", "r", "l.csv"]) == 0
    assert capsys.readouterr().out.startswith("0 new answers from l.csv\nclassifier from 10 labels")

    table.write_text("key,label\nnonsense,worker\n")
    assert main(["label", "import", "r", "l.csv"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "streamclr: l.csv, line 2: no question 'nonsense' in r: nothing was changed\n"
    assert main(["label", "export", "r", "no/such/place.json"]) == 2
    assert capsys.readouterr().err == "streamclr: no directory no/such for place.json: make it, or give another name\n"


def test_a_run_that_is_not_finished_is_asked_about_and_predicts_with_its_last_checkpoint(folder, tmp_path, capsys):
    words = ["run", "--source", folder, *FAST, "--fractions", "1", "--label-budget", "10", "--out", "r"]
    assert main(words) == 0
    for name in ("results.json", "model.safetensors", "classifier.safetensors"):
        (tmp_path / "r" / name).rename(tmp_path / name)  # as while it learns
    assert main(["label", "export", "r", "l.csv"]) == 0
    table = (tmp_path / "l.csv").read_text().splitlines()
    keys = [line.split(",")[0] for line in table[1:]]
    (tmp_path / "l.csv").write_text("key,label\n" + "".join(f"{key},{i % 2}\n" for i, key in enumerate(keys)))
    assert main(["label", "import", "r", "l.csv"]) == 0
    assert "(the encoder of step 5: train again after it has learned more)" in capsys.readouterr().out
    assert main(["predict", "r", "--source", folder, "--images", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["class"] in ("0", "1")
    assert main(["label", "export", "r", "l.csv"]) == 2
    assert capsys.readouterr().err == "streamclr: l.csv exists already and is not overwritten: give another name\n"
    for name in ("results.json", "model.safetensors", "classifier.safetensors"):
        (tmp_path / name).rename(tmp_path / "r" / name)
    assert main(["predict", "r", "--source", folder, "--images", "1"]) == 0
    assert capsys.readouterr().err == (
        "streamclr: this classifier is for the encoder of step 5, and the run has learned on to the finished encoder: "
        "streamclr label train r makes a newer one\n"
    )
    assert main(["label", "train", "r", "--classifier", "linear"]) == 0
    assert main(["predict", "r", "--source", folder, "--images", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["class"] in ("0", "1")
    shutil.rmtree(tmp_path / "r" / "checkpoints")
    (tmp_path / "r" / "results.json").unlink()
    assert main(["label", "train", "r"]) == 2
    assert capsys.readouterr().err.startswith("streamclr: r has no encoder yet, ")


def test_a_run_without_a_label_queue_says_so(folder, capsys):
    main(["run", "--source", folder, *FAST, "--fractions", "1", "--out", "r"])
    capsys.readouterr()
    for words in (["label", "r"], ["label", "train", "r"], ["label", "export", "r", "l.csv"]):
        assert main(words) == 2
        assert capsys.readouterr().err == "streamclr: r has no label queue: run with --label-budget 200\n"


def test_compare(folder, tmp_path, capsys):
    command = [
        "compare",
        "--source",
        folder,
        *FAST,
        "--fractions",
        "1",
        "--policies",
        "contrast,random",
        "--seeds",
        "2",
    ]
    assert main([*command, "--out", "c", "--supervised"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 seeds, mean ± 95 % interval" in out
    results = json.loads((tmp_path / "c" / "results.json").read_text())
    assert {name: len(values["1.0"]) for name, values in results["accuracy"].items()} == {
        "contrast": 2, "random": 2, "supervised": 2, "untrained encoder": 2,
    }  # fmt: skip
    for name in ("report.html", "table.md", "curves.png", "contrast-0/journal.jsonl", "random-1/results.json"):
        assert (tmp_path / "c" / name).exists()
    assert "±" in (tmp_path / "c" / "table.md").read_text()
    assert main([*command, "--out", "c"]) == 2  # nothing is overwritten


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rnu"], "did you mean 'run'"),
        (["fleet", "simulat", "--rounds", "2"], "no command 'fleet simulat': did you mean 'fleet simulate'"),
        (["flet", "simulate"], "no command 'flet': did you mean 'fleet'"),
        (["fleet"], "a command must follow 'streamclr fleet': use simulate, keys, server, device"),
        (["lable", "export", "run", "a.csv"], "no command 'lable': did you mean 'label'"),
        (["rnu", "clip.mp4"], "no command 'rnu': did you mean 'run'"),
        (["run", "--polcy", "fifo"], "did you mean '--policy'"),
        (["run", "--policy", "lifo"], "no policy 'lifo': did you mean 'fifo'?"),
        (["run", "--buffer", "many"], "buffer is 'many': write a size as 600M or 1.5G"),
        (["run", "--buffer", "1"], "buffer is 1: use at least 2 images"),
        (["run", "--source", "nowhere"], "no source 'nowhere'"),
        (["run", "--source", "folder:nowhere"], "no directory 'nowhere'"),
        (["run", "--source"], "expected one argument"),
        (["run", "synthetic:", "extra"], "unexpected 'extra': write streamclr run [SOURCE] [options]"),
        (["run", "synthetic:", "--source", "cifar10"], "two sources, 'synthetic:' and --source 'cifar10': give one"),
        (["eval"], "required: RUN (see streamclr eval --help)"),
        (["eval", "nowhere"], "nowhere is no run directory"),
        (["eval", "nowhere", "--fractions", "x"], "nowhere is no run directory"),
        (["predict", "nowhere"], "--source"),
        (["predict", "nowhere", "--source", "synthetic:"], "nowhere is no run directory"),
        (["report"], "required: RUN"),
        (["report", "nowhere"], "nowhere is no run directory"),
        (["compare", "--policies", "contrast,nothing"], "no policy 'nothing'"),
        (["compare", "--seeds", "0"], "seeds is 0"),
        (["compare", "--policy", "fifo"], "no option '--policy' in streamclr compare: did you mean '--policies'?"),
        (["compare", "--resume"], "no option '--resume' in streamclr compare"),
        (["compare", "--serve"], "no option '--serve' in streamclr compare"),
        (["compare", "--metrics", "0"], "no option '--metrics' in streamclr compare"),
        (["compare", "--predict"], "no option '--predict' in streamclr compare"),
        (["fleet", "simulate", "--images", "100"], "no option '--images' in streamclr fleet simulate"),
        (["fleet", "simulate", "--supervised"], "no option '--supervised' in streamclr fleet simulate"),
        (["compare", "--policies", "fifo,fifo"], "names a policy twice"),
        (["compare", "--policies", "fifo", "--rescore-every", "5"], "not among --policies"),
        (["compare", "--source", "nowhere"], "no source 'nowhere'"),
        (["compare", "--images", "1"], "before one batch"),
        (["compare", "--width", "0"], "width is 0"),
        (["compare", "--fractions", "9"], "fraction is 9"),
        (["--foo"], "no command before '--foo'"),
        (["data", "put", "cifar10"], "no command 'data put': did you mean 'data get'?"),
        (["data"], "a command must follow 'streamclr data': use get"),
        (["data", "get", "mnist"], "no dataset 'mnist'"),
        (["models", "get", "mobilenet"], "no public weights of 'mobilenet': did you mean 'mobilenet_v2'?"),
        (["models", "get", "resnet18", "--from", "nowhere"], "no file nowhere: give resnet18-f37072fd.pth"),
        (["data", "get", "cifar10", "--from", "nowhere"], "no files of CIFAR-10 at nowhere"),
        (["data", "get", "cifar10", "--from", ""], "no files of CIFAR-10 at ."),
        (["run", "--source", f"cifar10:{__file__}"], "is not a whole archive"),
        (["run", "--memory", "lots"], "memory is 'lots': write a size as 600M or 1.5G"),
        (["run", "--memory", "5M", "--width", "4"], "MiB are taken already: use"),
        (["run", "--policy", "contrast?precision=int4"], "precision is 'int4'"),
        (["doctor", "--source", "nowhere"], "no source 'nowhere'"),
        (["doctor", "--fps", "0"], "fps is 0: use a number above 0"),
        (["doctor", "--fps", "nan"], "fps is nan: use a number above 0"),
        (["doctor", "--width", "0"], "width is 0"),
        (["run", "--source", "rtps://user:secret@host/1"], "no source 'rtps://user:***@host/1'"),
        (["run", "--metrics", "door"], "--metrics is 'door': use a whole number"),
        (["run", "--label-budget", "few"], "label_budget is 'few': use a share as 1%"),
        (["label"], "a command must follow 'streamclr label': use page, export, import, train"),
        (["label", "nowhere", "--prot", "0"], "no option '--prot' in streamclr label page: did you mean '--port'?"),
        (["label", "nowhere"], "nowhere is no run directory"),
        (["label", "train", "nowhere"], "nowhere is no run directory"),
        (["label", "train", "r", "--classifier", "x"], "no classifier 'x': use auto, linear, finetuned, selftrained"),
        (["run", "--classifier", "x"], "no classifier 'x': use auto, linear, finetuned, selftrained, paper"),
        (["label", "exprot", "r", "l.csv"], "no command 'label exprot': did you mean 'label export'?"),
        (["label", "export", "r"], "required: FILE (see streamclr label export --help)"),
        (["label", "train", "r", "l.csv"], "unexpected 'l.csv': write streamclr label train RUN"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "cache"))
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("streamclr: ")
    assert captured.err.count("\n") == 1
    assert told in captured.err
    assert not list(tmp_path.iterdir())  # nothing half-made


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory as a newcomer has it: recordings, pictures, notes, a run with a classifier and one without labels."""
    pytest.importorskip("av")
    path = tmp_path_factory.mktemp("home")
    make_folder(path / "signs")
    write_clip(path / "dog.mp4", n=20)
    make_run(path / "unlabelled")
    (path / "runs").mkdir()
    made_run(path / "runs" / "door", label_budget=None)
    for name, content in (
        ("notes.txt", "hello\n"),
        ("data.csv", "a,b\n"),
        ("junk.mp4", "junk" * 9),
        ("junk.jpg", "junk"),
    ):
        (path / name).write_text(content)
    (path / "empty").mkdir()
    return path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run dgo.mp4", "no file dgo.mp4: did you mean dog.mp4?"),
        ("run DOG.MP4", "no file DOG.MP4: did you mean dog.mp4?"),
        ("run dog.mov", "no file dog.mov: did you mean dog.mp4?"),
        ("run ''", "the source is empty: give a file, a directory, a camera (0, rtsp://…) or a dataset"),
        (
            "compare dog.mp4 --init random",
            "dog.mp4 has no labels, by which policies are compared: use a dataset, or a folder with",
        ),
        ("run videos/dog.mp4", "no file videos/dog.mp4: there is no directory videos"),
        ("run sings", "did you mean signs?"),
        ("run 'signs/ant/*.jpg'", "no file matches 'signs/ant/*.jpg': look into signs/ant, it has 20 .png"),
        ("run signs/ant/0.png signs/ant/1.png", "a command has one --source: a file, a directory, or a pattern in qu"),
        (
            "run signs/ant/0.png",
            "signs/ant/0.png is one image, and an update takes 64: a run learns from many, streamclr",
        ),
        ("run junk.mp4", "cannot play 'junk.mp4' (Invalid data found when processing input): give a video file"),
        ("run junk.jpg", "the image junk.jpg cannot be used, not an image"),
        ("run notes.txt", "notes.txt is read as a list of cameras and recordings: no source 'hello'"),
        ("run data.csv", "data.csv is no file that can be read as images: give a directory, a video"),
        ("run empty", "no images in empty: it needs"),
        ("run webcam", "it is not a file, a directory, a camera (0, rtsp://…) or a dataset; use synthetic, "),
        ("run 77", "no camera '/dev/video77': this machine has"),
        ("run rtsp:/camera/1", "'/camera/1' is no URL with the name of a camera: write rtsp://camera.local/…"),
        ("run http://", "is no URL with the name of a camera"),
        ("run watch:dog.mp4", "no directory 'dog.mp4': dog.mp4 is a file"),
        ("run video:signs", "cannot play 'signs' (Is a directory)"),
        ("run dog.mp4?sizes=64", "the source video has no option 'sizes': did you mean 'size'?"),
        ("run dog.mp4?passes=0", "passes is 0: use at least 1"),
        ("run watch:empty?passes=2", "passes=2 is for recordings, watch has no end: leave it out"),
        ("run dog.mp4 --epochs 2.5", "dog.mp4 has no epochs: write passes=3 in the source"),
        ("run dog.mp4 --images 0", "images is 0: use at least 1"),
        ("run dog.mp4 --images 10k", "--images is '10k': use a whole number"),
        ("run dog.mp4 --images 5", "5 images are asked for, before one batch of 64"),
        ("run dog.mp4 --size 96px", "--size is '96px': use a whole number"),
        ("run dog.mp4 --stc 5", "the source video has no option 'stc'"),
        ("run dog.mp4 --label-budget 0", "label_budget is '0': use a share as 1%, a number of images as 500, or off"),
        ("run dog.mp4 --label-budget 100000", "64M of disk holds 2424 of 96 px: use a larger --label-disk"),
        ("run dog.mp4 --label-disk 64", "label_disk is 64, which holds no image of 96 px: use a larger --label-disk"),
        ("run dog.mp4 --device gpu", "no device 'gpu': use cpu or cuda"),
        ("run dog.mp4 --init imagenet", "no file imagenet for init: use pretrained, random, a file or a directory"),
        ("run dog.mp4 --recipe fast", "no recipe 'fast': use device, paper"),
        ("run dog.mp4 --guards yes", "no guard 'yes': use on, "),
        ("run dog.mp4 --duty 200%", "duty is 200%: use more than 0% and up to 100%"),
        ("run dog.mp4 --decoders 2", "decoders is 2, and dog.mp4 has no image files: leave it out"),
        ("run dog.mp4 --init random --resume", "no unfinished run of these options at runs/video-res"),
        ("run dog.mp4 --out signs --init random", "signs exists already: give another --out, nothing is overwritten"),
        ("run dog.mp4 --out notes.txt --init random", "notes.txt exists already: give another --out"),
        ("run dog.mp4 --output here", "no option '--output' in streamclr run: did you mean '--out'?"),
        ("run dog.mp4 --predict yes", "unexpected 'yes': write streamclr run [SOURCE] [options]"),
        ("predict runs/door", "required: --source"),
        ("predict dog.mp4 --source runs/door", "dog.mp4 is a source, no classifier: write streamclr predict RUN --so"),
        ("predict runs/dor --source dog.mp4", "did you mean runs/door?"),
        ("predict runs/door --source dgo.mp4", "no file dgo.mp4: did you mean dog.mp4?"),
        ("predict unlabelled --source dog.mp4", "label some images, which takes about 2 minutes: streamclr label unl"),
        ("predict signs --source signs", "signs is no run directory, and nothing that 'streamclr export' wrote"),
        ("predict runs/door --source signs --fraction 0.5", "no classifier for the fraction 0.5: use 1.0"),
        ("predict runs/door --source signs --csv notes.txt", "notes.txt exists already: give another --csv"),
        ("label runs", "runs is no run directory: but it has some in it, give one: runs/door"),
        ("label runs/dor", "runs/dor is no run directory: did you mean runs/door?"),
        ("label runs/door", "runs/door has no label queue: run with --label-budget 200"),
        ("label dog.mp4", "dog.mp4 is no run directory: it is a file; `streamclr run SOURCE --out DIR` makes"),
        ("label import unlabelled nope.csv", "cannot read nope.csv (No such file or directory)"),
        ("label import unlabelled data.csv", "data.csv, line 1: no column 'key': nothing was changed"),
        ("label export unlabelled q.xlsx", "q.xlsx has no known suffix: use .json (Label Studio) or .csv"),
        ("export unlabelled", "unlabelled has no classifier yet: label some images"),
        ("export runs/door --format tflite", "no format 'tflite': use onnx, executorch, torch, pretrained"),
        ("report runs/door --out notes.txt", "notes.txt exists already and is no report: give another --out"),
        ("report runs/door --out signs", "signs is a directory: give a file, as --out signs/report.html"),
        ("rollback unlabelled", "unlabelled serves no version: run with --predict, and give it labels"),
        ("doctor dgo.mp4", "no file dgo.mp4: did you mean dog.mp4?"),
        ("eval runs/door --fractions 2", "label fraction is 2.0: use a number above 0 and up to 1"),
        ("train dog.mp4", "no command 'train'"),
    ],
)
def test_a_newcomers_mistake_is_one_line_and_exit_code_2(words, told, home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "80")
    before = {path for path in home.rglob("*") if ".sqlite" not in path.name}
    assert main(shlex.split(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("streamclr: ")
    assert captured.err.count("\n") == 1
    assert told in captured.err
    assert {path for path in home.rglob("*") if ".sqlite" not in path.name} == before


def test_what_the_disk_refuses_is_one_line_too(folder, capsys):
    main(["run", "--source", folder, *FAST, "--fractions", "1", "--out", "r"])
    capsys.readouterr()
    assert main(["report", "r", "--out", "no/such/place/report.html"]) == 2
    assert capsys.readouterr().err == "streamclr: No such file or directory: no/such/place/report.html\n"


def test_a_journal_that_is_being_written_can_be_reported(folder, tmp_path):
    main(["run", "--source", folder, *FAST, "--fractions", "1", "--out", "r"])
    (tmp_path / "r" / "results.json").unlink()
    with (tmp_path / "r" / "journal.jsonl").open("a") as journal:
        journal.write('{"number": 6, "se')
    assert main(["report", "r"]) == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_page_of_its_own_with_defaults(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: streamclr {name} ")
    assert " ".join(COMMANDS[name].summary.split()) in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert name != "run" or (
        "--rescore-every" in words and "10M from scratch; paper: 256]" in words and "draws [0]" in words
    )


@pytest.mark.parametrize("group", ["label", "data", "fleet"])
def test_the_help_of_a_group_lists_its_commands(group, capsys):
    with pytest.raises(SystemExit) as stop:
        main([group, "--help"])
    assert stop.value.code == 0
    listed = re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == [name.split()[1] for name in COMMANDS if name.startswith(f"{group} ")]


@pytest.mark.parametrize(
    "words", [["label", "r"], ["label", "--port", "0", "r"], ["label", "page", "r", "--port", "0"]]
)
def test_label_with_a_run_alone_is_its_page(words):
    function, config = parse(words)
    assert function is COMMANDS["label page"].function
    assert (config.run, config.port) == ("r", 0 if "0" in words else None)


def test_help_and_version(capsys):
    for words in ([], ["--help"], ["--version"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "streamclr 0." in out
    assert "as few as 1 % labels" in out


@pytest.mark.system
def test_the_installed_command_and_a_closed_pipe(folder, tmp_path):
    main(["run", "--source", folder, *FAST, "--fractions", "1", "--out", "r"])
    script = f"'{sys.executable}' -m streamclr predict r --source '{folder}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert json.loads(done.stdout)["image"] == 0
    assert "Traceback" not in done.stderr
    missing = subprocess.run(
        [sys.executable, "-m", "streamclr", "eval", "x"], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
