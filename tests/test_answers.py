"""Answers that leave the machine: which are told, the outbox, files, and a web server that is killed and comes back."""

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from streamclr import UserError
from streamclr.answers.address import parse_address
from streamclr.answers.answers import addresses, deliveries_of
from streamclr.answers.choice import UNKNOWN, Chooser
from streamclr.answers.outbox import Outbox
from streamclr.records.answering import AnswerOptions
from support.answering import CLASSES, Told
from support.camera import HeldPort
from support.waiting import until

DOOR, YARD = ("door", ""), ("yard", "")


def told_by(chooser, *cats, place=DOOR):
    found = []
    for cat in cats:
        name, probability = chooser.answer(place, np.array([cat, 1 - cat]), CLASSES)
        if chooser.is_told(place, name):
            found.append((name, probability))
    return found


def test_an_answer_is_told_when_the_class_changes_for_each_camera():
    chooser = Chooser()
    assert told_by(chooser, 0.9, 0.8, 0.1, 0.2, 0.6) == [("cat", 0.9), ("dog", 0.9), ("cat", 0.6)]
    assert told_by(chooser, 0.7, 0.7, place=YARD) == [("cat", 0.7)]
    assert told_by(Chooser(every_frame=True), 0.9, 0.8) == [("cat", 0.9), ("cat", 0.8)]


def test_below_the_threshold_the_class_is_unknown():
    assert told_by(Chooser(0.7), 0.9, 0.6, 0.5, 0.7) == [("cat", 0.9), (UNKNOWN, 0.6), ("cat", 0.7)]


def test_smoothing_is_the_mean_of_the_last_frames_of_one_camera():
    chooser = Chooser(smooth=3, every_frame=True)
    assert told_by(chooser, 0.9, 0.6, 0.0, 0.0) == [("cat", 0.9), ("cat", 0.75), ("cat", 0.5), ("dog", 0.8)]
    assert told_by(chooser, 0.9, place=YARD) == [("cat", 0.9)]
    name, probability = chooser.answer(DOOR, np.array([0.0, 0.2, 0.8]), ["cat", "dog", "fox"])  # of another version
    assert (name, probability) == ("fox", 0.8)


# ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "read", "settle", "restart", "break"]), st.integers(1, 9)), max_size=60),
    st.integers(60, 400),
    st.integers(1, 4),
)
def test_the_outbox_gives_each_answer_once_and_in_order_but_the_oldest(tmp_path_factory, steps, size, n_files):
    place = tmp_path_factory.mktemp("outbox")
    outbox, n, position, offset, held = Outbox(place, size, n_files), 0, 0, (0, 0), []
    for step, number in steps:
        if step == "put":
            assert outbox.put([{"image": n + i} for i in range(number)])
            n += number
        elif step == "read" and not held:
            held, offset = outbox.read(position, offset, number)
            first = max(position + 1, outbox.oldest)
            assert [entry.number for entry in held] == list(range(first, min(first + number, n + 1)))
        elif step == "settle":
            for entry in held:
                assert json.loads(entry.line) == entry.answer == {"id": entry.number, "image": entry.number - 1}
                position = entry.number
            held = []
        elif step in ("restart", "break"):
            outbox.close()
            if step == "break" and (files := sorted(place.glob("*.jsonl"))):
                with files[-1].open("ab") as file:
                    file.write(b'{"id": 99')  # of a line that a power cut has broken
            outbox, held, offset = Outbox(place, size, n_files), [], (0, 0)
        assert outbox.last == n
        assert len(list(place.glob("*.jsonl"))) <= n_files
    rest, _ = outbox.read(position, (0, 0), 10**6)
    assert [entry.number for entry in rest] == list(range(max(position + 1, outbox.oldest), n + 1))
    outbox.close()


def test_a_full_disk_costs_answers_and_they_are_counted(tmp_path, monkeypatch):
    told = Told(tmp_path, str(tmp_path / "out.jsonl"), every_frame=True)
    told.frame(0.9)
    real = os.write

    def write(fd, content):
        if "/answers/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        return real(fd, content)

    with monkeypatch.context() as patch:
        patch.setattr("streamclr.records.journal.os.write", write)
        for _ in range(5):
            told.frame(0.9)
    told.frame(0.9)
    until(lambda: told.state()["waiting"] == 0)
    told.close()
    assert told.state() == {"sent": 2, "dropped": 5, "waiting": 0, "connected": False}
    assert [line["id"] for line in lines_of(tmp_path / "out.jsonl")] == [1, 7]


# ----------------------------------------------------------------------------------------------------------------------


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_has_what_is_to_be_known_of_each_answer(tmp_path):
    told = Told(tmp_path, str(tmp_path / "out.jsonl"), snapshot=True)
    for cat in (0.9, 0.8, 0.1):
        told.frame(cat)
    told.close()
    first, second = lines_of(tmp_path / "out.jsonl")
    assert set(first) == {"id", "run", "image", "class", "probability", "version", "time", "source", "snapshot"}
    assert [(line["id"], line["image"], line["class"]) for line in (first, second)] == [(1, 0, "cat"), (2, 2, "dog")]
    assert (first["probability"], first["source"], first["version"]) == (0.9, "door", 1)
    assert Image.open(io.BytesIO(base64.b64decode(first["snapshot"]))).size == (8, 8)
    assert deliveries_of(tmp_path / "run" / "answers") == {
        str(tmp_path / "out.jsonl"): {"sent": 2, "dropped": 0, "waiting": 0}
    }


