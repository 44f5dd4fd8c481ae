"""Answers as HTTP requests: POST with JSON, one for each."""

from http.client import HTTPConnection, HTTPException, HTTPSConnection

from streamclr.answers.address import Address
from streamclr.answers.delivery import Away, Destination, Refused, Waker
from streamclr.answers.outbox import Entry

TIMEOUT_SECONDS = 10.0  # for a connection, and for each part of a response
MAX_RESPONSE_BYTES = 2**16
LATER = (408, 421, 425, 429)  # of the 4xx, those that may take the same request later


class Webhook(Destination):
    """POSTs each answer, and takes any status of 200 to 299 for its arrival.

    The header Idempotency-Key is the same when an answer has to be sent again.
    run: begins that key.
    """

    def __init__(self, address: Address, run: str):
        self.name, self.address, self.run = address.name, address, run
        self._waker = Waker()
        self._connection: HTTPConnection | None = None

    def open(self) -> None:
        """Connections are made when there is something to send."""

    def send(self, entries: list[Entry]) -> None:
        for n_sent, entry in enumerate(entries):
            status = self._post(entry, n_sent)
            if status >= 500 or status in LATER:
                raise Away(f"HTTP {status}", n_sent)
            if not 200 <= status < 300:
                raise Refused(f"HTTP {status}")

    def _post(self, entry: Entry, n_sent: int) -> int:
        """The status of the response."""
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "streamclr",
            "Idempotency-Key": f"{self.run}-{entry.number}",
        }
        if self.address.secret is not None:
            headers["Authorization"] = self.address.secret
        is_kept = self._connection is not None  # the server may have closed it meanwhile: once more, on a new one
        for is_last in (False, True) if is_kept else (True,):
            try:
                if self._connection is None:
                    self._connection = self._connect()
                self._connection.request("POST", self.address.target, entry.line, headers)
                response = self._connection.getresponse()
                if len(response.read(MAX_RESPONSE_BYTES)) == MAX_RESPONSE_BYTES or response.will_close:
                    self.close()
                return response.status
            except (OSError, HTTPException, ValueError) as error:  # the last: a name that no host can have
                self.close()
                if is_last or isinstance(error, TimeoutError):
                    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                    raise Away(why or type(error).__name__, n_sent) from None
        raise AssertionError

    def _connect(self) -> HTTPConnection:
        host, port, tls = self.address.host, self.address.port, self.address.tls()
        if tls is not None:
            return HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=tls)
        return HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)

    def idle(self, seconds: float) -> None:
        self._waker.wait(seconds)

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
