"""Checks before every request: token, Host, Origin, size and rate.

Starlette's TrustedHostMiddleware is not enough: it ignores the port, refuses [::1], looks at the first of two Host
headers, and cannot allow numeric addresses only.
"""

import asyncio
import hmac
import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamclr.web.refusal import refusal

MAX_BODY_BYTES = 64 * 1024
MAX_BODY_SECONDS = 10.0  # until the whole body has arrived
RATE, BURST = 100.0, 400.0  # requests per second from one address, and how many at once after a pause
MAX_ADDRESSES = 1024  # whose rates are remembered
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
READ_METHODS, WRITE_METHODS = {"GET", "HEAD"}, {"POST", "PUT"}


class Safe:
    """An ASGI application behind these checks.

    token: the secret in the printed URL; later requests have it in a cookie, or programs in an Authorization header.
    hosts: allowed names in the Host header, against DNS rebinding (a foreign page whose name resolves to this machine);
        "*" allows any numeric address, which needs no DNS and so cannot be rebound.
    port: the port of the server. It is part of the cookie's name, because cookies are shared between ports of a host.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str], port: int, rate: float = RATE):
        self.app, self.token, self.port = app, token.encode(), port
        self.hosts = {host.lower() for host in hosts}
        self.cookie = f"streamclr-{port}"
        self.limits = Limits(rate, BURST * rate / RATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers = Headers(scope=scope)
        location = self._redirect(scope)
        refused = self._refuses(scope, headers, location is not None or self._has_token(headers))
        if refused is None and location is not None:
            cookie = f"{self.cookie}={self.token.decode()}; HttpOnly; SameSite=Strict; Path=/"
            response = Response(status_code=303, headers={**HEADERS, "location": location, "set-cookie": cookie})
            return await response(scope, receive, send)
        if refused is None:
            try:
                body = await asyncio.wait_for(_body(receive), MAX_BODY_SECONDS)
            except (asyncio.TimeoutError, ValueError):
                limits = f"{MAX_BODY_BYTES} bytes in {MAX_BODY_SECONDS:.0f} s"
                refused = 413, f"body too large or slow; send up to {limits}"
            except ConnectionError:
                return
            else:
                return await self.app(scope, _replay(body, receive), _with_headers(send))
        status, detail = refused
        is_for_a_person = "text/html" in headers.get("accept", "")
        answer = refusal(status, detail) if is_for_a_person else JSONResponse({"detail": detail}, status)
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        await answer(scope, receive, send)

    def _refuses(self, scope: Scope, headers: Headers, is_known: bool) -> tuple[int, str] | None:
        address = (scope.get("client") or ("",))[0]
        # Counted apart: a foreign page in the same browser must not use up the owner's requests.
        if not self.limits.allow(f"{address} with the token" if is_known else address):
            return 429, "too many requests; wait a second"
        if scope["method"] not in READ_METHODS | WRITE_METHODS:
            return 405, f"method {scope['method'][:20]} not allowed; use GET, HEAD, POST or PUT"
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_own_host(hosts[0]):
            return 421, "Host header not allowed; see --allow-host"
        is_own = len(origins) <= 1 and all(origin.lower() == f"http://{hosts[0].lower()}" for origin in origins)
        if not is_own or any(site not in ("same-origin", "none") for site in headers.getlist("sec-fetch-site")):
            return 403, "request from another site refused"
        if scope["method"] in WRITE_METHODS:
            if not origins and not _bearer(headers):
                return 403, "Origin header missing; send one, or a Bearer token"
            kinds = [kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")]
            if kinds != ["application/json"]:
                return 415, "content type not supported; send application/json"
        lengths = headers.getlist("content-length")
        if any(not length.isdecimal() or int(length[:20]) > MAX_BODY_BYTES for length in lengths):
            return 413, f"request too large; send at most {MAX_BODY_BYTES} bytes"
        return None if is_known else (401, "token missing or wrong; open the URL that the server printed at its start")

    def _is_own_host(self, host: str) -> bool:
        name, port = split_host(host)
        if name is None or port not in (None, self.port):
            return False
        return name in self.hosts or ("*" in self.hosts and ip_of(name.strip("[]")) is not None)

    def _redirect(self, scope: Scope) -> str | None:
        """The same URL without the token, if a valid token is in it."""
        if scope["method"] != "GET" or b"token=" not in scope["query_string"]:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if len(tokens) != 1 or not self._is_token(tokens[0]):
            return None
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        # Never "//host", which is another server.
        path = "/" + scope.get("raw_path", b"/").decode("latin-1").partition("?")[0].lstrip("/\\")
        return path + (f"?{rest}" if rest else "")

    def _has_token(self, headers: Headers) -> bool:
        given = _bearer(headers)
        for part in ";".join(headers.getlist("cookie")).split(";"):  # other servers on this host may have set more
            name, _, value = part.strip().partition("=")
            if name == self.cookie:
                given.append(value)
        return any(self._is_token(value) for value in given)

    def _is_token(self, value: str) -> bool:
        return hmac.compare_digest(value.encode("utf-8", "surrogateescape"), self.token)


_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}))?")


def split_host(host: str) -> tuple[str | None, int | None]:
    """Name and port of `name:port` or `[address]:port`, in lower case; None as the name if it is malformed."""
    found = _HOST.fullmatch(host.lower())
    name, port = found.groups() if found else (None, None)
    return name, int(port) if port else None


def own_names(address: str) -> set[str]:
    """Allowed Host names of a server that listens on this address."""
    names, ip = {"127.0.0.1", "localhost", "[::1]"}, ip_of(address)
    if ip is None:
        return names | {address.lower()}
    return names | {"*" if ip.is_unspecified else f"[{ip}]" if ip.version == 6 else str(ip)}


def ip_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The numeric address; None of a name that needs DNS."""
    with suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


class Limits:
    """Token buckets: how many requests each address may still send, refilled with time."""

    def __init__(self, rate: float, burst: float):
        self.rate, self.burst = rate, burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address: requests left, and at what time

    def allow(self, address: str) -> bool:
        now = time.monotonic()
        left, then = self._left.pop(address, (self.burst, now))
        left = min(self.burst, left + self.rate * (now - then))
        self._left[address] = (max(0.0, left - 1), now)
        if len(self._left) > MAX_ADDRESSES:
            self._left.popitem(last=False)
        return left >= 1


def _bearer(headers: Headers) -> list[str]:
    return [value[7:] for value in headers.getlist("authorization") if value[:7].lower() == "bearer "]


async def _body(receive: Receive) -> bytes:
    """The whole body, read before the application sees the request."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise ValueError
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body, then passes on what follows, such as a disconnect."""
    first = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def read() -> Message:
        return next(first, None) or await receive()

    return read


def _with_headers(send: Send) -> Send:
    async def write(message: Message) -> None:
        if message["type"] == "http.response.start":
            for name, value in HEADERS.items():
                MutableHeaders(scope=message).setdefault(name, value)
        await send(message)

    return write