def test_after_a_crash_no_line_is_missing_none_is_twice_and_none_is_broken(tmp_path):
    """What a crash leaves: a position before the last lines, half a line, and frames that come again."""
    out = tmp_path / "out.jsonl"
    told = Told(tmp_path, str(out), every_frame=True, repeats=True)
    told.frame(0.9)
    until(lambda: told.state()["sent"] == 1)
    (position,) = (tmp_path / "run" / "answers").glob("file-*.json")
    before = position.read_bytes()
    for _ in range(9):
        told.frame(0.9)
    told.close()
    position.write_bytes(before)
    with out.open("a") as file:
        file.write('{"id": 11, "ima')
    again = Told(tmp_path, str(out), every_frame=True, repeats=True)
    for image in range(4, 13):
        again.frame(0.9, image=image)
    again.close()
    assert [line["image"] for line in lines_of(out)] == list(range(13))
    assert [line["id"] for line in lines_of(out)] == list(range(1, 14))


def test_frames_of_a_camera_do_not_come_again_and_their_numbers_may(tmp_path):
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        told = Told(tmp_path, str(out), every_frame=True)
        for image in range(3):
            told.frame(0.9, image=image)
        told.close()
    assert [line["image"] for line in lines_of(out)] == [0, 1, 2] * 2
    assert [line["id"] for line in lines_of(out)] == [1, 2, 3, 4, 5, 6]


def test_a_restart_is_no_change(tmp_path):
    out = tmp_path / "out.jsonl"
    for cat in (0.9, 0.8, 0.1):
        told = Told(tmp_path, str(out), names=["door", "yard"])
        told.frame(cat)
        told.frame(0.9, "yard")
        told.close()
    assert [(line["source"], line["class"]) for line in lines_of(out)] == [
        ("door", "cat"),
        ("yard", "cat"),
        ("door", "dog"),
    ]


def test_a_new_destination_gets_what_comes_from_then_on(tmp_path):
    out = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    for to in (out[:1], out):
        told = Told(tmp_path, *to, every_frame=True)
        told.frame(0.9)
        told.close()
    assert [[line["id"] for line in lines_of(tmp_path / f"{name}.jsonl")] for name in "ab"] == [[1, 2], [2]]


def test_a_file_that_cannot_be_written_is_tried_again(tmp_path):
    (tmp_path / "place").mkdir()
    told = Told(tmp_path, str(tmp_path / "place" / "out.jsonl"), every_frame=True)
    until(lambda: told.state()["connected"])
    (tmp_path / "place").rmdir()
    told.frame(0.9)
    until(lambda: told.events)
    assert "it cannot be written (No such file or directory): its answers wait" in told.events[0]
    (tmp_path / "place").mkdir()
    until(lambda: told.state()["sent"] == 1)
    told.close()
    assert "reached again" in told.events[1]


