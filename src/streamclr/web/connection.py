"""Connections: a request has a time in which to come in, and the one that idles longest makes room for others."""

import json
from asyncio import Transport
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from streamclr.web.safety import HEADERS

MOST_CONNECTIONS = 200  # at a time
LONGEST_IDLE = 30  # seconds without a whole request


class Connection(H11Protocol):
    """uvicorn's own waits for ever for one that sends nothing, and counts it as a place that is taken."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if len(self.connections) > MOST_CONNECTIONS:
            idle = [other for other in cast("set[Connection]", self.connections) if other.is_idle]
            longest = min(idle, key=lambda other: other._since)  # this one is among them
            self.connections.discard(longest)  # before it has closed, so that it is not chosen again
            longest.timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        """A part of a request does not put off the time at which all of it must be in; uvicorn's own lets it."""
        self.conn.receive_data(data)
        self.handle_events()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        if self.is_idle:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP, with the headers of every answer; not if there is an answer on its way already."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # what is being made for it goes nowhere
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"detail": msg}).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            for event in (
                h11.Response(status_code=400, headers=[*(HEADERS | headers).items()], reason="Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
