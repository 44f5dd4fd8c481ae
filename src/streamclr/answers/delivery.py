"""Delivers the answers of the outbox to one destination, in order, in a thread of its own."""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from streamclr.answers.outbox import Entry, Outbox
from streamclr.base.files import json_line
from streamclr.base.options import redacted

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0  # pause before an unreachable destination is tried again
IDLE_SECONDS = 5.0  # between two looks at a connection while there is nothing to send


class Away(Exception):
    """The destination cannot be reached: the answers wait.

    n_sent: how many of those that were to be sent have arrived.
    """

    def __init__(self, reason: str, n_sent: int = 0):
        super().__init__(reason)
        self.n_sent = n_sent


class Refused(Exception):
    """The destination will never take this answer: it is dropped."""


class Destination(Protocol):
    """Where answers go. All calls but `wake` are made in the thread of its delivery."""

    name: str  # without secrets
    at_once: int = 1  # answers that `send` takes

    def open(self) -> None:
        """Connect, if it is not connected. Raises Away."""

    def send(self, entries: list[Entry]) -> None:
        """Returns when all have arrived. Raises Away, and Refused if only one was given."""

    def idle(self, seconds: float) -> None:
        """Keep the connection; returns after so many seconds, or when `wake` is called. Raises Away."""

    def wake(self) -> None:
        """End `idle`; called by any thread."""

    def close(self) -> None:
        """Disconnect. Never raises."""


class Waker:
    """What `idle` and `wake` are for a destination without a connection to keep."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
        self._event.clear()

    def wake(self) -> None:
        self._event.set()


class Delivery:
    """One destination, and which answers it has.

    Each answer after `position` is sent, waits or is dropped. `file` keeps the position, so that a run that is started
    again goes on there. Only a kill between an arrival and its note there, or a connection that is lost before the
    arrival is confirmed, has an answer sent twice.

    tell: called with a line about what somebody should know.
    """

    def __init__(self, destination: Destination, outbox: Outbox, file: Path, tell: Callable[[str], None]):
        self.destination, self.outbox, self.file, self.tell = destination, outbox, file, tell
        self.position, self.n_sent, self.n_dropped = self._read()
        self.connected = False
        self._closing, self._over = threading.Event(), threading.Event()
        self._held: list[Entry] = []  # read, not yet settled
        self._offset = (0, 0)
        self._was_lost = False
        self._n_refused = 0  # since it began
        self._thread = threading.Thread(target=self._run, name=f"answers to {destination.name}", daemon=True)

    def _read(self) -> tuple[int, int, int]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(self.file.read_text("utf-8"))
            return int(state["position"]), int(state["sent"]), int(state["dropped"])
        return self.outbox.last, 0, 0  # a new destination gets what comes from now on

    def start(self) -> None:
        self._note()
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """For status, metrics and results."""
        n_held = len(self._held)  # those are sent, even if they are no longer in the outbox
        return counts(self.outbox, self.position, self.n_sent, self.n_dropped, n_held) | {"connected": self.connected}

    def end(self) -> None:
        """Send what waits, then end the thread."""
        self._closing.set()
        self.destination.wake()

    def close(self, patience: float) -> None:
        """End the thread within about so many seconds, even if answers still wait."""
        self.end()
        self._thread.join(patience)
        self._over.set()

    # In its thread:

    def _run(self) -> None:
        pause = MIN_RETRY_SECONDS
        while not self._over.is_set():
            try:
                self.destination.open()
                has_sent = self._send()
                self._reached()
                pause = MIN_RETRY_SECONDS
                if has_sent:
                    continue
                if self._closing.is_set():
                    break
                self.destination.idle(IDLE_SECONDS)
            except Away as error:
                self._settle(error.n_sent)
                self._lost(str(error))
                if self._closing.wait(pause):
                    break
                pause = min(MAX_RETRY_SECONDS, 2 * pause)
        self.destination.close()
        self.connected = False

    def _send(self) -> bool:
        """Send the next answers; False if there are none."""
        if not self._held:
            after = self.position
            self._held, self._offset = self.outbox.read(after, self._offset, self.destination.at_once)
        if not self._held:
            return False
        try:
            self.destination.send(self._held)
        except Refused as error:
            refused = self._held.pop(0)
            self._n_refused += 1
            if self._n_refused.bit_count() == 1:  # 1, 2, 4, 8, …: one by one they would fill the log
                self.tell(f"{self.destination.name}: {error}: {self._n_refused:,} answers dropped so far")
            self._pass(refused, n_sent=0)
        else:
            self._settle(len(self._held))
        return True

    def _settle(self, n: int) -> None:
        """The first `n` of those held have arrived."""
        if n:
            arrived, self._held = self._held[:n], self._held[n:]
            self._pass(arrived[-1], n_sent=n)

    def _pass(self, last: Entry, n_sent: int) -> None:
        """Done with the answers up to this one. Those that were not sent, or are no longer there, are dropped."""
        n_dropped = last.number - self.position - n_sent
        self.n_sent += n_sent
        self.n_dropped += n_dropped
        self.position = last.number
        self._note()
        if n_dropped > 1:
            self.tell(f"{self.destination.name}: {n_dropped:,} answers dropped: more waited than are kept")

    def _note(self) -> None:
        state = {"to": self.destination.name, "position": self.position, "sent": self.n_sent, "dropped": self.n_dropped}
        part = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        with suppress(OSError):  # a full disk: after a crash some are sent twice
            part.write_text(json_line(state))
            part.replace(self.file)

    def _reached(self) -> None:
        if not self.connected and self._was_lost:
            self.tell(f"{self.destination.name}: reached again; {self.state()['waiting']:,} answers wait")
        self.connected, self._was_lost = True, False

    def _lost(self, why: str) -> None:
        self.connected = False
        if not self._was_lost:
            self.tell(f"{self.destination.name}: {redacted(why)}: its answers wait")
        self._was_lost = True


def counts(outbox: Outbox, position: int, n_sent: int, n_dropped: int, n_held: int = 0) -> dict[str, Any]:
    """What became of the answers: all of them are sent, dropped or waiting."""
    n_gone = max(0, outbox.oldest - 1 - position - n_held)
    return {"sent": n_sent, "dropped": n_dropped + n_gone, "waiting": max(0, outbox.last - position - n_gone)}


def close_all(deliveries: list[Delivery], patience: float) -> None:
    """Close them side by side within so many seconds."""
    deadline = time.monotonic() + patience
    for delivery in deliveries:
        delivery.end()
    for delivery in deliveries:
        delivery.close(max(0.0, deadline - time.monotonic()))
