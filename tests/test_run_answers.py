"""`streamclr run --predict --to …` as a whole: what arrives, what is learned, kills, stops, and what nobody may see."""

import json
import signal
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from streamclr import UserError
from streamclr.base.errors import Stopped
from streamclr.classifier import Classifier, Head
from streamclr.models.versions import Score, Version, Versions
from streamclr.records.checkpoints import Pace
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.run import run
from support.camera import HeldPort, write_clip
from support.images import make_folder
from support.processes import kill_and_restart
from support.waiting import until

STREAMCLR = [sys.executable, "-m", "streamclr"]
N_BEFORE = 8  # frames of a run before it has a version


@pytest.fixture
def config(tmp_path):
    return RunOptions(
        source=f"folder:{make_folder(tmp_path / 'images')}?stc=5", buffer=8, width=1, images=80, probes=0,
        fractions="1", classifier="linear", checkpoint_steps=2, out=str(tmp_path / "run"),
    )  # fmt: skip


def begun(config, monkeypatch):
    """The directory of a run that was stopped after its first step, and has a version to serve."""
    with monkeypatch.context() as patch:
        patch.setattr(Pace, "due", lambda self: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped):
            run(config)
    directory = RunDirectory(Path(config.out))
    model = directory.config.architecture.make_model()
    classifier = Classifier(model, Head(model.n_features, 2), ("ant", "bee"), directory.image_size)
    Versions(directory).take(Version(classifier, 0, frozenset(), frozenset(), Score(0, 0, 0.0)), None)
    return directory


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def everything_in(path):
    return b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())


