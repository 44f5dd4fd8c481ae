import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from streamclr.runs import service
from streamclr.runs.service import Notifier

DOCS = Path(__file__).parent.parent / "docs" / "service.md"


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path):
    """What systemd would be: a datagram socket, and its name as a service is told it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@streamclr-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name.replace("@", "\0", 1))
        listener.setblocking(False)
        yield listener, name


def heard(listener):
    messages = []
    while True:
        try:
            messages.append(listener.recv(4096).decode())
        except BlockingIOError:
            return messages


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(service, "time", clock)
    return clock


def test_systemd_hears_ready_alive_and_stopping(systemd):
    listener, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "600000000", "WATCHDOG_PID": str(os.getpid())})
    notifier.ready()
    notifier.alive("step 1 | loss 5.1")
    notifier.stopping()
    assert heard(listener) == ["READY=1", "WATCHDOG=1\nSTATUS=step 1 | loss 5.1", "STOPPING=1"]


def test_the_watchdog_hears_once_in_half_of_its_time(systemd, clock):
    listener, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "10000000"})
    for _ in range(100):
        clock.now += 0.1
        notifier.alive()
    assert heard(listener) == ["WATCHDOG=1"] * 2
    clock.now += 7
    notifier.alive()
    assert heard(listener) == ["WATCHDOG=1"]


def test_a_status_is_one_line_without_passwords_and_is_not_repeated(systemd):
    listener, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.alive("lost rtsp://user:secret@host/1\nREADY=1")
    notifier.alive("lost rtsp://user:secret@host/1\nREADY=1")
    notifier.alive()
    notifier.alive("back")
    assert heard(listener) == ["STATUS=lost rtsp://user:***@host/1 READY=1", "STATUS=back"]


@pytest.mark.parametrize("watchdog", [{"WATCHDOG_USEC": "much"}, {"WATCHDOG_USEC": "10", "WATCHDOG_PID": "1"}, {}])
def test_without_a_watchdog_of_its_own_it_sends_none(systemd, watchdog):
    listener, name = systemd
    Notifier({"NOTIFY_SOCKET": name} | watchdog).alive()
    assert heard(listener) == []


@pytest.mark.parametrize("name", ["", "/no/such/socket", "/" + 200 * "x", "vsock:2:1234", "@"])
def test_nobody_who_listens_is_no_error(name):
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "10"} if name else {})
    notifier.ready()
    notifier.alive("step 1")
    notifier.stopping()


def test_a_listener_that_is_full_does_not_hold_the_learner_up_and_hears_later(systemd, clock):
    listener, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "10000000"})
    for _ in range(10_000):
        notifier.ready()
    notifier.alive("step 1")
    assert set(heard(listener)) == {"READY=1"}
    notifier.alive("step 1")
    assert heard(listener) == ["WATCHDOG=1\nSTATUS=step 1"]


def unit():
    return re.search(r"```ini\n(\[Unit\].*?)```", DOCS.read_text(), re.DOTALL)[1]


def test_the_unit_of_the_docs_starts_a_command_that_exists():
    from streamclr.cli.parser import parse

    _, config = parse(re.search(r"^ExecStart=\S+/streamclr (.*)$", unit(), re.MULTILINE)[1].split())
    assert config.out.startswith("/var/lib/streamclr/")
    assert config.metrics == 9108


def test_the_unit_of_the_docs_is_one_that_systemd_takes(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / "streamclr-door.service"
    file.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit(), flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    if "Failed to initialize manager" in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")