# ----------------------------------------------------------------------------------------------------------------------

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, file = int(sys.argv[1]), open(sys.argv[2], "ab", buffering=0)
statuses = list(map(int, sys.argv[3:]))
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = statuses.pop(0) if statuses else 204
        if status == 204:
            own = [self.path, self.headers["Idempotency-Key"], self.headers["Authorization"], json.loads(body)]
            file.write(json.dumps(own).encode() + b"\\n")
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
print("ready", flush=True)
server.serve_forever()
"""


class Hook:
    """A web server in a process of its own. statuses: of its first answers; then 204."""

    def __init__(self, path):
        self._port, self.file = HeldPort(), path / "hook"
        self.file.touch()
        self.url = f"http://127.0.0.1:{self._port.number}"
        self._process = None

    def start(self, *statuses):
        command = [sys.executable, "-c", SERVER, str(self._port.number), str(self.file), *map(str, statuses)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout.readline() == b"ready\n"

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)
        self._process.stdout.close()

    def got(self):
        """Path, key, Authorization and answer of each request."""
        return lines_of(self.file)

    def close(self):
        if self._process.poll() is None:
            self.kill()
        self._port.close()


@pytest.fixture
def hook(tmp_path):
    with closing(Hook(tmp_path)) as hook:
        yield hook


@pytest.mark.system
def test_a_web_server_that_is_killed_again_and_again_gets_every_answer_in_order(hook, tmp_path, monkeypatch):
    monkeypatch.setenv("HOOK", "Bearer se-cret")
    hook.start()
    told = Told(tmp_path, f"{hook.url}/api/se-cret?x=1#authorization_env=HOOK", every_frame=True)
    for _ in range(4):
        n = told.n + 10
        while told.n < n:
            told.frame(0.9)
        until(lambda n=n: told.state()["sent"] == n)
        hook.kill()
        told.frame(0.9)
        until(lambda: not told.state()["connected"])
        hook.start(503, 429)  # at first it is not ready
    until(lambda: not told.state()["waiting"])
    told.close()
    assert told.state() == {"sent": 44, "dropped": 0, "waiting": 0, "connected": False}
    got = hook.got()
    assert {(path, secret) for path, _, secret, _ in got} == {("/api/se-cret?x=1", "Bearer se-cret")}
    by_key = {key: answer["id"] for _, key, _, answer in got}  # a server that dies before it answers is asked again
    assert list(by_key.values()) == list(range(1, 45))
    content = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"se-cret" not in content
    assert not any("se-cret" in event for event in told.events)
    assert sum("its answers wait" in event for event in told.events) == 4


@pytest.mark.system
def test_what_a_web_server_refuses_is_dropped_and_the_rest_goes_on(hook, tmp_path):
    hook.start(204, 400, 404, 302)
    told = Told(tmp_path, f"{hook.url}/a", every_frame=True)
    for _ in range(6):
        told.frame(0.9)
    until(lambda: not told.state()["waiting"])
    told.close()
    assert told.state() == {"sent": 3, "dropped": 3, "waiting": 0, "connected": False}
    assert [answer["id"] for *_, answer in hook.got()] == [1, 5, 6]
    assert [event.partition(": ")[2] for event in told.events] == [
        "HTTP 400: 1 answers dropped so far",
        "HTTP 404: 2 answers dropped so far",
    ]


@pytest.mark.system
def test_a_web_server_that_hangs_delays_nothing(tmp_path):
    """It takes connections and never answers: frames are taken on, and the end comes in time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = Told(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}/a", every_frame=True)
        told.frame(0.9)
        client, _ = server.accept()
        for _ in range(500):
            told.frame(0.9)
        assert told.state()["waiting"] == 501
        started = time.monotonic()
        told.close(patience=0.2)
        assert time.monotonic() - started < 60  # it would hang until the test is killed
        client.close()


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("ftp://host/x", "--to ftp://…: use mqtt://broker/topic"),
        ("notes.txt", "--to 'notes.txt': use mqtt://broker/topic"),
        ("nowhere/a.jsonl", "no file can be written there; make the directory nowhere first"),
        ("mqtt://broker", "give a topic without + and #, as in mqtt://broker/home/door"),
        ("mqtt://broker/a/+/b", "give a topic without + and #"),
        ("mqtt://broker/a#discovery=a/%2B", "discovery is 'a/+': use a prefix of topics without + and #"),
        ("mqtt:///topic", "has no host, or a port that is no number"),
        ("mqtt://me:se/cret@broker/topic", "in a password, write / as %2F"),
        ("mqtt://broker/a#usr=me", "--to mqtt has no option 'usr': did you mean 'user'?"),
        ("mqtt://broker/a#password_env=NONE_SUCH", "no environment variable 'NONE_SUCH', which password_env names"),
        ("mqtt://broker/a#password_file=none", "password_file 'none' cannot be read (No such file or directory)"),
        ("mqtt://broker/a#password_file=none&password_env=X", "both password_env and password_file are given"),
        ("mqtts://broker/a#ca=none", "ca 'none' is no file with certificates (PEM)"),
        ("https://me:cret@hook/a", "https://hook has a user and a password: put the header into a variable"),
        ("https://hook/a b", "write signs in its path that are not ASCII as %XX"),
    ],
)
def test_a_destination_that_cannot_be_is_one_line_without_its_secret(to, message):
    with pytest.raises(UserError) as error:
        parse_address(to)
    assert message in str(error.value)
    assert "cret" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.5}, "--threshold is about answers that are sent: say where with --to"),
        ({"every_frame": True}, "--every-frame is about answers"),
        ({"to": ("a.jsonl",), "threshold": 70.0}, "threshold is 70.0: use a probability from 0 to 1"),
        ({"to": ("a.jsonl",), "smooth": 0}, "smooth is 0: use 1 (no smoothing) to 1000 frames"),
        ({"to": ("a.jsonl", "./a.jsonl")}, "--to a.jsonl is given twice"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(UserError) as error:
        addresses(AnswerOptions(**options))
    assert message in str(error.value)


def test_a_password_may_stand_in_a_file_or_in_the_environment(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("se/cret\n")
    monkeypatch.setenv("SECRET", "se/cret")
    found = [
        parse_address(to)
        for to in (
            "mqtt://me:se%2Fcret@broker:1884/home/door/",
            f"mqtt://me@broker:1884/home/door#password_file={tmp_path / 'secret'}",
            "mqtt://broker:1884/home/door#user=me&password_env=SECRET",
        )
    ]
    assert found[0] == found[1] == found[2]
    assert (found[0].user, found[0].secret, found[0].target) == ("me", "se/cret", "home/door")
    assert found[0].name == "mqtt://broker:1884/home/door"
    assert parse_address("https://hooks.example/T0/B1?key=2").name == "https://hooks.example/***"
    assert "cret" not in found[0].key
    assert found[0].discovery == "homeassistant"
    assert parse_address("mqtt://broker/home#discovery=").discovery == ""
