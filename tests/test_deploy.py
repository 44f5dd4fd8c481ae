"""A fleet of processes on loopback, with TLS and keys; needs Flower."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamclr import UserError
from streamclr.base.tensors import load_tensors
from streamclr.fleet.options import DeviceOptions, KeysOptions, ServerOptions
from streamclr.fleet.rounds import read_rounds
from streamclr.records.directory import RunDirectory

pytest.importorskip("flwr")

from streamclr.fleet.deploy import join, serve
from streamclr.fleet.keys import make_keys

DEADLINE, MOST = 600, 900  # seconds: of a round, and to wait for anything; no test gets there unless it fails
POISON = """
import torch
from streamclr.fleet import device

learn = device.Device.learn

def poisoned(self, *args):
    update = learn(self, *args)
    next(iter(update.weights.values())).fill_(float("nan"))
    return update

device.Device.learn = poisoned
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Place:
    """A directory with keys, and the processes that were started there; all end with the test."""

    def __init__(self, path):
        self.path, self.port, self.started = path, free_port(), []
        make_keys(KeysOptions(str(path / "keys"), host="fleet.example.org", devices=4))  # and this machine itself
        make_keys(KeysOptions(str(path / "others"), devices=1))

    def start(self, name, *words, path=""):
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([path, *sys.path])}
        log = (self.path / f"{name}.log").open("ab")
        command = [sys.executable, "-m", "streamclr", "fleet", *map(str, words)]
        self.started.append(subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=self.path))
        return self.started[-1]

    def serve(self, *more):
        words = ("--keys", "keys", "--out", "server", "--port", self.port, "--width", 1, "--stem", "small", "--size", 8)
        return self.start("server", "server", *words, "--round-images", 16, "--deadline", DEADLINE, *more)

    def device(self, number, key=None, path=""):
        key = key or f"keys/device-{number:04}"
        words = ("--source", f"synthetic:?seed={number}", "--server", f"127.0.0.1:{self.port}", "--key", key)
        name = f"device{number}"
        return self.start(name, "device", *words, "--ca", "keys/ca.crt", "--buffer", 8, "--out", name, path=path)

    def log(self, name):
        return (self.path / f"{name}.log").read_text()

    def wait(self, what, until, seconds=MOST):
        """The first round, of those from now on, of which something is true."""
        begun, n_before = time.monotonic(), len(self.rounds())
        while time.monotonic() - begun < seconds:
            for line in self.rounds()[n_before:]:
                if until(line):
                    return line
            time.sleep(0.5)
        pytest.fail(f"no {what} in {seconds} s: {self.rounds()[-3:]} {self.log('server')}")

    def wait_for_words(self, name, words, seconds=MOST):
        begun = time.monotonic()
        while words not in self.log(name):
            if time.monotonic() - begun > seconds:
                pytest.fail(f"no {words!r} of {name} in {seconds} s: {self.log(name)} {self.log('server')}")
            time.sleep(0.1)

    def rounds(self):
        return read_rounds(self.path / "server") if (self.path / "server" / "rounds.jsonl").exists() else []

    def close(self):
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            process.wait(MOST)


@contextmanager
def placed(path):
    place = Place(path)
    try:
        yield place
    finally:
        place.close()


def kill_with_all_below(process):
    """As a power cut would: nothing of it says goodbye."""
    below = [process.pid]
    for pid in below:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            below += map(int, task.read_text().split())
    for pid in below:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.long  # 28 s of CPU time, which is two minutes on a busy machine
def test_two_devices_do_a_round_and_a_stranger_is_turned_away(tmp_path):
    with placed(tmp_path) as place:
        server = place.serve("--rounds", 1, "--patience", 1000)
        place.wait_for_words("server", "serving the fleet on")
        place.device(1)
        place.device(9, key="others/device-0001")
        place.wait_for_words("device9", "does not know this device's key")
        assert not place.rounds()  # it waits for two, and the stranger is none
        place.device(2)
        assert server.wait(MOST) == 0
        (line,) = place.rounds()
        assert (len(set(line["taken"])), line["refused"], line["failed"]) == (2, {}, {})
        assert all(RunDirectory(tmp_path / f"device{number}").steps() for number in (1, 2))
        assert not (tmp_path / "device9").exists()  # it was never asked for anything


