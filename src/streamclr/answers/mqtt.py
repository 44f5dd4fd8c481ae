"""Answers as MQTT messages, QoS 1 and retained, and what Home Assistant needs to find them."""

import select
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from streamclr.answers.address import Address
from streamclr.answers.choice import Place
from streamclr.answers.delivery import Away, Destination
from streamclr.answers.discovery import discovery, topics
from streamclr.answers.outbox import Entry

KEEPALIVE_SECONDS = 30  # a broker that is silent so long after a ping is lost
ANSWER_SECONDS = 20.0  # for a connection, and for the confirmations of what was sent


class Mqtt(Destination):
    """Publishes to a topic, or with several cameras to one below it for each.

    A connection that is lost is made anew, without a session. Answers that the broker has not confirmed (PUBACK) are
    sent again in their order, those that it has are not.
    device: tells it from others, and stays the same after a restart.
    title: its name for people.
    """

    at_once = 20

    def __init__(self, address: Address, device: str, title: str, places: Sequence[Place]):
        self.name, self.address, self.device, self.title = address.name, address, device, title
        self._places = list(places)
        self._topics = topics(address.target, self._places)
        self._presence = f"{address.target}/availability"
        self._client: paho.Client | None = None
        self._introduced: set[Place] = set()  # to Home Assistant, over this connection
        self._confirmed: set[int] = set()  # numbers of messages
        self._refusal = ""
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake.setblocking(False)

    def open(self) -> None:
        if self._client is not None:
            return
        address = self.address
        client = paho.Client(CallbackAPIVersion.VERSION2, client_id=f"streamclr-{self.device}")
        client.connect_timeout = ANSWER_SECONDS
        client.max_inflight_messages_set(0)
        if address.user is not None or address.secret is not None:
            client.username_pw_set(address.user or "", address.secret)
        if (tls := address.tls()) is not None:
            client.tls_set_context(tls)
        client.will_set(self._presence, "offline", qos=1, retain=True)
        client.on_connect, client.on_publish, client.on_disconnect = self._connected, self._published, self._ended
        self._confirmed, self._introduced, self._refusal = set(), set(), ""
        try:
            client.connect(address.host, address.port, KEEPALIVE_SECONDS)
        except OSError as error:
            raise Away(getattr(error, "verify_message", None) or error.strerror or str(error)) from None
        except ValueError as error:  # a name that no host can have
            raise Away(str(error)) from None
        self._client = client
        self._until(lambda: client.is_connected(), "no answer to the connection")
        self._publish([(self._presence, b"online")] + [one for place in self._places for one in self._introduce(place)])

    def _introduce(self, place: Place) -> list[tuple[str, bytes]]:
        if not self.address.discovery or place in self._introduced:
            return []
        self._introduced.add(place)
        name, topic = place[1] or place[0], self._topics[place]
        return [discovery(self.address.discovery, self.device, self.title, name, topic, self._presence)]

    def send(self, entries: list[Entry]) -> None:
        messages = []
        for entry in entries:
            place = (entry.answer["source"], entry.answer.get("region", ""))
            if place not in self._topics:  # a region that was not known when the run began
                self._places.append(place)
                self._topics = topics(self.address.target, self._places) | self._topics
            messages += [(topic, content, False) for topic, content in self._introduce(place)]
            messages.append((self._topics[place], entry.line, True))
        n_sent = 0
        try:
            self._publish([message[:2] for message in messages])
        except Away as error:
            n_sent = sum(is_answer for *_, is_answer in messages[: error.n_sent])
            raise Away(str(error), n_sent) from None

    def _publish(self, messages: list[tuple[str, bytes]]) -> None:
        """Returns when the broker has confirmed all of them."""
        assert self._client is not None
        numbers = [self._client.publish(topic, content, qos=1, retain=True).mid for topic, content in messages]
        try:
            self._until(lambda: self._confirmed.issuperset(numbers), "messages are not confirmed")
        except Away as error:
            first = next(i for i, number in enumerate(numbers) if number not in self._confirmed)
            raise Away(str(error), first) from None
        self._confirmed.clear()

    def _until(self, is_done: Any, otherwise: str) -> None:
        """Serve the connection until something has happened."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not is_done():
            if (left := deadline - time.monotonic()) <= 0:
                self._disconnect()
                raise Away(f"{otherwise} within {ANSWER_SECONDS:.0f} s")
            self._serve(left)

    def idle(self, seconds: float) -> None:
        self._serve(seconds)

    def _serve(self, seconds: float) -> None:
        """Wait for the network or for `wake`, and do what is to be done. Raises Away if the connection is lost."""
        client = self._client
        assert client is not None
        if (link := client.socket()) is not None:
            poll = select.poll()
            poll.register(self._wakes, select.POLLIN)
            poll.register(link, select.POLLIN | (select.POLLOUT if client.want_write() else 0))
            is_ready = isinstance(link, ssl.SSLSocket) and link.pending()  # decrypted already
            events = dict(poll.poll(0 if is_ready else 1000 * min(seconds, KEEPALIVE_SECONDS / 2)))
            if events.get(self._wakes.fileno()):
                with suppress(BlockingIOError):
                    self._wakes.recv(4096)
            found = events.get(link.fileno(), 0)
            if is_ready or found & ~select.POLLOUT:
                client.loop_read()
            if found & select.POLLOUT:
                client.loop_write()
            client.loop_misc()
        if client.socket() is None:
            self._client = None
            raise Away(self._refusal or "the connection is lost")

    def wake(self) -> None:
        with suppress(OSError):  # it has enough to wake it, or is closed
            self._wake.send(b"\0")

    def close(self) -> None:
        self._disconnect()
        self._wakes.close()
        self._wake.close()

    def _disconnect(self) -> None:
        """Tell that it is offline, if it is connected."""
        client, self._client = self._client, None
        if client is not None and client.is_connected():
            with suppress(OSError, ValueError):
                client.publish(self._presence, "offline", qos=0, retain=True)
                client.disconnect()
        if client is not None and (link := client.socket()) is not None:
            with suppress(OSError):
                link.close()

    # Called by the client:

    def _connected(self, client: paho.Client, _: Any, __: Any, reason: Any, ___: Any) -> None:
        if reason.is_failure:
            self._refusal = f"refused: {reason}"

    def _published(self, client: paho.Client, _: Any, number: int, __: Any, ___: Any) -> None:
        self._confirmed.add(number)

    def _ended(self, client: paho.Client, _: Any, __: Any, reason: Any, ___: Any) -> None:
        self._refusal = self._refusal or f"the connection is lost ({reason})"
