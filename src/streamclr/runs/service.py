"""A run as a service: the signals that end it, and its reports to systemd. The unit is in docs/service.md."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from streamclr.base.errors import QuietExit, Stopped
from streamclr.base.options import redacted
from streamclr.base.progress import say
from streamclr.compute.ranks import OneProcess


class Notifier:
    """Sends sd_notify messages to the socket in NOTIFY_SOCKET; does nothing if there is none.

    It never raises or blocks, so that a learner does not stop when systemd does not listen.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name  # "@" means the abstract namespace
        self._every = _watchdog_seconds(environment) / 2
        self._last_alive = -float("inf")  # seconds on the monotonic clock
        self._status = ""

    def ready(self) -> None:
        """The source is open and the first step can be made."""
        self._send("READY=1")

    def alive(self, status: str = "") -> None:
        """Call it after each step. It reports twice per watchdog interval, and a new status at once.

        status: one line for `systemctl status`.
        """
        lines = []
        now = time.monotonic()
        is_due = self._every > 0 and now - self._last_alive >= self._every
        if is_due:
            lines.append("WATCHDOG=1")
        status = " ".join(redacted(status).split())  # a line break would start another message
        if status and status != self._status:
            lines.append(f"STATUS={status}")
        if lines and self._send("\n".join(lines)):
            self._last_alive = now if is_due else self._last_alive
            self._status = status or self._status

    def stopping(self) -> None:
        """The last step is done; the checkpoint follows."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> bool:
        if not self._address:
            return False
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(message.encode(errors="replace"), self._address)
            return True
        return False


def _watchdog_seconds(environment: Mapping[str, str]) -> float:
    """0 if there is no watchdog, or if it is for another process."""
    microseconds, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", str(os.getpid()))
    return int(microseconds) / 1e6 if microseconds.isdecimal() and process == str(os.getpid()) else 0.0


class StopSignal:
    """SIGTERM and SIGINT (Ctrl-C) end the loop after the step at hand; the second one at once."""

    signal = 0

    def __init__(self, several: bool = False):
        self._several = several  # ranks of one job

    def __enter__(self) -> "StopSignal":
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def by_any(self, ranks: OneProcess) -> bool:
        """Whether a rank was asked, and so all are."""
        (number,) = ranks.largest(self.signal)
        self.signal = int(number)
        return bool(number)

    def stopped(self, ranks: OneProcess, message: str) -> Stopped | QuietExit:
        """To be raised; rank 0 alone reports it."""
        return QuietExit(128 + self.signal) if ranks.index else Stopped(self.signal, message)

    def _note(self, number: int, _: object) -> None:
        self.signal = number
        self.__exit__()
        if number == signal.SIGINT and sys.stderr.isatty():
            say("stopping after this step; Ctrl-C again stops at once")

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        # torchrun ends all ranks as soon as one has failed: what this one has to say comes first, as in `Ranks`.
        ends = self._several and kind is not None
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ends and number == signal.SIGTERM else handler)
