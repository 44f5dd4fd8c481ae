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
from streamclr.records.options import ListenOptions
from streamclr.runs.dashboard import announce, check_installed, lan_address, listen


@dataclass(frozen=True)
class PageOptions(ListenOptions):
    allow_host: str | None = option(None, "further names that browsers may use for this server, separated by commas")


@dataclass(frozen=True)
class ServeOptions(PageOptions):
    runs: tuple[str, ...] = argument("a run directory, or a directory of run directories", ())
    until_eof: bool = option(False, "stop at the end of standard input")


def serve(config: ServeOptions, page: str = "/") -> None:
    """Serve until stopped. page: path of the URL to print; `{run}` in it stands for the first run."""
    check_installed()
    import uvicorn

    from streamclr.web.app import make_app
    from streamclr.web.connection import MAX_IDLE_SECONDS, Connection
    from streamclr.web.safety import Safe, ip_of, own_names, split_host
    from streamclr.web.site import Site, run_id

    site = Site([Path(run) for run in config.runs])
    listening = listen(config.host, config.port)
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
    shown = lan_address() if ip and ip.is_unspecified else f"[{config.host}]" if ":" in config.host else config.host
    where = page.format(run=run_id(Path(config.runs[0])))
    announce(f"http://{shown}:{port}{where}?token={token}")
    if not ip.is_loopback if ip else config.host.lower() != "localhost":
        say(
            f"streamclr: {config.host} is reachable from other machines: whoever has this URL can see and label the "
            "images, and the connection is not encrypted"
        )
    server.run(sockets=[listening])
