"""N clients of a dashboard, like browsers: each follows events, and reads the wall and its picture when they change.

    python benchmarks/clients.py URL N

Runs until standard input closes, then prints how many bytes the clients read.
"""

import asyncio
import json
import os
import sys
from urllib.parse import parse_qs, urlsplit

N_BYTES = 0


async def get(host: str, port: int, token: str, path: str):
    """A connection whose answer is ready to be read."""
    reader, writer = await asyncio.open_connection(host, port)
    request = (
        f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    )
    writer.write(request.encode())
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], head
    return reader, writer


async def read(*where) -> bytes:
    global N_BYTES
    reader, writer = await get(*where)
    body = await reader.read()
    writer.close()
    N_BYTES += len(body)
    return body


async def follow(host: str, port: int, token: str) -> None:
    global N_BYTES
    (run,) = json.loads(await read(host, port, token, "/api/runs"))["runs"]
    reader, _ = await get(host, port, token, "/api/live")
    while line := await reader.readline():
        N_BYTES += len(line)
        if line.startswith(b"event: wall"):
            wall = json.loads(await read(host, port, token, f"/api/runs/{run['id']}/wall"))
            await read(host, port, token, wall["picture"])


async def main() -> None:
    os.nice(19)  # in use they run on other machines
    url = urlsplit(sys.argv[1])
    where = url.hostname, url.port, parse_qs(url.query)["token"][0]
    clients = [asyncio.create_task(follow(*where)) for _ in range(int(sys.argv[2]))]
    await asyncio.to_thread(sys.stdin.read)
    failed = [client.exception() for client in clients if client.done()]
    print(json.dumps({"bytes": N_BYTES, "failed": [repr(error) for error in failed]}))
    os._exit(0)


if __name__ == "__main__":
    if "--help" in sys.argv:
        print(__doc__)
    else:
        asyncio.run(main(), debug=False)
