"""What the machine is, and where it keeps datasets, weights and measurements."""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path


def cpu_name(root: Path = Path("/")) -> str:
    """The board if it has a name, as a Raspberry Pi or a Jetson has, and the processor. root: of the system's files."""
    board = read_text(root / "proc/device-tree/model").strip("\0\n ")
    names = re.findall(r"^model name\s*:\s*(\S.*)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    return ", ".join([board] * bool(board) + names[:1]) or platform.processor() or platform.machine()


def read_text(path: Path) -> str:
    """The content of a file of the system; empty if this system has no such file."""
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace")
    return ""


def cache_dir() -> Path:
    """`STREAMCLR_DATA`, or `streamclr` in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamclr"
    return Path(os.environ.get("STREAMCLR_DATA") or default).expanduser()
