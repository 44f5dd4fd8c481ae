"""The dashboard of a run while it learns, which is a process of its own: its port, and the address that is printed."""

import io
import os
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from streamclr.base.errors import UserError
from streamclr.base.extras import how_to_install
from streamclr.base.progress import say
from streamclr.records.options import USUAL_HOST, RunOptions

USUAL_PORT = 8765
OPEN = "open "  # how the line begins that has the address
CLEARED = "\r\033[2K"  # the line at which the cursor is: that of a progress bar, which is drawn again below
WHITE_ON_BLACK, AS_BEFORE = "\033[97;40m", "\033[0m"  # whatever the colours of the terminal are
NOWHERE = ("192.0.2.1", 9)  # an address for documentation; nothing is sent there


class Dashboard:
    """`streamclr serve RUN` beside a run. It ends with this process, however that ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def open(self, path: Path, host: str, port: int | None) -> None:
        """Start it, and print its address when it can be opened."""
        self.path = path
        command = [sys.executable, "-m", "streamclr", "serve", str(path), "--host", host, "--until-eof"]
        self._process = subprocess.Popen(
            command if port is None else [*command, "--port", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the run, which then ends this process
            env={name: value for name, value in os.environ.items() if name != "RANK"},  # of torchrun's job
        )
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self) -> None:
        """Print what it prints. Not through the progress bar, which would break the address into two lines."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(OSError, ValueError):  # a closed pipe must not end the run
                announce(line.removeprefix(OPEN).rstrip("\n"), sys.__stdout__)

    def stay(self) -> None:
        """On a terminal it outlives the run: whoever looks at it goes on until Ctrl-C. In a script it ends with it."""
        if self._process is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return
        print("the run is finished, the dashboard stays open: Ctrl-C ends it", flush=True)
        with suppress(KeyboardInterrupt):
            self._process.wait()

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        if self.path.exists():
            say(f"the dashboard is closed: streamclr serve {self.path} opens it again")


def check_can_serve(options: RunOptions) -> None:
    """An error now, not when the run has begun."""
    if not options.serve:
        if options.port is not None or options.host != USUAL_HOST:
            raise UserError(f"--{'host' if options.port is None else 'port'} is for --serve: give both, or neither")
        return
    check_installed()
    listen(options.host, options.port).close()


def check_installed() -> None:
    if not all(find_spec(name) for name in ("fastapi", "uvicorn")):
        raise UserError(f"the dashboard needs FastAPI and uvicorn: {how_to_install('serve')}")


def listen(host: str, port: int | None = None) -> socket.socket:
    """A socket that listens. port: 0 for any free one; None for the usual one, or any free one if that is taken."""
    if port is None:
        with suppress(UserError):
            return listen(host, USUAL_PORT)
    if not 0 <= (port or 0) <= 65535:
        raise UserError(f"port is {port}: use 1 to 65535, or 0 for any free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only if the protocol is given
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)  # a browser that opens the URL at once waits instead of being refused
    except OSError as error:
        which, how = (f"port {port} of {host}", "--port, or 0 for any free port") if port else (host, "--host")
        raise UserError(f"cannot listen on {which} ({error.strerror}): give another {how}") from None
    except UnicodeError:  # not a valid host name
        raise UserError(f"host is {host!r}: use an address such as 127.0.0.1") from None
    return listening


def announce(url: str, out: TextIO | None = None) -> None:
    """Print the address and, on a terminal, its QR code if a phone can reach it."""
    out = out or sys.stdout
    is_local = any(f"//{name}:" in url.lower() for name in ("127.0.0.1", "localhost", "[::1]"))
    text = f"{OPEN}{url}\n"
    if out.isatty():
        code = qr_code(url) if find_spec("segno") and not is_local else ""
        text = f"{CLEARED}{text}{code}"
    print(text, end="", file=out, flush=True)


def qr_code(text: str) -> str:
    """Half blocks, two rows of the code in a line."""
    import segno

    drawn = io.StringIO()
    segno.make(text, error="l", micro=False).terminal(drawn, compact=True)
    return "".join(f"{WHITE_ON_BLACK}{line}{AS_BEFORE}\n" for line in drawn.getvalue().splitlines())


def lan_address() -> str:
    """The address under which other machines of the network reach this one; the loopback's if there is no network."""
    with suppress(OSError), closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect(NOWHERE)  # which chooses the interface
        return str(probe.getsockname()[0])
    return USUAL_HOST
