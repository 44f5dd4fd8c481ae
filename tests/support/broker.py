"""A real MQTT broker, Debian's mosquitto, on the loopback address, and somebody who listens to it."""

import json
import os
import shutil
import signal
import socket
import subprocess

import pytest

from support.camera import HeldPort
from support.waiting import until


def find_mosquitto():
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    if not (path := shutil.which("mosquitto", path=places)):
        pytest.skip("no mosquitto here: `make .venv/.mosquitto` installs Debian's, as root")
    return path


CONFIG = """
listener {port} 127.0.0.1
allow_anonymous {anonymous}
persistence true
persistence_location {directory}/
autosave_interval 0
max_queued_messages 0
max_inflight_messages 0
user {user}
{more}
"""


class Broker:
    """Keeps sessions on the disk: when it is asked to end, and when `save` is called."""

    def __init__(self, directory, more="", anonymous=True):
        directory.mkdir()
        self.directory, self._port, self._program = directory, HeldPort(), find_mosquitto()
        self.port = self._port.number
        told = {"port": self.port, "directory": directory, "anonymous": str(anonymous).lower(), "more": more}
        user = "root" if os.getuid() == 0 else "mosquitto"  # it becomes another user only where it is root
        (directory / "broker.conf").write_text(CONFIG.format(**told, user=user))
        self._process = None
        self.start()

    def start(self):
        with (self.directory / "broker.log").open("ab") as log:
            command = [self._program, "-c", str(self.directory / "broker.conf")]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers)

    def _answers(self):
        assert self._process.poll() is None, (self.directory / "broker.log").read_text()
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def save(self):
        self._process.send_signal(signal.SIGUSR1)
        until((self.directory / "mosquitto.db").exists)

    def kill(self, number=signal.SIGKILL):
        self._process.send_signal(number)
        self._process.wait(60)

    def close(self):
        self._process.kill()
        self._process.wait()
        self._port.close()


class Listener:
    """Has a session at the broker that outlives connections, and notes every message in its order."""

    def __init__(self, port, topic, **more):
        from paho.mqtt import client as paho

        self.topic, self.messages, self.n_sessions = topic, [], 0
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id="listener", clean_session=False)
        self._client.reconnect_delay_set(1, 1)
        self._client.on_connect, self._client.on_message = self._connected, self._received
        self._client.on_subscribe = lambda *_: self.subscribed.append(True)
        self.subscribed = []
        if "password" in more:
            self._client.username_pw_set(more["user"], more["password"])
        if "ca" in more:
            self._client.tls_set(more["ca"])
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        until(lambda: self.subscribed)

    def _connected(self, client, _, flags, reason, __):
        if not flags.session_present and not reason.is_failure:
            self.n_sessions += 1
            client.subscribe(self.topic, qos=1)

    def _received(self, _, __, message):
        self.messages.append((message.topic, message.payload, message.retain))

    @property
    def is_connected(self):
        return self._client.is_connected()

    def answers(self):
        """The answers, in the order in which they have come; others, as on availability, are left out."""
        contents = [json.loads(payload) for topic, payload, _ in list(self.messages) if payload.startswith(b"{")]
        return [content for content in contents if "id" in content]

    def close(self):
        self._client.disconnect()
        self._client.loop_stop()
