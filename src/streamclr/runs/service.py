"""A run as a service: tells systemd that it is ready, alive and stopping (docs/service.md has the unit)."""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from streamclr.base.options import redacted


class Notifier:
    """Speaks sd_notify to the socket that systemd names; without one it does nothing.

    Nothing here raises or waits: a learner does not stop because its supervisor does not listen.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name  # "@": in the abstract namespace
        self._every = _watchdog_seconds(environment) / 2
        self._told_alive = -float("inf")  # seconds on the monotonic clock
        self._status = ""

    def ready(self) -> None:
        """The source is open and the first step can be made."""
        self._send("READY=1")

    def alive(self, status: str = "") -> None:
        """To be called after each step. The watchdog hears of it once in half of its time, of a new status at once.

        status: one line for `systemctl status`.
        """
        lines = []
        now = time.monotonic()
        is_due = self._every > 0 and now - self._told_alive >= self._every
        if is_due:
            lines.append("WATCHDOG=1")
        status = " ".join(redacted(status).split())  # a line break would begin another message
        if status and status != self._status:
            lines.append(f"STATUS={status}")
        if lines and self._send("\n".join(lines)):
            self._told_alive = now if is_due else self._told_alive
            self._status = status or self._status

    def stopping(self) -> None:
        """The last step is done; what follows is the checkpoint."""
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
    """0 where nobody watches, or somebody watches another process."""
    microseconds, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", str(os.getpid()))
    return int(microseconds) / 1e6 if microseconds.isdecimal() and process == str(os.getpid()) else 0.0
