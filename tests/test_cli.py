import json
import subprocess
import sys

import pytest

from streamclr.cli import main
from test_run import make_folder

FAST = ["--width", "2", "--buffer", "8", "--images", "40", "--probes", "2", "--stc", "5", "--lr", "1e-3"]


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
    assert "mean ± standard deviation of 2 seeds" in out
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
        (["run", "--polcy", "fifo"], "did you mean '--policy'"),
        (["run", "--policy", "lifo"], "no policy 'lifo': did you mean 'fifo'?"),
        (["run", "--buffer", "many"], "--buffer is 'many': use a whole number"),
        (["run", "--buffer", "1"], "buffer_size is 1: use at least 2"),
        (["run", "--source", "nowhere"], "no source 'nowhere'"),
        (["run", "--source", "folder:nowhere"], "no directory 'nowhere'"),
        (["run", "--source"], "expected one argument"),
        (["run", "extra"], "has no 'extra'"),
        (["eval"], "run"),
        (["eval", "nowhere"], "nowhere is no run directory"),
        (["eval", "nowhere", "--fractions", "x"], "nowhere is no run directory"),
        (["predict", "nowhere"], "--source"),
        (["predict", "nowhere", "--source", "synthetic:"], "nowhere is no run directory"),
        (["report"], "runs"),
        (["report", "nowhere"], "nowhere is no run directory"),
        (["compare", "--policies", "contrast,nothing"], "no policy 'nothing'"),
        (["compare", "--seeds", "0"], "seeds is 0"),
        (["compare", "--policy", "fifo"], "compare takes --policies"),
        (["compare", "--policies", "fifo,fifo"], "names a policy twice"),
        (["compare", "--policies", "fifo", "--rescore-every", "5"], "not among --policies"),
        (["compare", "--source", "nowhere"], "no source 'nowhere'"),
        (["compare", "--images", "1"], "before one batch"),
        (["compare", "--width", "0"], "width is 0"),
        (["compare", "--fractions", "9"], "fraction is 9"),
        (["--foo"], "no command before '--foo'"),
        (["data", "put", "cifar10"], "streamclr data get NAME"),
        (["data", "get", "mnist"], "no dataset 'mnist'"),
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


@pytest.mark.parametrize("command", ["demo", "run", "eval", "predict", "report", "compare", "data", "doctor"])
def test_help_tells_every_option_with_its_default(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert command != "run" or ("--rescore-every" in out and "[256]" in out)


def test_help_and_version(capsys):
    for words in ([], ["--help"], ["--version"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
    assert "streamclr 0." in capsys.readouterr().out


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