@pytest.mark.long
def test_a_fleet_on_loopback(tmp_path):
    with placed(tmp_path) as place:
        server = place.serve("--rounds", 1000)
        devices = {number: place.device(number) for number in (1, 2, 3)}
        full = place.wait("round of three", lambda line: len(line["taken"]) == 3)

        place.device(9, key="others/device-0001")
        place.wait("round of the same three", lambda line: "does not know this device's key" in place.log("device9"))

        kill_with_all_below(devices[3])
        less = place.wait("round of two", lambda line: len(line["taken"]) == 2)
        (lost,) = set(full["taken"]) - set(less["taken"])
        assert less["seconds"] < DEADLINE
        n_steps = len(RunDirectory(tmp_path / "device3").steps())
        place.device(3)
        back = place.wait("return of the third", lambda line: lost in line["taken"])
        assert not back["refused"]
        assert len(RunDirectory(tmp_path / "device3").steps()) > n_steps  # it went on with its own run

        (tmp_path / "poison").mkdir()
        (tmp_path / "poison" / "sitecustomize.py").write_text(POISON)
        place.device(4, path=str(tmp_path / "poison"))
        refused = place.wait("update refused", lambda line: line["refused"] and len(line["taken"]) >= 2)
        assert set(refused["refused"].values()) == {"not finite"}
        n_refused = sum(len(line["refused"]) for line in place.rounds()[: refused["number"]])
        assert refused["refused_so_far"] == {"not finite": n_refused}

        server.send_signal(signal.SIGTERM)
        assert server.wait(MOST) == 128 + signal.SIGTERM
        assert "run the same command to continue" in place.log("server")
        assert all(len(line["taken"]) + len(line["refused"]) <= 4 for line in place.rounds())
        assert not (tmp_path / "device9").exists()  # it was never asked for anything
        weights = load_tensors(tmp_path / "server" / "model.safetensors")
        assert all(bool(tensor.isfinite().all()) for tensor in weights.values())

        n_rounds = len(place.rounds())
        place.serve("--rounds", n_rounds + 2)  # and the devices find it again by themselves
        place.wait("round after the server's return", lambda line: line["number"] > n_rounds)
        assert "continuing after round" in place.log("server")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": None}, "--keys is missing"),
        ({"keys": "nowhere"}, "has no ca.crt"),
        ({"port": 0}, "port is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"statistics": "mine"}, "--statistics is 'mine'"),
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path, change, message):
    make_keys(KeysOptions(str(tmp_path / "keys")))
    options = {"keys": str(tmp_path / "keys"), "out": str(tmp_path / "out"), "width": 1, "port": free_port()}
    with pytest.raises(UserError, match=message):
        serve(ServerOptions(**options | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": None}, "--key is missing"),
        ({"ca": "nowhere"}, "no file nowhere"),
        ({"insecure": True}, "use --insecure alone"),
        ({"server": "host"}, "use host:port"),
        ({"source": "nothing"}, "no source 'nothing'"),
    ],
)
def test_a_device_that_cannot_start_says_why(tmp_path, change, message):
    make_keys(KeysOptions(str(tmp_path)))
    key, ca = str(tmp_path / "device-0001"), str(tmp_path / "ca.crt")
    options = {"source": "synthetic:", "server": "127.0.0.1:1", "key": key, "ca": ca, "out": str(tmp_path / "out")}
    with pytest.raises(UserError, match=message):
        join(DeviceOptions(**options | change))


def test_keys_are_private_and_never_overwritten(tmp_path):
    directory, n_new = make_keys(KeysOptions(str(tmp_path / "keys"), devices=2))
    assert n_new == 2
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert make_keys(KeysOptions(str(directory), devices=3)) == (directory, 1)
    assert all((directory / name).read_bytes() == content for name, content in before.items())
    private = {file.name for file in directory.iterdir() if file.stat().st_mode & 0o077 == 0}
    assert private == {"ca.key", "server.key", "device-0001", "device-0002", "device-0003"}
    make_keys(KeysOptions(str(directory), host="127.0.0.1"))
    with pytest.raises(UserError, match=r"is not for 192\.0\.2\.5: give another directory"):
        make_keys(KeysOptions(str(directory), host="localhost,192.0.2.5"))
    for change in ({"devices": 0}, {"days": 0}, {"host": " "}):
        with pytest.raises(UserError):
            make_keys(KeysOptions(**{"directory": str(directory)} | change))
