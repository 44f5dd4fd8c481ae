"""The dashboard beside a run: where it listens, what is printed, and that it may outlive the run."""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing

import httpx
import pytest

from streamclr import UserError
from streamclr.cli.entry import main
from streamclr.records.options import RunOptions
from streamclr.runs import dashboard
from streamclr.runs.dashboard import CLEARED, announce, check_can_serve, lan_address, listen, qr_code

URL = "http://192.168.178.23:8765/?token=GfUSvgONKeNnjFZXbntCO8cvAnJ0wR1CYyib6-hUOwA"


def test_the_usual_port_or_any_free_one_if_that_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(dashboard, "USUAL_PORT", number)
        with closing(listen("127.0.0.1")) as other:
            assert other.getsockname()[1] not in (0, number)
        with pytest.raises(UserError, match=rf"port {number} of 127.0.0.1 .*: give another --port, or 0 for any"):
            listen("127.0.0.1", number)  # a port that is asked for is not replaced
    with closing(listen("127.0.0.1")) as free:
        assert free.getsockname()[1] == number


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"port": 0}, "--port is for --serve: give both, or neither"),
        ({"host": "0.0.0.0"}, "--host is for --serve: give both, or neither"),
        ({"serve": True, "port": 70000}, "port is 70000: use 1 to 65535"),
        ({"serve": True, "host": "no.such.host.invalid", "port": 0}, "cannot listen on no.such.host.invalid"),
    ],
)
def test_what_cannot_be_served_is_said_before_the_run_begins(tmp_path, options, told):
    with pytest.raises(UserError, match=told):
        check_can_serve(RunOptions(**options))
    words = [
        word
        for name, value in options.items()
        for word in ([f"--{name}", str(value)] if value is not True else ["--serve"])
    ]
    assert main(["run", "synthetic:", *words, "--out", str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run").exists()


def test_the_printed_address_is_one_that_others_can_use():
    """Of an interface of this machine."""
    with closing(listen("0.0.0.0", 0)) as listening:
        address = lan_address(), listening.getsockname()[1]
        socket.create_connection(address, timeout=60).close()


class Terminal:
    """What is printed, as on a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


@pytest.mark.parametrize(
    "url", [URL, "http://[fe80::1]:80/?token=x", "http://camera.local:8765/label/0123456789abcdef?token=x"]
)
def test_a_phone_can_read_the_address(monkeypatch, url):
    """Two rows of the code in a line of half blocks, white on black."""
    segno = pytest.importorskip("segno")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    announce(url)
    first, *rows = terminal.text.rstrip("\n").split("\n")
    assert first == f"{CLEARED}open {url}"
    rows = [row.removeprefix("\033[97;40m").removesuffix("\033[0m") for row in rows]
    halves = {" ": "11", "▀": "01", "▄": "10", "█": "00"}
    drawn = [[halves[character][half] for character in row] for row in rows for half in (0, 1)]
    matrix = [[str(bit) for bit in row] for row in segno.make(url, error="l", micro=False).matrix_iter(border=4)]
    assert drawn[: len(matrix)] == matrix
    assert max(map(len, rows)) <= 80


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8765/?token=x", "http://LOCALHOST:1/?token=x", "http://[::1]:1/?token=x"]
)
def test_an_address_of_this_machine_alone_has_no_code(monkeypatch, url):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    announce(url)
    assert terminal.text == f"{CLEARED}open {url}\n"


def test_in_a_pipe_there_is_no_code(capsys):
    announce(URL)
    assert capsys.readouterr().out == f"open {URL}\n"


def test_the_code_is_the_same_on_a_light_terminal():
    assert {line.startswith("\033[97;40m") and line.endswith("\033[0m") for line in qr_code(URL).splitlines()} == {True}


RUN = "run --source synthetic: --images 320 --recipe paper --buffer 16 --width 2 --probes 0 --fractions 0.1"


def command(tmp_path):
    words = [*RUN.split(), "--classifier", "linear", "--serve", "--port", "0", "--out", str(tmp_path / "run")]
    return [sys.executable, "-m", "streamclr", *words]


@pytest.mark.system
def test_on_a_terminal_the_dashboard_outlives_the_run_until_ctrl_c(tmp_path):
    ours, its = pty.openpty()
    process = subprocess.Popen(
        command(tmp_path), stdin=its, stdout=its, stderr=its, start_new_session=True, env=os.environ | {"TERM": "dumb"}
    )
    os.close(its)
    said = b""

    def read_until(what):
        nonlocal said
        while not (found := re.search(what, said)):
            said += os.read(ours, 65536)
        return found

    try:
        url = read_until(rb"open (http://127\.0\.0\.1:\d+/\?token=\S+)")[1].decode()
        read_until(b"the run is finished, the dashboard stays open: Ctrl-C ends it")
        assert (tmp_path / "run" / "results.json").exists()
        with httpx.Client(timeout=60, follow_redirects=True) as client:
            assert "<title>StreamCLR</title>" in client.get(url).text
            assert client.get(url.partition("/?")[0] + "/api/runs").json()["runs"][0]["state"] == "finished"
        process.send_signal(signal.SIGINT)
        read_until(rb"the dashboard is closed: streamclr serve \S+ opens it again")
        assert process.wait(60) == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(url, timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.system
def test_in_a_script_it_ends_with_the_run_and_says_how_to_open_it_again(tmp_path):
    done = subprocess.run(command(tmp_path), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "stays open" not in done.stdout
    assert f"the dashboard is closed: streamclr serve {tmp_path / 'run'} opens it again\n" in done.stderr
