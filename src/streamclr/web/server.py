"""Pages about runs, on this machine: the dashboard and the labelling page. They read run directories, nothing else."""

import os
import secrets
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import torch

from streamclr.base.errors import UserError
from streamclr.base.options import option
from streamclr.base.progress import say
from streamclr.runs.status import check_can_serve


@dataclass(frozen=True)
class PageOptions:
    """Where a page is to be had."""

    port: int = option(8765, "the port; 0 takes a free one")
    host: str = option("127.0.0.1", "the address to listen at; another one than this machine's own opens it to others")
    allow_host: str | None = option(None, "names under which others may ask for it, with commas between")


@dataclass(frozen=True)
class ServeOptions(PageOptions):
    """Open the dashboard of runs, those that are learning included."""

    runs: tuple[str, ...] = option((), "run directories, or directories that hold some")
    until_eof: bool = option(False, "end when standard input does")


def serve(config: ServeOptions, page: str = "/") -> None:
    """Serve until it is stopped. page: the one whose URL is printed; `{run}` in it is the first run."""
    check_can_serve()
    import uvicorn

    from streamclr.web.app import make_app
    from streamclr.web.connection import LONGEST_IDLE, Connection
    from streamclr.web.safety import Safe, own_names, split_host
    from streamclr.web.site import Site, run_id

    site = Site([Path(run) for run in config.runs])
    listening = _listen(config.host, config.port)
    port = listening.getsockname()[1]
    hosts = own_names(config.host)
    for name in (config.allow_host or "").split(","):
        if name.strip():
            if split_host(name.strip()) != (name.strip().lower(), None):
                raise UserError(f"allow_host has {name.strip()!r}: give names as camera.local, without a port")
            hosts.add(name.strip())
    token = secrets.token_urlsafe(32)  # 256 bits

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            site.let_go()  # or it would wait for those who follow
            await super().shutdown(sockets)

    server = Server(
        uvicorn.Config(
            Safe(make_app(site), token, hosts, port),
            http=Connection,
            log_level="error",  # a warning for each request that is no HTTP would let a stranger fill the disk
            access_log=False,  # the first request has the token in it
            server_header=False,
            proxy_headers=False,  # or each request could name another address, and none would come too often
            lifespan="on",
            ws="none",
            limit_concurrency=256,
            timeout_keep_alive=LONGEST_IDLE,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=16 * 1024,
        )
    )
    with suppress(OSError):
        os.nice(10)  # a learner on this machine goes first
    torch.set_num_threads(1)
    if config.until_eof:
        threading.Thread(target=_end_with_input, args=[server], daemon=True).start()
    shown = (
        "127.0.0.1" if config.host in ("0.0.0.0", "::") else f"[{config.host}]" if ":" in config.host else config.host
    )
    where = page.format(run=run_id(Path(config.runs[0])))
    print(f"open http://{shown}:{port}{where}?token={token}", flush=True)
    if not _is_own(config.host):
        say(
            f"streamclr: {config.host} is open to others: whoever has this URL sees the pictures and can label, and "
            "nothing is encrypted on the way"
        )
    server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"port is {port}: use 1 to 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)  # asyncio sends at once what is known to be TCP
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)  # who opens the URL at once waits, and is not refused
    except OSError as error:
        raise UserError(
            f"cannot serve at port {port} of {host} ({error.strerror}): give another --port, or 0 for a free one"
        ) from None
    except UnicodeError:  # a name that no address can have
        raise UserError(f"host is {host!r}: use the address to listen at, as 127.0.0.1") from None
    return listening


def _is_own(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _end_with_input(server: "object") -> None:
    sys.stdin.buffer.read()
    server.should_exit = True  # type: ignore[attr-defined]
