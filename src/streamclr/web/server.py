"""The web server of the dashboard and the labelling page. The pages read run directories only."""

import os
import secrets
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from streamclr.base.errors import UserError
from streamclr.base.options import argument, option
from streamclr.base.progress import say
from streamclr.runs.status import check_can_serve


@dataclass(frozen=True)
class PageOptions:
    port: int = option(8765, "the port; 0 picks any free port")
    host: str = option("127.0.0.1", "the address to listen on; 0.0.0.0 makes the pages reachable from other machines")
    allow_host: str | None = option(None, "further names that browsers may use for this server, separated by commas")


@dataclass(frozen=True)
class ServeOptions(PageOptions):
    runs: tuple[str, ...] = argument("a run directory, or a directory of run directories", ())
    until_eof: bool = option(False, "stop at the end of standard input")


def serve(config: ServeOptions, page: str = "/") -> None:
    """Serve until stopped. page: path of the URL to print; `{run}` in it stands for the first run."""
    check_can_serve()
    import uvicorn

    from streamclr.web.app import make_app
    from streamclr.web.connection import MAX_IDLE_SECONDS, Connection
    from streamclr.web.safety import Safe, ip_of, own_names, split_host
    from streamclr.web.site import Site, run_id

    site = Site([Path(run) for run in config.runs])
    listening = _listen(config.host, config.port)
    port = listening.getsockname()[1]
    hosts = own_names(config.host)
    for name in filter(None, map(str.strip, (config.allow_host or "").split(","))):
        if split_host(name) != (name.lower(), None):
            raise UserError(f"--allow-host has {name!r}: give names such as camera.local, without a port")
        hosts.add(name)
    token = secrets.token_urlsafe(32)  # 256 bits

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            site.let_go()  # or uvicorn would wait for the clients of /api/live
            await super().shutdown(sockets)

    def stop_at_end_of_input() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    server = Server(
        uvicorn.Config(
            Safe(make_app(site), token, hosts, port),
            http=Connection,
            log_level="error",  # a warning for each malformed request would let a stranger fill the disk
            access_log=False,  # the first request contains the token
            server_header=False,
            proxy_headers=False,  # or a client could evade the rate limit with a new address in each request
            lifespan="on",
            ws="none",
            limit_concurrency=256,
            timeout_keep_alive=MAX_IDLE_SECONDS,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=16 * 1024,
        )
    )
    with suppress(OSError):
        os.nice(10)  # a learner on this machine has priority
    torch.set_num_threads(1)
    if config.until_eof:
        threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    ip = ip_of(config.host)
    shown = "127.0.0.1" if ip and ip.is_unspecified else f"[{config.host}]" if ":" in config.host else config.host
    where = page.format(run=run_id(Path(config.runs[0])))
    print(f"open http://{shown}:{port}{where}?token={token}", flush=True)
    if not ip.is_loopback if ip else config.host.lower() != "localhost":
        say(
            f"streamclr: {config.host} is reachable from other machines: whoever has this URL can see and label the "
            "images, and the connection is not encrypted"
        )
    server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"port is {port}: use 1 to 65535, or 0 for any free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only if the protocol is given
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)  # a browser that opens the URL at once waits instead of being refused
    except OSError as error:
        raise UserError(
            f"cannot listen on port {port} of {host} ({error.strerror}): give another --port, or 0 for any free port"
        ) from None
    except UnicodeError:  # not a valid host name
        raise UserError(f"host is {host!r}: use an address such as 127.0.0.1") from None
    return listening
