"""Attacks on the server of the pages, the one that `streamclr serve` starts, over its socket."""

import asyncio
import base64
import hashlib
import hmac
import http.client
import itertools
import json
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from email.message import Message
from importlib.resources import files
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import quote
from uuid import uuid4

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import uvicorn

import streamclr.web.server
from streamclr.cli.entry import main
from streamclr.records.options import RunOptions
from streamclr.runs.run import run
from streamclr.web import safety
from streamclr.web.app import make_app
from streamclr.web.refusal import POLICY
from streamclr.web.safety import Limits, Safe, own_names
from streamclr.web.server import ServeOptions, serve
from streamclr.web.site import Site
from streamclr.web.view import shown
from support.images import make_folder

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CANARY, PASSWORD = "canary-in-a-file-4711", "hunter2-4711"
JSON = ("Content-Type", "application/json")

# `streamclr serve` with other limits, in a process of its own.
COMMAND = """
import functools, json, os, sys
from streamclr.web import connection, safety
os.nice = lambda _: 0
rate, safety.MAX_BODY_SECONDS, connection.MAX_IDLE_SECONDS = json.loads(sys.argv.pop(1))
safety.Safe = functools.partial(safety.Safe, rate=rate)
from streamclr.cli.entry import main
sys.exit(main())
"""


