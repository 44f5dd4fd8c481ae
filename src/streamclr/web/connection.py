"""HTTP connections with a deadline for each request; when there are too many, the longest idle one is closed."""

import json
from asyncio import Transport
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from streamclr.web.safety import HEADERS

MAX_CONNECTIONS = 200  # at a time
MAX_IDLE_SECONDS = 30  # without a complete request


class Connection(H11Protocol):
    """uvicorn waits forever for a client that sends nothing, and counts it against its limit. This one does not."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if len(self.connections) > MAX_CONNECTIONS:
            idle = [other for other in cast("set[Connection]", self.connections) if other.is_idle]
            longest = min(idle, key=lambda other: other._since)  # this one is among them
            self.connections.discard(longest)  # at once, so that it is not chosen again before it has closed
            longest.timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        """Unlike uvicorn's, it does not extend the deadline with each part of a request."""
        self.conn.receive_data(data)
        self.handle_events()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        if self.is_idle:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer to malformed HTTP, with our headers, unless another answer is already on its way."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # drop the answer in progress
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
