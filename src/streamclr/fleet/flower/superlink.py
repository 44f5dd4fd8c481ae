"""Flower's SuperLink as a process, with one thing added: only the devices' part of it is open to other machines.

Flower serves the devices, its own apps and the control of everything at one port, and asks for no password for the
control: whoever reaches the port could register a key of his own.
"""

import ipaddress
from typing import Any

DEVICE_PATH = "/v1/fleet/"  # every call here is signed with a device's key


def own_address(host: str) -> str:
    """The address under which this machine reaches its own server."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def is_allowed(path: str, client: str | None, server: str | None) -> bool:
    """Whether a call is allowed: the devices' part from anywhere, the rest from this machine only."""
    if path.startswith(DEVICE_PATH) and ".." not in path:
        return True
    try:
        return client is not None and (client == server or ipaddress.ip_address(client).is_loopback)
    except ValueError:
        return False


class Gate:
    """ASGI middleware that applies `is_allowed`."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            client, server = ((scope.get(end) or (None,))[0] for end in ("client", "server"))
            if not is_allowed(scope.get("path", ""), client, server):
                if scope["type"] == "http":
                    await send({"type": "http.response.start", "status": 403, "headers": []})
                    await send({"type": "http.response.body", "body": b""})
                return
        await self.app(scope, receive, send)


def main() -> None:
    from streamclr.fleet.flower import need_flower

    need_flower()
    import uvicorn
    from flwr.superlink.cli import flower_superlink

    run = uvicorn.run
    uvicorn.run = lambda app, **options: run(Gate(app), **options)
    flower_superlink()


if __name__ == "__main__":
    main()