class Answer(NamedTuple):
    status: int
    headers: Message
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Server:
    """A server, and a client that sends whatever it is told to and looks at every answer for what holds for all."""

    def __init__(self, path, place, *words, rate=1e6, slowest_body=10.0, longest_idle=30):
        self.out, self.err = place / "out.txt", place / "err.txt"
        command = [sys.executable, "-c", COMMAND, json.dumps([rate, slowest_body, longest_idle])]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "serve", str(path), "--port", "0", "--until-eof", *words],
                stdin=subprocess.PIPE, stdout=out, stderr=err,
            )  # fmt: skip

    def wait(self):
        """Until it answers."""
        end = time.monotonic() + 120
        while not (found := re.search(r"^open (http://127\.0\.0\.1:(\d+)/)\?token=(\S+)\n", self.out.read_text())):
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        self.url, self.port, self.token = found[1].rstrip("/"), int(found[2]), found[3]
        self.host, self.origin = f"127.0.0.1:{self.port}", ("Origin", self.url)
        self.cookie = ("Cookie", f"streamclr-{self.port}={self.token}")
        while True:
            with suppress(ConnectionRefusedError), self.connect():
                break
            assert time.monotonic() < end
            time.sleep(0.05)
        return self

    def close(self):
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def send(self, data, method="GET"):
        """Bytes as they are, and the answer."""
        with self.connect() as connection:
            with suppress(ConnectionError):  # answered and closed before all of it was sent
                connection.sendall(data)
            return self.read(connection, method)

    def send_much(self, data):
        """The status; None if the connection ended before all was sent, which can lose the answer."""
        try:
            return self.send(data).status
        except ConnectionError:
            return None

    def read(self, connection, method="GET"):
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        answer = Answer(response.status, response.headers, response.read())
        self.check(answer)
        return answer

    def check(self, answer):
        """What every answer has, and what none has."""
        assert answer.status < 500, answer
        is_for_a_person = answer.status >= 400 and answer.headers["content-type"].startswith("text/html")
        assert answer.headers.get_all("content-security-policy") == [POLICY if is_for_a_person else CSP]
        assert answer.headers.get_all("x-content-type-options") == ["nosniff"]
        assert answer.headers.get_all("referrer-policy") == ["no-referrer"]
        assert answer.headers.get_all("x-frame-options") == ["DENY"]
        assert answer.headers.get_all("cross-origin-resource-policy") == ["same-origin"]
        assert not [name for name in answer.headers if name.lower().startswith(("access-control-", "server"))]
        lasts = answer.status == 200 and answer.headers["content-type"] == "image/png"
        assert answer.headers["cache-control"] == ("private, max-age=86400, immutable" if lasts else "no-store")
        if answer.status >= 400 and answer.body and not is_for_a_person:
            assert answer.headers["content-type"] == "application/json"
            assert answer.json.keys() == {"detail"}
            assert "\n" not in answer.json["detail"]
        told = [f"{name}: {value}" for name, value in answer.headers.items() if name.lower() != "set-cookie"]
        for secret in (self.token, CANARY, PASSWORD):
            assert secret.encode() not in answer.body
            assert secret not in "".join(told)

    def request(self, method, path, headers, body=b""):
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body

    def raw(self, method, path, *headers, body=b""):
        """With these headers alone, and the length of the body."""
        lengths = [("Content-Length", len(body))] if body else []
        return self.send(self.request(method, path, [*headers, *lengths, ("Connection", "close")], body), method)

    def stranger(self, method, path, *headers, body=b""):
        return self.raw(method, path, ("Host", self.host), *headers, body=body)

    def owner(self, method, path, *headers, body=b""):
        return self.stranger(method, path, self.cookie, *headers, body=body)

    def page(self, method, path, content):
        """As the server's own page asks."""
        return self.owner(method, path, self.origin, JSON, body=json.dumps(content).encode())

    def runs(self):
        return {about["name"]: about["id"] for about in self.owner("GET", "/api/runs").json["runs"]}

    def ready(self, run):
        """Its label queue, once there is something to ask."""
        end = time.monotonic() + 60
        while not (state := self.owner("GET", f"/api/runs/{run}/labels").json)["ready"]:
            assert time.monotonic() < end
            time.sleep(0.1)
        return state


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory with runs in it: with a label queue; of a camera whose password was not hidden; of an odd place."""
    place = tmp_path_factory.mktemp("safety")
    folder = make_folder(place / "images")
    path, _ = run(
        RunOptions(
            source=f"folder:{folder}", buffer=8, width=2, lr=1e-3, stc=5, images=40, probes=0, fractions="1",
            classifier="linear",
            label_budget="12", out=str(place / "runs" / "ants"),
        )
    )  # fmt: skip
    camera = f"rtsp://user:{PASSWORD}@camera/1"
    other = place / "runs" / "camera"
    shutil.copytree(path, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"source": camera, "label_budget": None}))
    event = {"time": "2026-01-01T00:00:00", "step": 1, "event": f"{camera} is lost"}
    (other / "events.jsonl").write_text(json.dumps(event) + "\n")
    status = {"sources": {camera: {"connected": True, "lost": 1}}, "account": None}
    (other / "status.json").write_text(json.dumps(status))
    shutil.copytree(path, place / "runs" / "odd")
    (place / "runs" / "odd" / "config.json").write_text(json.dumps(config | {"source": "folder:/caf\udce9"}))
    for directory in (place, place / "runs", path, other):
        (directory / "secret.txt").write_text(CANARY)
    return place / "runs"


def check_logs(servers):
    """Each still runs and has said nothing but its address."""
    for server in servers:
        assert server.process.poll() is None
        assert server.out.read_text() == f"open {server.url}/?token={server.token}\n"
        # asyncio says this of a client that goes away in the middle of an answer.
        assert {*server.err.read_text().splitlines()} <= {"socket.send() raised exception."}


@pytest.fixture(scope="module")
def servers(runs, tmp_path_factory):
    """The one that most tests attack, and one with limits that are soon reached."""
    many = Server(runs, tmp_path_factory.mktemp("many"))
    few = Server(
        runs, tmp_path_factory.mktemp("few"), "--allow-host", "camera.local, Other.example",
        rate=10, slowest_body=1.0, longest_idle=4,
    )  # fmt: skip
    with closing(many), closing(few):
        yield many.wait(), few.wait()
        check_logs((many, few))
        many.process.stdin.close()  # they end at the same time


@pytest.fixture(scope="module")
def server(servers):
    return servers[0]


@pytest.fixture(scope="module")
def hasty(servers):
    return servers[1]


@pytest.fixture(scope="module")
def ants(server):
    """The run that can be labelled."""
    found = server.runs()["ants"]
    server.ready(found)
    return found


def app_routes():
    """(method, path) of all that the application answers."""
    found = []

    def walk(routes):
        for route in routes:
            for method in getattr(route, "methods", None) or ():
                found.append((method, route.path))
            walk(getattr(route, "routes", None) or ())

    walk(make_app(SimpleNamespace()).routes)
    return sorted(set(found) - {("HEAD", "/api/openapi.json")})


# Names of files ------------------------------------------------------------------------------------------------------

UP = [
    "../", "..%2f", "..%2F", "%2e%2e/", "%2e%2e%2f", ".%2e/", "%252e%252e%252f", "..%252f", "%25252e%25252e%25252f",
    "..\\", "..%5c", "%2e%2e%5c", "..%255c", "%c0%ae%c0%ae/", "%c0%ae%c0%ae%c0%af", "..%c0%af", "..%c1%9c",
    "%e0%80%ae%e0%80%ae/", "%f0%80%80%ae%f0%80%80%ae/", "..%ef%bc%8f", "%uff0e%uff0e/", "....//", "..././", "..;/",
    "..%00/", "..%0d%0a/", ".../", "./../", "a/../../", "%2e/%2e%2e/",
]  # fmt: skip
FILES = ["config.json", "labels.sqlite", "secret.txt", "etc/passwd", "model.safetensors", "__init__.py", "app.py"]


def bad_names(path):
    for up, deep, name in itertools.product(UP, (1, 2, 8), FILES[:4]):
        yield up * deep + name
    for start, name in itertools.product(("", "/", "//", "%2f", "%5c", "C:%5c", "file:///", "file:%2f%2f"), FILES):
        yield start + name
    for name in FILES:
        yield from (f"{name}%00.js", f"style.css%00{name}", f"style.css/../{name}", f"style.css/..%2f{name}")
    for file in (path / "ants" / "config.json", path / "secret.txt"):
        yield from (str(file), quote(str(file), safe=""), "/" + str(file), "%2f" + str(file), "file://" + str(file))


def test_no_name_leads_to_a_file_that_is_not_shown(server, runs, ants):
    known = {"run": ants, "name": "style.css", "version": "0" * 32, "key": "0" * 32, "number": "1"}
    places = {("GET", "/{bad}"), ("GET", "/api/runs/{bad}"), ("GET", "/label{bad}"), ("GET", "/static{bad}")}
    for method, path in app_routes():
        for part in re.findall(r"{(\w+)}", path):
            filled = path.replace("{" + part + "}", "{bad}")
            places.add((method, re.sub(r"{(?!bad)(\w+)}", lambda found: known[found[1]], filled)))
    assert len(places) >= 12
    cases = list(itertools.product(sorted(places), sorted({*bad_names(runs)})))
    assert len(cases) >= 5000
    chosen = cases[:: len(cases) // 600]  # each place with about every eighth name, another eighth for each
    assert len(chosen) >= 500
    for (method, place), name in chosen:
        line = f"{method} {place.replace('{bad}', name)} HTTP/1.1\r\n"
        body = b'{"name": "x"}' if method in ("POST", "PUT") else b""
        headers = [("Host", server.host), server.cookie, server.origin, JSON, ("Content-Length", len(body))]
        head = "".join(f"{name}: {value}\r\n" for name, value in [*headers, ("Connection", "close")])
        answer = server.send((line + head + "\r\n").encode() + body)
        assert 400 <= answer.status < 500, line  # `check` has looked for the files' content
    assert server.owner("GET", "/static/style.css").status == 200


def test_no_request_is_sent_on_to_another_address(server, ants):
    for path in ("/api/runs/", "//evil.example/", "/label/", f"/label/{ants}/", "/static/", "/static/style.css/"):
        assert server.owner("GET", path).status == 404


# Host and Origin -----------------------------------------------------------------------------------------------------

GOOD_HOSTS = [
    "127.0.0.1:{port}", "localhost:{port}", "LocalHost:{port}", "[::1]:{port}", "  127.0.0.1:{port}\t",
    "127.0.0.1", "localhost", "[::1]",  # as a proxy on port 80 of this machine says it
]  # fmt: skip
BAD_HOSTS = [
    "", "evil.example", "evil.example:{port}", "localhost.evil.example:{port}", "127.0.0.1.nip.io:{port}",
    "127-0-0-1.nip.io:{port}", "a.localhost:{port}", "localhost.:{port}", "127.0.0.1.:{port}", "localhost.localdomain",
    "127.0.0.1:{other}", "127.0.0.1:80", "127.0.0.1:0", "127.0.0.1:", ":{port}", "127.0.0.1:0{port}",
    "127.0.0.1:+{port}", "127.0.0.1:{port}0", "127.0.0.1:-1", "127.0.0.1:99999", "127.0.0.1:{port}:{port}",
    "user@127.0.0.1:{port}", "user:pass@127.0.0.1:{port}", "127.0.0.1:{port}@evil.example", "127.0.0.1#evil.example",
    "127.0.0.1,evil.example", "127.0.0.1 evil.example", "evil.example 127.0.0.1:{port}", "http://127.0.0.1:{port}",
    "127.0.0.1:{port}/", "127.0.0.1\\", "127.0.0.1%00", "localhost%2eevil.example", "%6cocalhost:{port}",
    "2130706433:{port}", "0x7f000001:{port}", "0x7f.0.0.1:{port}", "0177.0.0.1:{port}", "127.1:{port}", "0:{port}",
    "0.0.0.0:{port}", "127.0.0.2:{port}", "10.0.0.1:{port}", "::1", "[::1", "::1]:{port}", "[::]:{port}", "[]:{port}",
    "[::ffff:127.0.0.1]:{port}", "[0:0:0:0:0:0:0:1]:{port}", "[::1%25lo]:{port}", "[127.0.0.1]:{port}", "*", "*:{port}",
    "null", "localhost\xa0:{port}", "ⓛocalhost:{port}", "127。0。0。1:{port}", "camera.local:{port}", "_", "-",
]  # fmt: skip


def named(texts, server):
    return [text.format(port=server.port, other=server.port + 1) for text in texts]


def test_only_its_own_names_are_answered(server):
    assert len(GOOD_HOSTS + BAD_HOSTS) >= 50
    for host in named(GOOD_HOSTS, server):
        assert server.raw("GET", "/api/runs", ("Host", host), server.cookie).status == 200, host
    for host in named(BAD_HOSTS, server):
        assert server.raw("GET", "/api/runs", ("Host", host), server.cookie).status == 421, host
        assert server.raw("GET", f"/?token={server.token}", ("Host", host)).status == 421, host


def test_one_host_must_be_named(server):
    own, cookie = ("Host", server.host), server.cookie
    assert server.raw("GET", "/api/runs", cookie).status == 400
    assert server.raw("GET", "/api/runs", own, own, cookie).status == 400
    assert server.raw("GET", "/api/runs", own, ("Host", "evil.example"), cookie).status == 400
    assert server.raw("GET", "/api/runs", ("Host", "evil.example"), own, cookie).status == 400
    old = f"GET /api/runs HTTP/1.0\r\n{cookie[0]}: {cookie[1]}\r\n"
    assert server.send(f"{old}\r\n".encode()).status == 421
    assert server.send(f"{old}Host: {server.host}\r\n\r\n".encode()).status == 200
    for name in ("X-Forwarded-Host", "Forwarded", "X-Host", "X-Original-Host"):
        forged = (name, f"host={server.host}" if name == "Forwarded" else server.host)
        assert server.raw("GET", "/api/runs", ("Host", "evil.example"), forged, cookie).status == 421
    assert server.owner("GET", f"http://{server.host}/api/runs").status == 404
    assert server.owner("GET", "http://evil.example/api/runs").status == 404


def test_a_port_of_thousands_of_digits_is_refused(server):
    assert server.raw("GET", "/", ("Host", "127.0.0.1:000001" + 5000 * "0"), server.cookie).status == 421


BAD_ORIGINS = [
    "null", "", "https://127.0.0.1:{port}", "http://127.0.0.1", "http://127.0.0.1:80", "http://127.0.0.1:{other}",
    "http://localhost:{port}", "http://[::1]:{port}", "http://127.0.0.1:{port}/", "http://127.0.0.1:{port}0",
    "http://127.0.0.1:{port}.evil.example", "http://127.0.0.1.evil.example:{port}", "http://evil.example",
    "http://evil.example:{port}", "http://evil.example#127.0.0.1:{port}", "http://user@127.0.0.1:{port}",
    "http://127.0.0.1:{port}@evil.example", "http://127.0.0.1:{port} http://evil.example", "ws://127.0.0.1:{port}",
    "http://127.0.0.1:{port},http://evil.example", "127.0.0.1:{port}", "//127.0.0.1:{port}", "file://", "*",
    "chrome-extension://abcdefgh", "http:127.0.0.1:{port}", "http://2130706433:{port}", "http://127.1:{port}",
]  # fmt: skip


def test_only_its_own_pages_may_ask(server, ants):
    def asked(*headers):
        """Answers to a request that reads, and to one that would change something."""
        read = server.owner("GET", "/api/runs", *headers).status
        return read, server.owner("POST", f"/api/runs/{ants}/classes", JSON, *headers, body=b"{}").status

    let_in, shut_out = (200, 422), (403, 403)
    assert asked(server.origin) == asked(("Origin", server.url.upper().replace("HTTP", "http"))) == let_in
    for origin in named(BAD_ORIGINS, server):
        assert asked(("Origin", origin)) == shut_out, origin
    assert asked(server.origin, server.origin) == asked(server.origin, ("Origin", "http://evil.example")) == shut_out
    assert asked() == (200, 403)  # a browser says where a change comes from
    for site, expected in {
        "same-origin": let_in, "none": let_in, "same-site": shut_out, "cross-site": shut_out, "": shut_out,
        "Same-Origin": shut_out, "same-origin, cross-site": shut_out, "anything": shut_out,
    }.items():  # fmt: skip
        assert asked(server.origin, ("Sec-Fetch-Site", site)) == expected, site
    mixed = ("Sec-Fetch-Site", "same-origin"), ("Sec-Fetch-Site", "cross-site")
    assert asked(server.origin, *mixed) == shut_out


def test_other_names_can_be_allowed(hasty):
    for host, status in {"camera.local": 200, "CAMERA.local": 200, "other.example": 200, "third.example": 421}.items():
        own = ("Host", f"{host}:{hasty.port}")
        assert hasty.raw("GET", "/api/runs", own, hasty.cookie).status == status, host
        origin = ("Origin", f"http://{host}:{hasty.port}")
        assert hasty.raw("GET", "/api/runs", own, origin, hasty.cookie).status == status, host


@pytest.mark.parametrize(
    ("address", "good", "bad"),
    [
        ("127.0.0.1", ["127.0.0.1", "localhost", "[::1]"], ["0.0.0.0", "10.0.0.7"]),
        ("10.0.0.7", ["10.0.0.7", "127.0.0.1", "localhost"], ["10.0.0.8", "0.0.0.0", "*"]),
        ("0.0.0.0", ["10.0.0.7", "10.0.0.8", "[fe80::1]"], ["evil.example", "*", "1.2.3", "0x7f.1", "10.0.0.7.nip.io"]),
        ("::", ["10.0.0.7", "[fe80::1]"], ["fe80::1", "evil.example", "*"]),
        ("fe80::1", ["[fe80::1]", "localhost"], ["[fe80::2]", "fe80::1"]),
        ("Box", ["box", "localhost"], ["boxes", "box.evil.example"]),
    ],
)
def test_a_server_at_another_address_has_its_name_too(address, good, bad):
    safe = Safe(None, "token", own_names(address), 8765)
    for host in good:
        assert safe._is_own_host(f"{host}:8765"), host
        assert not safe._is_own_host(f"{host}:8766"), host
    for host in bad:
        assert not safe._is_own_host(f"{host}:8765"), host


# Requests from other sites -------------------------------------------------------------------------------------------


def changing_routes(server):
    """(method, path, a body that changes something) of each route that can change anything, as the server tells."""
    paths = server.owner("GET", "/api/openapi.json").json["paths"]
    state = server.ready(run := server.runs()["ants"])
    bodies = {
        "/api/runs/{run}/labels": {"kind": "skip", "tasks": [state["next"][0]["id"]], "request": str(uuid4())},
        "/api/runs/{run}/labels/undo": {"request": str(uuid4())},
        "/api/runs/{run}/classes": {"name": f"class {uuid4()}", "request": str(uuid4())},
        "/api/runs/{run}/classes/{number}": {"name": f"class {uuid4()}"},
    }
    return [
        (method.upper(), path.format(run=run, number=state["classes"][0]["id"]), bodies[path])
        for path, methods in sorted(paths.items())
        for method in methods
        if method != "get"
    ]


def database(runs):
    with closing(sqlite3.connect(f"file:{runs / 'ants' / 'labels.sqlite'}?mode=ro", uri=True)) as connection:
        return [connection.execute(f"SELECT * FROM {t}").fetchall() for t in ("classes", "requests", "answers")]


def test_the_interface_lists_all_that_changes_something(server):
    listed = server.owner("GET", "/api/openapi.json").json["paths"]
    changing = {(method, path) for method, path in app_routes() if method not in ("GET", "HEAD")}
    assert changing == {(m.upper(), path) for path, methods in listed.items() for m in methods if m != "get"}
    assert len(changing) >= 4


def test_other_sites_change_nothing(server, runs, ants):
    bodies = {path: body for _, path, body in changing_routes(server)}
    path = f"/api/runs/{ants}/labels"
    assert server.page("POST", path, bodies[path]).status == 200  # so that undo has something
    foreign, cookie = ("Origin", "http://evil.example"), server.cookie
    own = (cookie, server.origin)
    form, text = ("Content-Type", "application/x-www-form-urlencoded"), ("Content-Type", "text/plain")
    before = database(runs)
    attacks = {
        "a foreign origin": (403, [cookie, foreign, JSON]),
        "a foreign form": (403, [cookie, foreign, form]),
        "no origin": (403, [cookie, JSON]),
        "no origin, text": (403, [cookie, text]),
        "a null origin": (403, [cookie, ("Origin", "null"), JSON]),
        "another port here": (403, [cookie, ("Origin", "http://127.0.0.1:1"), JSON]),
        "a foreign referer": (403, [cookie, ("Referer", server.url + "/"), JSON]),
        "another site": (403, [*own, ("Sec-Fetch-Site", "cross-site"), JSON]),
        "the same site": (403, [*own, ("Sec-Fetch-Site", "same-site"), JSON]),
        "a form": (415, [*own, form]),
        "text": (415, [*own, text]),
        "parts": (415, [*own, ("Content-Type", "multipart/form-data; boundary=a")]),
        "text with JSON": (415, [*own, ("Content-Type", "text/plain; application/json")]),
        "two types": (415, [*own, text, JSON]),
        "two types in one": (415, [*own, ("Content-Type", "text/plain, application/json")]),
        "no type": (415, own),
        "no cookie": (401, [server.origin, JSON]),
        "an authorization that is none": (403, [cookie, JSON, ("Authorization", "Basic dTpw")]),
        "an empty authorization": (403, [cookie, JSON, ("Authorization", "")]),
        "a bearer that is wrong": (401, [JSON, ("Authorization", "Bearer x")]),
    }
    overrides = [("X-HTTP-Method-Override", "{}"), ("X-HTTP-Method", "{}"), ("X-Method-Override", "{}")]
    for method, path, content in changing_routes(server):
        body = json.dumps(content).encode()
        read = 200 if path.endswith("/labels") else 405  # that route can be read too
        for name, (status, headers) in attacks.items():
            assert server.stranger(method, path, *headers, body=body).status == status, (name, method, path)
        for name, value in overrides:
            override = (name, value.format(method))
            assert server.owner("GET", path, override, JSON, body=body).status == read
            assert server.stranger("POST", path, cookie, foreign, override, JSON, body=body).status == 403
        asked = "&".join(f"{key}={quote(str(value))}" for key, value in content.items())
        assert server.owner("GET", f"{path}?_method={method}&{asked}").status == read
        for preflight in ("OPTIONS", "TRACE", "PATCH", "DELETE"):
            asks = [("Access-Control-Request-Method", method), ("Access-Control-Request-Headers", "content-type")]
            assert server.owner(preflight, path, foreign, *asks, JSON, body=body).status == 405
    assert database(runs) == before
    for method, path, content in changing_routes(server):  # the same from its own page
        assert server.page(method, path, content).status == 200, path
    assert database(runs) != before


# The token -----------------------------------------------------------------------------------------------------------


def test_nothing_is_shown_without_the_token(server, ants):
    token, port = server.token, server.port
    changed = [token[:i] + ("A" if token[i] != "A" else "E") + token[i + 1 :] for i in (0, 20, len(token) - 1)]
    wrong = [
        "", "x", *changed, token[:-1], token[1:], token[:20], token + "A", token + token, token.swapcase(),
        f'"{token}"', "*", "null", token.encode().hex(), base64.b64encode(token.encode()).decode(),
        quote(token) + "%00", "é",
    ]  # fmt: skip
    assert all(value != token for value in wrong)
    for value in wrong:
        assert server.stranger("GET", "/", ("Cookie", f"streamclr-{port}={value}")).status == 401, value
        assert server.stranger("GET", "/", ("Authorization", f"Bearer {value}")).status == 401, value
        assert server.stranger("GET", f"/?token={quote(value)}").status == 401, value
    for headers in (
        [],
        [("Cookie", f"streamclr-{port + 1}={token}")],
        [("Cookie", f"streamclr={token}")],
        [("Cookie", f"STREAMCLR-{port}={token}")],
        [("Cookie", f"token={token}")],
        [("Cookie", token)],
        [("Cookie", f"a=b, streamclr-{port}={token}")],
        [("Authorization", token)],
        [("Authorization", f"Bearer{token}")],
        [("Authorization", f"Basic {base64.b64encode(f':{token}'.encode()).decode()}")],
        [("X-Token", token)],
        [("Token", token)],
        [("Referer", f"{server.url}/?token={token}")],
        [("X-Original-URL", f"/?token={token}")],
    ):
        assert server.stranger("GET", "/", *headers).status == 401, headers
    for target in (
        f"/{token}", f"/?Token={token}", f"/?token[]={token}", f"/?token={token}&token={token}",
        f"/?token=x&token={token}", f"/?token={token}&token=", f"/?token%00={token}", f"/?a=token={token}",
        f"/;token={token}", f"/%3Ftoken={token}", f"/?token={token};x", f"/?token={token}%20",
    ):  # fmt: skip
        assert server.stranger("GET", target).status == 401, target
    sent = json.dumps({"token": token}).encode()
    for method, path, _ in changing_routes(server):
        assert server.stranger(method, path, server.origin, JSON, body=sent).status == 401
        assert server.stranger(method, f"{path}?token={token}", server.origin, JSON, body=b"{}").status == 401
    for method, path in app_routes():
        filled = path.format(run=ants, name="style.css", version="0" * 32, key="0" * 32, number=1)
        assert server.stranger(method, filled, server.origin, JSON, body=b"{}").status == 401, path
    assert server.stranger("HEAD", f"/?token={token}").status == 401


def test_the_printed_address_gives_a_cookie_and_goes_on_without_the_token(server):
    answer = server.stranger("GET", f"/?token={server.token}")
    assert answer.status == 303
    assert answer.headers["location"] == "/"
    name, value, *attributes = re.split("; |=", answer.headers["set-cookie"])
    assert (name, value) == server.cookie[1].partition("=")[::2]
    assert attributes == ["HttpOnly", "SameSite", "Strict", "Path", "/"]
    assert server.stranger("GET", "/", ("Cookie", f"{name}={value}")).body.startswith(b"<!doctype html>")
    for target, location in {
        f"/label/x?token={server.token}": "/label/x",
        f"/?a=b&token={server.token}&c=%0d%0aSet-Cookie:x": "/?a=b&c=%0D%0ASet-Cookie%3Ax",
        f"//evil.example/?token={server.token}": "/evil.example/",
        f"///evil.example?token={server.token}": "/evil.example",
        f"/\\evil.example?token={server.token}": "/evil.example",
        f"/%2f/evil.example?token={server.token}": "/%2f/evil.example",
        f"http://evil.example/?token={server.token}": "/http://evil.example/",
        f"/%0d%0aX:y?token={server.token}": "/%0d%0aX:y",
    }.items():
        answer = server.stranger("GET", target)
        assert (answer.status, answer.headers["location"]) == (303, location)
    assert server.stranger("GET", "/api/runs", ("Authorization", f"Bearer {server.token}")).status == 200


def test_the_token_is_in_no_address_that_is_sent_on_to(server):
    for path in ("/api/runs/", "/label/x/", "/static/"):
        twice = f"{path}?token={server.token}&token={server.token}"
        assert server.owner("GET", twice).headers["location"] is None
        assert server.owner("POST", twice, server.origin, JSON, body=b"{}").headers["location"] is None


def test_cookies_of_other_servers_on_this_machine_do_no_harm(server):
    name, own = f"streamclr-{server.port}", server.cookie[1]
    for others in (
        'a={"x": 1, "y": "z"}; {}', "a=b=c; {}", "; ;=;{}", "$Version=1; {}", "é=ü; {}", '{}; a="', "{};a",
        f"{{}}; {name}=bad", f"{name}=bad; {{}}", f"{name}=; {{}}; {name}",
    ):  # fmt: skip
        assert server.stranger("GET", "/", ("Cookie", others.replace("{}", own))).status == 200, others
    assert server.stranger("GET", "/", ("Cookie", "a=b"), ("Cookie", own)).status == 200


def run_safe(safe, *headers, query=b"", kind="http"):
    """The messages with which it answers, without a server."""
    sent = []

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)

    given = [(b"host", b"127.0.0.1:8765"), *headers]
    scope = {"type": kind, "method": "GET", "path": "/", "raw_path": b"/", "query_string": query, "headers": given}
    asyncio.run(safe(scope, receive, send))
    return sent


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize(
    ("headers", "query"),
    [([(b"cookie", b"streamclr-8765=x")], b""), ([(b"authorization", b"Bearer x")], b""), ([], b"token=x")],
)
def test_the_token_is_compared_in_a_time_that_tells_nothing(monkeypatch, headers, query):
    safe = Safe(hello, "token", ["127.0.0.1"], 8765)
    compared = []
    for verdict in (True, False):
        double = SimpleNamespace(compare_digest=lambda *both: compared.append(both) or verdict)  # noqa: B023
        monkeypatch.setattr(safety, "hmac", double)
        assert run_safe(safe, *headers, query=query)[0]["status"] == ((303 if query else 200) if verdict else 401)
    assert set(compared) == {(b"x", b"token")}
    assert hmac.compare_digest is not double.compare_digest


def test_the_token_has_256_bits_and_is_another_one_each_time(servers):
    tokens = {server.token for server in servers}
    assert len(tokens) == 2
    assert all(len(base64.urlsafe_b64decode(token + "=")) == 32 for token in tokens)


# Requests made from the interface's own description -------------------------------------------------------------------


def fuzz(server, ants, n_requests, seconds, *headers):
    """Send what schemathesis makes of the OpenAPI document, much of it about what there is, and count the answers."""
    import requests
    import schemathesis
    from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(server.owner("GET", "/api/openapi.json").json)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 9
    state, wall = server.ready(ants), server.owner("GET", f"/api/runs/{ants}/wall").json
    there = {"key": state["next"][0]["id"], "version": wall["version"], "number": state["classes"][0]["id"]}
    cases = st.one_of(
        operation.as_strategy(mode, path_parameters={part: known[part] for part in parts & known.keys()})
        for operation in operations
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        for parts in [{*re.findall(r"{(\w+)}", operation.path)}]
        for known in ({"run": ants, **there}, {"run": ants}, {})
    )
    counts, end = {}, time.monotonic() + seconds
    with requests.Session() as session:
        for number in itertools.count():

            @seed(number)
            @settings(
                max_examples=max(50, n_requests // 10), database=None, deadline=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
            )  # fmt: skip
            @given(cases)
            def send(case):
                if sum(counts.values()) >= n_requests:
                    return
                assert time.monotonic() < end, f"{counts} in {seconds} s"
                answer = case.call(server.url, session=session, headers=dict(headers), timeout=60)
                counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
                told = Message()
                for name, values in answer.headers.items():
                    told[name] = values[0]
                server.check(Answer(answer.status_code, told, answer.content))

            send()
            if sum(counts.values()) >= n_requests:
                return counts


def check_fuzzed(server, runs, ants, n_requests, seconds):
    before = database(runs)
    counts = fuzz(server, ants, n_requests, seconds, server.origin)
    assert sum(counts.values()) == n_requests
    assert counts.keys() <= {400, 401, 403, 405, 413, 415}
    assert counts[401] > n_requests // 2
    assert database(runs) == before

    counts = fuzz(server, ants, n_requests, seconds, server.origin, ("Authorization", f"Bearer {server.token}"))
    assert sum(counts.values()) == n_requests
    assert counts.keys() <= {200, 400, 404, 405, 409, 413, 415, 422}
    assert min(counts[200], counts[404], counts[422]) > n_requests // 50  # they come past the first check
    assert server.ready(ants)["next"]
    assert server.owner("GET", "/").status == 200


def test_requests_of_every_form_are_answered_and_let_in_with_the_token_alone(server, runs, ants):
    check_fuzzed(server, runs, ants, 150, 600)


@pytest.mark.long
def test_ten_thousand_requests_of_every_form(server, runs, ants):
    check_fuzzed(server, runs, ants, 10_000, 1800)


def test_bodies_that_are_hard_to_read_are_refused(server, ants):
    no_json = [
        b"[" * 60_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b'{"request":' + b"9" * 60_000 + b"}", b"\xff\xfe{",
    ]  # fmt: skip
    bodies = [
        *no_json, b'{"class":NaN}', b'{"class":1e999}', b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b'"', b"null",
        b"[]", b"0", b"", b'{"\\ud800": 1}', b'{"__proto__": {}, "__class__": 1}', b'{"request": "12345678"}',
        b'{"request": "12345678\\n", "name": "a"}', b'{"request": null, "name": "a"}', b'{"request": "", "name": "a"}',
        b'{"request": "12345678", "name": "a", "more": 1}', b'{"request": "12345678", "name": "a", "a\\nb": 1}',
        b'{"request": ["12345678"], "name": "a"}',
    ]  # fmt: skip
    for name in (b'"\\ud800"', b"1", b'"a\\u0000b"', b'"\\u202e"', b'" "', b'"' + b"a" * 101 + b'"', b"null", b'["a"]'):
        bodies.append(b'{"request": "12345678", "name": ' + name + b"}")
    for body in bodies:
        answer = server.owner("POST", f"/api/runs/{ants}/classes", server.origin, JSON, body=body)
        assert answer.status == (400 if body in no_json else 422), body[:40]


# Limits --------------------------------------------------------------------------------------------------------------


def test_a_body_has_at_most_64_kib(server, ants):
    path = f"/api/runs/{ants}/classes"
    own = [("Host", server.host), server.cookie, server.origin, JSON, ("Connection", "close")]
    fits = json.dumps({"name": "a", "padding": "x" * 65_000}).encode().ljust(65_536)
    assert server.owner("POST", path, server.origin, JSON, body=fits).status == 422
    assert server.owner("POST", path, server.origin, JSON, body=fits + b" ").status == 413
    for length, status in {
        65_537: 413, 10**12: 413, 10**19: 413, 10**40: 400, "-1": 400, "1e3": 400, "0x10": 400, "1, 2": 400, "": 400,
    }.items():  # fmt: skip
        head = server.request("POST", path, [*own, ("Content-Length", length)])
        assert server.send(head).status == status, length
    chunked = server.request("POST", path, [*own, ("Transfer-Encoding", "chunked")])
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    assert server.send(chunked + 4 * chunk + b"0\r\n\r\n").status == 422
    assert server.send(chunked + 4 * chunk + b"1\r\n \r\n0\r\n\r\n").status == 413
    assert server.send_much(chunked + 100 * chunk) in (413, None)
    both = server.request("POST", path, [*own, ("Content-Length", 2), ("Transfer-Encoding", "chunked")])
    assert server.send(both + 5 * chunk).status == 413
    for coding in ("gzip", "chunked, gzip", "identity", "xchunked"):
        head = server.request("POST", path, [*own, ("Transfer-Encoding", coding)])
        assert server.send(head + b"0\r\n\r\n").status == 400


def is_closed(connection):
    """Whether the server ever closes it."""
    connection.settimeout(60)
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.system
def test_a_body_that_comes_too_slowly_is_not_waited_for(hasty):
    head = [("Host", hasty.host), hasty.cookie, hasty.origin, JSON, ("Content-Length", 10)]
    with hasty.connect() as connection:
        connection.sendall(hasty.request("POST", f"/api/runs/{'0' * 16}/classes", head, b"{"))
        assert hasty.read(connection).status == 413
        assert is_closed(connection)


@pytest.mark.system
def test_the_body_of_a_stranger_is_not_waited_for(hasty):
    for kind, part in ((("Content-Length", 60_000), b" "), (("Transfer-Encoding", "chunked"), b"1\r\n \r\n")):
        with hasty.connect() as connection:
            head = [("Host", hasty.host), hasty.origin, JSON, kind]
            connection.sendall(hasty.request("POST", f"/api/runs/{'0' * 16}/classes", head))
            assert hasty.read(connection).status == 401
            assert ends(connection, part)


def ends(connection, part):
    """Whether the server closes it though something comes in all the time."""
    for _ in range(600):
        try:
            connection.sendall(part)
        except ConnectionError:
            return True
        time.sleep(0.1)
    return False


def test_very_many_headers_and_very_long_addresses_do_no_harm(server):
    own = [("Host", server.host), server.cookie, ("Connection", "close")]
    many = [(f"x-{number}", "y") for number in range(1000)]
    assert server.send(server.request("GET", "/api/runs", [*own, *many])).status == 200
    # More than 16 KiB are refused with 400, unless they come in one piece.
    assert server.send_much(server.request("GET", "/api/runs", [*own, *(10 * many)])) in (200, 400, None)
    assert server.send_much(server.request("GET", "/api/runs", [*own, ("x", "y" * 500_000)])) in (400, None)
    for n, refused in ((10_000, ()), (100_000, (400, None)), (1_000_000, (400, None))):
        for path in ("/" + "a" * n, "/static/" + "../" * (n // 3), "/" + "%00" * (n // 3)):
            assert server.send_much(server.request("GET", path, own)) in (404, *refused)
        assert server.send_much(server.request("GET", "/?" + "a=b&" * (n // 4), own)) in (200, *refused)
    assert server.owner("GET", "/").status == 200


def test_what_is_no_http_is_refused(server, ants):
    good = server.request("GET", "/api/runs", [("Host", server.host), server.cookie])
    for data in (
        b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", b"GET /\r\n\r\n",
        good[:-2] + b"X: a\0b\r\n\r\n", good[:-2] + b"X\xff: a\r\n\r\n",
        good[:-2] + b": a\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    ):  # fmt: skip
        assert server.send(data).status == 400, data
    assert server.send(b"GET / HTTP/9.9\r\n\r\n").status == 421  # no Host
    assert server.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").status == 405
    own = [("Host", server.host), server.origin, JSON, ("Transfer-Encoding", "chunked")]
    for headers in (own, [*own, server.cookie]):  # while, or after, it is answered
        answer = server.send(server.request("POST", f"/api/runs/{ants}/classes", headers, b"no chunk\r\n"))
        assert answer.status in (400, 401)
    with server.connect() as connection:
        connection.sendall(server.request("GET", "/api/live", [("Host", server.host), server.cookie]))
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.sendall(b"no request\r\n\r\n")  # the test of the log sees what comes of it


@pytest.mark.system
def test_connections_that_idle_leave_room_for_others(hasty, server):
    """More of them than the server has places, some with a part of a request."""
    with ExitStack() as stack:
        for number in range(300):
            connection = stack.enter_context(server.connect())
            if number % 2:
                connection.sendall(b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        started = time.monotonic()
        for _ in range(5):
            assert server.owner("GET", "/api/runs").status == 200
        assert time.monotonic() - started < 15
    with ExitStack() as stack:
        silent, partial, asked = (stack.enter_context(hasty.connect()) for _ in range(3))
        partial.sendall(b"GET / HTTP/1.1\r\n")
        asked.sendall(hasty.request("GET", "/static/style.css", [("Host", hasty.host), hasty.cookie]))
        assert hasty.read(asked).status == 200
        assert ends(partial, b"X: y\r\n")
        assert is_closed(silent)
        assert is_closed(asked)


def test_somebody_who_asks_too_often_has_to_wait_and_the_owner_has_not(hasty):
    forged = (f"10.0.{n // 250}.{n % 250}" for n in itertools.count())

    def ask_often(path, *headers):
        """Over one connection: ten a second are allowed, so that a busy server too is asked more often than that."""
        with hasty.connect() as connection:
            for _ in range(300):
                own = [("Host", hasty.host), ("X-Forwarded-For", next(forged)), *headers]
                connection.sendall(hasty.request("GET", path, own))
                yield hasty.read(connection).status

    time.sleep(1)
    statuses = list(ask_often("/api/runs"))
    assert statuses[:30] == [401] * 30
    assert {*statuses} == {401, 429}  # a tenth of a second between two is enough for one more
    assert hasty.owner("GET", "/api/runs").status == 200
    time.sleep(0.5)
    assert hasty.stranger("GET", "/api/runs").status == 401
    assert {*ask_often("/static/common.js", hasty.cookie)} == {200, 429}  # but for the owner, too, there is an end
    time.sleep(0.5)
    assert hasty.owner("GET", "/api/runs").status == 200


def test_a_limit_is_for_each_address_and_fills_up_again(monkeypatch):
    now = 0.0
    monkeypatch.setattr(safety, "time", SimpleNamespace(monotonic=lambda: now))
    limits = Limits(10, 20)
    assert [limits.allow("a") for _ in range(25)] == [True] * 20 + [False] * 5
    assert limits.allow("b")
    now = 1.0
    assert [limits.allow("a") for _ in range(15)] == [True] * 10 + [False] * 5
    now = 1e6
    assert [limits.allow("a") for _ in range(25)] == [True] * 20 + [False] * 5
    for number in range(10_000):
        limits.allow(str(number))
    assert len(limits._left) <= safety.MAX_ADDRESSES


def test_other_methods_and_websockets_are_refused(server, hasty):
    for method in ("OPTIONS", "TRACE", "DELETE", "PATCH", "CONNECT", "PROPFIND", "get", "TRACK", "X" * 1000):
        for path in ("/", "/api/runs", "*"):
            answer = server.owner(method, path, server.origin)
            assert answer.status == 405
            assert server.token not in str(answer)
    for path in ("/", "/api/runs", "/static/style.css"):
        assert server.owner("HEAD", path).body == b""
        assert server.owner("POST", path, server.origin, JSON, body=b"{}").status == 405
    upgrade = [("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "dGhlIHNhbXBsZQ==")]
    for path, status in (("/", 200), ("/api/live/", 404), ("/ws", 404)):  # as without the upgrade
        for headers, expected in (([], 401), ([server.cookie], status)):
            own = [("Host", server.host), *headers, ("Connection", "Upgrade"), *upgrade]
            assert server.send(server.request("GET", path, own)).status == expected
    own = [("Host", server.host), ("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "")]
    assert server.send(server.request("GET", "/", own)).status == 401
    safe = Safe(hello, "token", ["127.0.0.1"], 8765)
    cookie = (b"cookie", b"streamclr-8765=token")
    assert run_safe(safe, cookie, kind="websocket") == [{"type": "websocket.close", "code": 1008}]


# What is in the answers ----------------------------------------------------------------------------------------------


def static_files():
    return {file.name: file.read_bytes() for file in (files("streamclr.web") / "static").iterdir()}


def test_pages_load_nothing_from_elsewhere(server, ants):
    pages = {"/": "dashboard.html", f"/label/{ants}": "label.html"}
    answers = {path: server.owner("GET", path) for path in [*pages, *(f"/static/{name}" for name in static_files())]}
    for path, answer in answers.items():
        assert answer.body == static_files()[pages.get(path, path.rpartition("/")[2])]
        text = answer.body.decode()
        names = {"http://www.w3.org/2000/svg"}  # of a kind of element; nothing is loaded
        assert {*re.findall(r"\w+://\w[^\s\"'`)]*", text)} <= names, path
        assert not re.findall(r"[\"'`(=]\s*//\w", text), path
        assert not re.findall(r"\b(eval|Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", text), path
        if answer.headers["content-type"].startswith("text/html"):
            assert not re.findall(r"<script(?![^>]*\bsrc=\"/static/)|<style|\sstyle=|\son\w+=|javascript:", text), path


def test_class_names_are_sent_as_json_and_nothing_else(server, ants):
    names = [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</title>'\"`{{7*7}}${7*7}",
        "a\u00a0b\u2028",
    ]
    for name in names[:3]:
        answer = server.page("POST", f"/api/runs/{ants}/classes", {"request": str(uuid4()), "name": name})
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert name in [one["name"] for one in answer.json["classes"]]
        again = server.page("POST", f"/api/runs/{ants}/classes", {"request": str(uuid4()), "name": name})
        assert (again.status, again.headers["content-type"]) == (409, "application/json")
    for name in names:
        for path in ("/", f"/label/{ants}", f"/label/{quote(name, safe='')}"):
            assert name.encode() not in server.owner("GET", path).body


def events(server, n):
    """The first messages of the live stream."""
    with server.connect() as connection:
        connection.sendall(server.request("GET", "/api/live", [("Host", server.host), server.cookie]))
        response = http.client.HTTPResponse(connection)
        response.begin()
        found = []
        while len(found) < n:
            kind, data = response.readline(), response.readline()
            assert response.readline() == b"\n"
            found.append((kind[7:-1].decode(), data[6:-1]))
    assert response.headers["content-type"].startswith("text/event-stream")
    server.check(Answer(response.status, response.headers, b"\n".join(data for _, data in found)))
    return [(kind, json.loads(data)) for kind, data in found]


def test_passwords_in_sources_are_never_sent(server):
    """`check` looks for them in every answer."""
    found = server.owner("GET", "/api/runs").json["runs"]
    assert "rtsp://user:***@camera/1#fit=crop" in [about["source"] for about in found]
    camera = server.runs()["camera"]
    for path in ("wall", "labels", "sheets/" + "0" * 32, "pictures/" + "0" * 32):
        server.owner("GET", f"/api/runs/{camera}/{path}")
    told = [content for kind, content in events(server, 6) if kind == "status" and content["run"] == camera]
    assert told[0]["events"][0]["event"] == "rtsp://user:***@camera/1 is lost"
    assert told[0]["sources"] == {"rtsp://user:***@camera/1": {"connected": True, "lost": 1}}


def test_paths_that_are_no_text_are_sent_as_far_as_they_are(server):
    assert "folder:/caf??fit=crop" in [about["source"] for about in server.owner("GET", "/api/runs").json["runs"]]


def test_errors_are_told_without_passwords(server, ants, monkeypatch):
    answer = server.owner("GET", f"/api/runs/{server.runs()['camera']}/labels")
    assert (answer.status, "has no label queue" in answer.json["detail"]) == (422, True)
    assert shown(f"no rtsp://user:{PASSWORD}@camera/1 in \udce9") == "no rtsp://user:***@camera/1 in ?"


def test_what_a_directory_holds_does_not_end_the_live_stream(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(streamclr.web.site, "READ_EVERY", 0.01)
    monkeypatch.setattr(streamclr.web.site, "FIND_RUNS_EVERY", 1)
    path = shutil.copytree(runs / "ants", tmp_path / "ants")

    async def follow():
        site = Site([path])
        following = asyncio.create_task(site.follow())
        messages = site.listen()
        for status in ("[]", "{", '{"sources": []}', '{"sources": {"a": 1, "b": {}}}', '{"sources": 1, "account": 1}'):
            (path / "status.json").write_text(status)
            (path / "events.jsonl").write_text('{"time": 1}\nnull\n{"time": 1, "step": 1, "event": 1}\n')
            await asyncio.wait_for(anext(messages), 60)
            await asyncio.sleep(0.1)
        path.rename(tmp_path / "gone")  # at once: whoever looks puts a file into a directory that is being emptied
        await asyncio.sleep(0.2)
        assert not following.done()
        following.cancel()

    asyncio.run(follow())


def test_pictures_are_shown(server, ants):
    task = server.ready(ants)["next"][0]
    wall = server.owner("GET", f"/api/runs/{ants}/wall").json
    for path in (task["picture"], wall["picture"]):
        answer = server.owner("GET", path)
        assert (answer.status, answer.headers["content-type"]) == (200, "image/png")
        assert server.stranger("GET", path).status == 401


# What a person sees ---------------------------------------------------------------------------------------------------

BROWSER = ("Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8")


@pytest.mark.parametrize("path", ["/", "/?token=of-an-earlier-start", "/label/0123456789abcdef", "/api/runs"])
def test_an_old_bookmark_leads_to_a_page_that_says_what_to_do(server, runs, path):
    """Without the token, and with nothing about the runs in it."""
    answer = server.stranger("GET", path, BROWSER)
    page = answer.body.decode()
    assert (answer.status, answer.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "Each start of the server makes a new token" in page
    assert "<code>streamclr serve RUN</code>" in page
    assert server.token not in page
    assert not any(name in page for name in (str(runs), CANARY, PASSWORD, "of-an-earlier-start"))
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)[1]
    sha256 = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{sha256}'" in answer.headers["content-security-policy"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "script" not in page + answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("headers", "status", "what"),
    [
        ([("Sec-Fetch-Site", "cross-site")], 403, "Opened from another site"),
        ([("Host", "<b>evil</b>.example")], 421, "The server does not know this host name"),
    ],
)
def test_other_refusals_are_pages_too_and_repeat_nothing(server, headers, status, what):
    host = () if any(name == "Host" for name, _ in headers) else (("Host", server.host),)
    answer = server.raw("GET", "/", *host, *headers, BROWSER, server.cookie)
    assert answer.status == status
    assert what in answer.body.decode()
    assert "evil" not in answer.body.decode()


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def unserved(monkeypatch):
    """`serve` up to where it would begin, at the loopback address whatever it is told."""
    listen = streamclr.web.server.listen
    opened = []
    monkeypatch.setattr(
        streamclr.web.server, "listen", lambda _, port: opened.append(listen("127.0.0.1", port)) or opened[-1]
    )
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    monkeypatch.setattr(streamclr.web.server.os, "nice", lambda _: 0)
    yield
    for one in opened:
        one.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "fe80::1", "box.example"])
def test_an_address_that_others_reach_is_warned_of(unserved, runs, capsys, host):
    serve(ServeOptions(runs=(str(runs),), port=0, host=host))
    out, err = capsys.readouterr()
    assert re.fullmatch(r"open http://\S+:\d+/\?token=[\w-]{43}\n", out)
    assert f"streamclr: {host} is reachable from other machines" in err
    assert "the connection is not encrypted" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "LOCALHOST"])
def test_an_address_of_this_machine_alone_is_not(unserved, runs, capsys, host):
    serve(ServeOptions(runs=(str(runs),), port=0, host=host))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "many"], ["--port", "-1"], ["--port", "65536"], ["--port", "1e3"], ["--host", "nowhere.invalid"],
        ["--host", "999.0.0.1"], ["--host", ""], ["--host", "a" * 70], ["--host", "a..b"], ["--host", "192.0.2.1"],
        ["--allow-host", "a:80"], ["--allow-host", "http://a"], ["--allow-host", "*"],
        ["--allow-host", "ok.example,a b"], ["--allow-host", "a/b"], ["--hots", "a"], ["--allow-host", "ö.example"],
    ],
)  # fmt: skip
def test_a_bad_value_is_one_line(monkeypatch, runs, capsys, words):
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: pytest.fail("it was taken"))
    given = [] if "--port" in words else ["--port", "0"]
    assert main(["serve", str(runs), *given, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("streamclr: ")
    assert err.count("\n") == 1


def test_small_answers_are_sent_at_once():
    """asyncio turns Nagle's algorithm off, which costs 40 ms a request, only where the protocol is TCP by name."""
    with streamclr.web.server.listen("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP


def test_a_port_that_is_taken_is_one_line(server, runs, capsys):
    assert main(["serve", str(runs), "--port", str(server.port)]) == 2
    assert f"cannot listen on port {server.port}" in capsys.readouterr().err


def test_the_log_has_the_printed_line_alone(servers):
    """The fixture looks again when the last test has ended, in whichever order they came."""
    check_logs(servers)
