"""Files that are written completely or not at all, JSON, checksums and locks; needs no torch."""

import difflib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from streamclr.base.errors import UserError

LEFT_SECONDS = 3600.0  # after which nobody writes a file any more


def write_json(path: Path, content: Any) -> None:
    """Write or replace a JSON file; NaN becomes null."""
    text = json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"  # ASCII, whatever the locale
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    write_parts(path, [content])


def write_parts(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write or replace a file: after a power cut it is the old one or the new one, whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)  # left by a killed process that had the same number
    try:
        write_new(part, parts)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove_left(directory: Path) -> None:
    """Delete what killed processes have begun to write below a directory; what is young may still be under way."""
    for path in directory.rglob(".*"):
        with suppress(FileNotFoundError):
            is_part = re.fullmatch(r"\..+\.\d+", path.name) and path.is_file()
            if is_part and time.time() - path.stat().st_mtime > LEFT_SECONDS:
                path.unlink()


def near(path: str | Path) -> str:
    """For an error about a path that is not there: the part of it that is missing, or a name that was meant."""
    path = Path(path).expanduser()
    if path.is_file():
        return f"{path} is a file"
    missing = [place for place in (path, *path.parents) if not place.exists()]
    if len(missing) > 1:
        return f"there is no directory {missing[-1]}"
    try:
        names = [place.name for place in path.parent.iterdir() if not place.name.startswith(".")]
    except OSError:  # a file, or not for this user
        return ""
    # Not by letters alone: who writes dog.mp4 for DOG.MP4 or dog.mkv means that one.
    plain = {name.lower(): name for name in sorted(names, reverse=True)}
    stems = {Path(name).stem.lower(): name for name in sorted(names, reverse=True)}
    same = plain.get(path.name.lower()) or stems.get(path.stem.lower())
    close = [same] if same else difflib.get_close_matches(path.name, names, 1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


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


def write_new(path: Path, parts: Iterable[bytes | memoryview], mode: int = 0o644) -> tuple[str, int]:
    """Write a new file and flush it to the disk. Returns its SHA-256 and its size in bytes."""
    digest, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
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
    """Flush the names in a directory to the disk: a rename lasts only after this."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def held(file: Path, otherwise: str, seconds: float = 0.0) -> IO[bytes]:
    """Lock a file until it is closed or the process ends.

    otherwise: the error if another process still has it after so many seconds.
    """
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