def test_each_frame_of_a_folder_is_answered_once_with_its_file_and_nothing_else_is_learned(
    config, tmp_path, monkeypatch
):
    plain, _ = run(replace(config, out=str(tmp_path / "plain")))
    begun(config, monkeypatch)
    out = tmp_path / "out.jsonl"
    path, results = run(replace(config, predict=True, to=(str(out),), every_frame=True))
    assert (path / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    answers = lines_of(out)
    predictions = lines_of(path / "predictions.jsonl")
    assert [answer["image"] for answer in answers] == list(range(N_BEFORE, 80))
    for answer, prediction in zip(answers, predictions, strict=True):
        assert {key: answer[key] for key in prediction} == prediction
        assert prediction["source"] == f"folder:{tmp_path / 'images'}"
        assert (tmp_path / "images").resolve() in (tmp_path / prediction["file"]).parents
    assert len({answer["file"] for answer in answers[:32]}) == 32
    assert results["answers"] == {str(out): {"sent": 72, "dropped": 0, "waiting": 0}}
    status = json.loads((path / "status.json").read_text())
    assert set(status["answers"][str(out)]) == {"sent", "dropped", "waiting", "connected"}


def test_a_run_whose_broker_is_away_ends_and_its_password_is_nowhere(config, tmp_path, monkeypatch, capfd):
    pytest.importorskip("paho.mqtt")
    directory = begun(config, monkeypatch)
    with closing(HeldPort()) as port:  # where nobody listens
        name = f"mqtt://127.0.0.1:{port.number}/home/door"
        to = (f"mqtt://me:s-ecret@127.0.0.1:{port.number}/home/door", "http://127.0.0.1:1/s-ecret?key=s-ecret")
        _, results = run(replace(config, predict=True, to=to, every_frame=True))
    assert results["answers"] == {
        name: {"sent": 0, "dropped": 0, "waiting": 72},
        "http://127.0.0.1:1/***": {"sent": 0, "dropped": 0, "waiting": 72},
    }
    assert f"{name}: Connection refused: its answers wait" in capfd.readouterr().err
    assert b"s-ecret" not in everything_in(directory.path)


@pytest.mark.system
def test_a_run_sends_to_a_broker(config, tmp_path, monkeypatch):
    pytest.importorskip("paho.mqtt")
    from support.broker import Broker, Listener

    directory = begun(config, monkeypatch)
    monkeypatch.setenv("SECRET", "s-ecret")
    with closing(Broker(tmp_path / "broker")) as broker, closing(Listener(broker.port, "home/#")) as listener:
        to = f"mqtt://me@127.0.0.1:{broker.port}/home/door#password_env=SECRET"
        _, results = run(replace(config, predict=True, to=(to,), every_frame=True, smooth=3))
        until(lambda: len(listener.answers()) == 72)
        assert [answer["image"] for answer in listener.answers()] == list(range(N_BEFORE, 80))
        until(lambda: listener.messages[-1][:2] == ("home/door/availability", b"offline"))
    assert list(results["answers"].values()) == [{"sent": 72, "dropped": 0, "waiting": 0}]
    assert b"s-ecret" not in everything_in(directory.path)


def test_sending_needs_predictions(config):
    with pytest.raises(UserError, match="--to sends the answers of --predict: give --predict too"):
        run(replace(config, to=("a.jsonl",)))


@pytest.mark.system
@pytest.mark.parametrize("n_kills", [4, pytest.param(30, marks=pytest.mark.long)])
def test_kill_9_at_random_moments_loses_no_answer_and_sends_none_twice(tmp_path, monkeypatch, n_kills):
    """To a file; of a broker or a web server those may come twice whose arrival was not yet noted."""
    pytest.importorskip("av")
    clip, path, out = write_clip(tmp_path / "clip.mp4", n=40 * n_kills + 60), tmp_path / "run", tmp_path / "out.jsonl"
    words = ["run", "--source", f"{clip}", "--size", "16", "--buffer", "8", "--segment", "2", "--batch", "4"]
    words += ["--width", "1", "--checkpoint-steps", "1"]
    options = RunOptions(
        source=str(clip), size=16, buffer=8, segment=2, batch=4, width=1, checkpoint_steps=1, out=str(path)
    )
    begun(options, monkeypatch)
    n_before = 2
    sending = [*words, "--predict", "--to", str(out), "--every-frame", "--out", str(path)]
    assert kill_and_restart(path, sending, n_kills, seed=11) == n_kills
    results = RunDirectory(path).results
    answers = lines_of(out)
    assert [answer["image"] for answer in answers] == list(range(n_before, results["images"]))
    assert [answer["id"] for answer in answers] == list(range(1, len(answers) + 1))
    assert {answer["source"] for answer in answers} == {str(clip)}
    assert results["answers"] == {str(out): {"sent": len(answers), "dropped": 0, "waiting": 0}}


@pytest.mark.system
def test_ctrl_c_ends_a_run_whose_destinations_hang(tmp_path, monkeypatch):
    """One takes connections and says nothing, at the others nobody listens; what waits goes out when it goes on."""
    pytest.importorskip("av")
    clip, path, out = write_clip(tmp_path / "clip.mp4", n=400), tmp_path / "run", tmp_path / "out.jsonl"
    options = RunOptions(source=str(clip), size=16, buffer=8, width=1, checkpoint_steps=1, out=str(path))
    begun(options, monkeypatch)
    words = ["run", str(clip), "--size", "16", "--buffer", "8", "--width", "1", "--checkpoint-steps", "1"]
    words += ["--predict", "--every-frame", "--to", str(out), "--duty", "5%", "--out", str(path)]
    with socket.create_server(("127.0.0.1", 0)) as server, closing(HeldPort()) as port:
        hanging = f"127.0.0.1:{server.getsockname()[1]}"
        words += ["--to", f"http://{hanging}/a", "--to", f"http://127.0.0.1:{port.number}/a"]
        process = subprocess.Popen([*STREAMCLR, *words], stderr=subprocess.PIPE, text=True)
        until(lambda: out.exists() and len(out.read_text().splitlines()) > 20, seconds=120)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped after step" in told
    assert f"http://{hanging}/***: " in told
    assert told.count("answers were not sent") == 2
    assert "Traceback" not in told
