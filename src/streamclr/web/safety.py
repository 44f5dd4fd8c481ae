"""What stands before every page: who may ask, from where, how much and how often."""

import asyncio
import hmac
import ipaddress
import json
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGEST_BODY = 64 * 1024  # bytes of a request
SLOWEST_BODY = 10.0  # seconds in which it must be here
RATE, BURST = 100.0, 400.0  # requests a second from one address, and how many at once after a pause
MOST_ADDRESSES = 1024  # that are remembered
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
METHODS = {"GET", "HEAD", "POST", "PUT"}
CHANGING = {"POST", "PUT"}


class Safe:
    """An ASGI application behind its checks.

    token: what the one who was given the URL has; in the URL at first, in a cookie afterwards, or in a header.
    hosts: names under which this server may be asked for, so that no page from elsewhere reaches it under its own name,
        made to point here (DNS rebinding); "*" stands for any numeric address, which nobody can make to point here.
    port: the one that it is bound to, in the name of the cookie, as browsers do not tell the ports of a host apart.
    """

    def __init__(self, app: App, token: str, hosts: Iterable[str], port: int, rate: float = RATE):
        self.app, self.token, self.port = app, token.encode(), port
        self.hosts = {host.lower() for host in hosts}
        self.cookie = f"streamclr-{port}"
        self.limits = Limits(rate, BURST * rate / RATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _headers(scope)
        location = self._opened(scope)
        is_known = location is not None or self._has_token(headers)
        refused = self._refuses(scope, headers, is_known)
        if refused is None and location is not None:
            cookie = f"{self.cookie}={self.token.decode()}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(send, 303, "", {"location": location, "set-cookie": cookie})
            return
        if refused is None and not is_known:
            refused = 401, "open the URL that the server printed when it was started"
        if refused is None:
            try:
                body = await asyncio.wait_for(_body(receive), SLOWEST_BODY)
            except (asyncio.TimeoutError, ValueError):
                refused = 413, f"a request has at most {LARGEST_BODY} bytes, and {SLOWEST_BODY:.0f} seconds to come in"
            except ConnectionError:
                return
        if refused is not None:
            await _answer(send, *refused)
            return
        await self.app(scope, _again(body, receive), _with_headers(send))

    def _refuses(self, scope: Scope, headers: dict[str, list[str]], is_known: bool) -> tuple[int, str] | None:
        address = (scope.get("client") or ("",))[0]
        # Counted apart: a page from elsewhere, open in the same browser, must not use up what the owner may ask.
        if not self.limits.allow(f"{address} with the token" if is_known else address):
            return 429, "too many requests: wait a second"
        if scope["method"] not in METHODS:
            return 405, f"no method {scope['method'][:20]}: use GET, HEAD, POST or PUT"
        hosts, origins = headers.get("host", []), headers.get("origin", [])
        if len(hosts) != 1 or not self._is_own_host(hosts[0]):
            return 421, "this server is asked for under another name than its own: see --allow-host"
        if len(origins) > 1 or any(not self._is_own_origin(origin, hosts[0]) for origin in origins):
            return 403, "this server is only for its own pages"
        if any(site not in ("same-origin", "none") for site in headers.get("sec-fetch-site", [])):
            return 403, "this server is only for its own pages"
        if scope["method"] in CHANGING:
            if not origins and not _bearer(headers):
                return 403, "a request that changes something says where it comes from: send an Origin"
            if [kind.partition(";")[0].strip().lower() for kind in headers.get("content-type", [])] != [
                "application/json"
            ]:
                return 415, "send application/json"
        lengths = headers.get("content-length", [])
        if any(not length.isdecimal() or int(length[:20]) > LARGEST_BODY for length in lengths):
            return 413, f"a request has at most {LARGEST_BODY} bytes"
        return None

    def _is_own_host(self, host: str) -> bool:
        name, port = split_host(host)
        if name is None or port not in (None, self.port):
            return False
        return name in self.hosts or ("*" in self.hosts and _is_address(name))

    def _is_own_origin(self, origin: str, host: str) -> bool:
        """The same scheme, name and port as were asked for."""
        return origin.lower() == f"http://{host.lower()}"

    def _opened(self, scope: Scope) -> str | None:
        """Where to go on if the token is in the URL: the same page without it."""
        if scope["method"] != "GET" or b"token=" not in scope["query_string"]:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if len(tokens) != 1 or not self._is_token(tokens[0]):
            return None
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        # Never "//host", which would be another server.
        path = "/" + scope.get("raw_path", b"/").decode("latin-1").partition("?")[0].lstrip("/\\")
        return path + (f"?{rest}" if rest else "")

    def _has_token(self, headers: dict[str, list[str]]) -> bool:
        given = _bearer(headers)
        for part in ";".join(headers.get("cookie", [])).split(";"):  # whatever else other servers here have set
            name, _, value = part.strip().partition("=")
            if name == self.cookie:
                given.append(value)
        return any(self._is_token(value) for value in given)

    def _is_token(self, value: str) -> bool:
        return hmac.compare_digest(value.encode("utf-8", "surrogateescape"), self.token)


_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}))?")


def split_host(host: str) -> tuple[str | None, int | None]:
    """`name:port` or `[address]:port` in small letters; None for what is no host."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return None, None
    name, port = found.groups()
    return name, None if port is None else int(port)


def own_names(address: str) -> set[str]:
    """The Host names of a server that is bound to this address."""
    names = {"127.0.0.1", "localhost", "[::1]"}
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return names | {address.lower()}
    return names | {"*" if ip.is_unspecified else f"[{ip}]" if ip.version == 6 else str(ip)}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class Limits:
    """A bucket of requests for each address, that fills up again with time."""

    def __init__(self, rate: float, burst: float):
        self.rate, self.burst = rate, burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address: how many, and when that was

    def allow(self, address: str) -> bool:
        now = time.monotonic()
        left, then = self._left.pop(address, (self.burst, now))
        left = min(self.burst, left + self.rate * (now - then))
        self._left[address] = (max(0.0, left - 1), now)
        if len(self._left) > MOST_ADDRESSES:
            self._left.popitem(last=False)
        return left >= 1


def _headers(scope: Scope) -> dict[str, list[str]]:
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers


def _bearer(headers: dict[str, list[str]]) -> list[str]:
    return [value[7:] for value in headers.get("authorization", []) if value[:7].lower() == "bearer "]


async def _body(receive: Receive) -> bytes:
    """All of it, before the application hears of the request."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST_BODY:
            raise ValueError
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """The body at once, and then what else comes: that the client has gone."""
    given = False

    async def read() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read


def _with_headers(send: Send) -> Send:
    async def write(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
            message["headers"] = [*message["headers"], *extra]
        await send(message)

    return write


async def _answer(send: Send, status: int, text: str, headers: dict[str, str] | None = None) -> None:
    body = json.dumps({"detail": text}).encode() if text else b""
    given = {"content-type": "application/json", "content-length": str(len(body)), **HEADERS, **(headers or {})}
    start = {"type": "http.response.start", "status": status}
    await send(start | {"headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in given.items()]})
    await send({"type": "http.response.body", "body": body})
