"""Parses destinations such as `mqtts://broker/home/door#user=me&password_env=BROKER_PASSWORD`."""

import os
import ssl
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from streamclr.base import options as opts
from streamclr.base.errors import UserError

PORTS = {"mqtt": 1883, "mqtts": 8883, "http": 80, "https": 443}
FORMS = "use mqtt://broker/topic, mqtts://broker/topic, http://…, https://… or a file that ends in .jsonl"


@dataclass(frozen=True)
class MqttOptions:
    """What may stand after the # of an MQTT address.

    discovery: the prefix that Home Assistant listens to; empty: it is told nothing.
    """

    user: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    ca: str | None = None
    discovery: str = "homeassistant"


@dataclass(frozen=True)
class WebhookOptions:
    """What may stand after the # of a webhook."""

    authorization_env: str | None = None
    authorization_file: str | None = None
    ca: str | None = None


@dataclass(frozen=True)
class Address:
    """One destination. It has secrets: show `name`, which has none.

    target: the topic, the path with its query, or the path of the file.
    secret: the password, or the header Authorization.
    """

    scheme: str  # one of PORTS, or "file"
    target: str
    host: str = ""
    port: int = 0
    user: str | None = None
    secret: str | None = None
    ca: str | None = None
    discovery: str = ""

    @property
    def name(self) -> str:
        """For people. The path of a webhook is often its password."""
        if self.scheme == "file":
            return self.target
        host = f"[{self.host}]" if ":" in self.host else self.host
        where = f"{self.scheme}://{host}" + (f":{self.port}" if self.port != PORTS[self.scheme] else "")
        return f"{where}/{self.target}" if self.scheme.startswith("mqtt") else where + "/***" * (self.target != "/")

    @property
    def key(self) -> str:
        """For file names: another one for each destination, the same after a restart; tells no secret."""
        whole = f"{self.scheme} {self.host} {self.port} {self.target}"
        return f"{self.scheme}-{sha256(whole.encode()).hexdigest()[:12]}"

    def tls(self) -> ssl.SSLContext | None:
        """None without TLS."""
        return ssl.create_default_context(cafile=self.ca) if self.scheme in ("mqtts", "https") else None


def parse_address(text: str) -> Address:
    """The destination, with its secrets read from where the address says."""
    scheme, mark, _ = text.partition("://")
    if not mark:
        return _file(text)
    if scheme not in PORTS:
        raise UserError(f"--to {scheme}://…: {FORMS}")
    url, _, fragment = text.partition("#")
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS[scheme]
        if not parts.hostname:
            raise ValueError
    except ValueError:
        how = "in a password, write / as %2F, # as %23, @ as %40"
        raise UserError(f"--to {scheme}://… has no host, or a port that is no number; {how}") from None
    given = opts.split(f"?{fragment}")[1]
    make = _mqtt if scheme.startswith("mqtt") else _webhook
    return make(scheme, parts.hostname, port, parts, given)


def _mqtt(scheme: str, host: str, port: int, parts: SplitResult, given: dict[str, Any]) -> Address:
    own = opts.build(MqttOptions, given, f"--to {scheme}")
    topic, where = unquote(parts.path).strip("/"), f"--to {scheme}://{host}"
    if not topic or set(topic) & set("+#\0"):
        raise UserError(f"{where}: give a topic without + and #, as in {scheme}://{host}/home/door")
    if set(own.discovery) & set("+#\0"):
        raise UserError(f"{where}: discovery is {own.discovery!r}: use a prefix of topics without + and #")
    if find_spec("paho") is None:
        raise UserError(f"{where} needs paho-mqtt: pip install -c constraints.txt -e '.[mqtt]'")
    secret = _secret(own.password_env, own.password_file, "password", where)
    user = own.user or (unquote(parts.username) if parts.username else None)
    password = unquote(parts.password) if parts.password and secret is None else secret
    return Address(scheme, topic, host, port, user, password, _authority(own.ca, where), own.discovery.strip("/"))


def _webhook(scheme: str, host: str, port: int, parts: SplitResult, given: dict[str, Any]) -> Address:
    own, where = opts.build(WebhookOptions, given, f"--to {scheme}"), f"--to {scheme}://{host}"
    if parts.username or parts.password:
        how = "put the header into a variable or a file: #authorization_env=NAME or #authorization_file=PATH"
        raise UserError(f"{where} has a user and a password: {how}")
    secret = _secret(own.authorization_env, own.authorization_file, "authorization", where)
    if secret is not None and not (secret.isascii() and secret.isprintable()):
        raise UserError(f"{where}: the authorization is not one line of ASCII: write it as in Bearer TOKEN")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not (target.isascii() and target.isprintable()) or " " in target:
        raise UserError(f"{where}: write signs in its path that are not ASCII as %XX")
    return Address(scheme, target, host, port, secret=secret, ca=_authority(own.ca, where))


def _file(text: str) -> Address:
    path = Path(text).expanduser()
    if path.suffix != ".jsonl":
        raise UserError(f"--to {opts.redacted(text)!r}: {FORMS}")
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise UserError(f"--to {text!r}: no file can be written there; make the directory {path.parent} first")
    return Address("file", str(path))


def _secret(variable: str | None, file: str | None, what: str, where: str) -> str | None:
    if variable and file:
        raise UserError(f"{where}: both {what}_env and {what}_file are given: use one of them")
    if variable and variable not in os.environ:
        raise UserError(f"{where}: no environment variable {variable!r}, which {what}_env names")
    if variable:
        return os.environ[variable]
    if not file:
        return None
    try:
        return Path(file).expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise UserError(f"{where}: {what}_file {file!r} cannot be read ({why})") from None


def _authority(ca: str | None, where: str) -> str | None:
    if ca is None:
        return None
    path = str(Path(ca).expanduser())
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError):
        raise UserError(f"{where}: ca {ca!r} is no file with certificates (PEM)") from None
    return path
