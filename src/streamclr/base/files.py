"""Files that are written whole or not at all, JSON, checksums and locks; needs no torch."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from streamclr.base.errors import UserError


def write_json(path: Path, content: Any) -> None:
    """JSON that a reader sees whole or not at all; NaN becomes null."""
    text = json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"  # ASCII, whatever the locale
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """A file that a reader sees whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)  # of a process that was killed and had this number
    try:
        write_new(part, [content])
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def json_line(content: dict[str, Any]) -> str:
    return json.dumps(_plain(content), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def write_new(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """A new file, on the disk itself. Returns the SHA-256 and the size of what was written."""
    digest, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for part in parts:
            digest.update(part)
            size += len(part)
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)
    return digest.hexdigest(), size


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def sync(directory: Path) -> None:
    """Names in a directory are on the disk only after this."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def held(file: Path, otherwise: str, seconds: float = 0.0) -> IO[bytes]:
    """The file, for this process alone until it closes it or ends; otherwise, after so many seconds, that is said."""
    opened, until = file.open("rb"), time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return opened
        except BlockingIOError:
            if time.monotonic() >= until:
                opened.close()
                raise UserError(otherwise) from None
            time.sleep(0.1)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
