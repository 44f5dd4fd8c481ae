"""Where a result comes from: the code, torch and the machine that measured it, and when."""

import os
import platform
from collections.abc import Sequence
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import streamclr
from streamclr.base.plugins import Plugin, hash_of, source_files

Origin = dict[str, str]  # code, torch, machine, date
UNKNOWN = "unknown"


def origin(device: str | None, plugins: Sequence[Plugin] = ()) -> Origin:
    """What measures a job on this device now; it becomes `measured_by` of the job's result.

    plugins: that the job uses; their source is part of its code.
    """
    code = "+".join([code_hash(), *(plugin.hash for plugin in plugins)])
    today = date.today().isoformat()
    return {"code": code, "torch": version("torch"), "machine": machine(device), "date": today}


@cache
def code_hash() -> str:
    """A checksum of the package's source, which changes more often than its version."""
    package = Path(streamclr.__file__).parent
    return hash_of({path: file.read_bytes() for path, file in source_files(package, package).items()})


@cache
def machine(device: str | None = None) -> str:
    """The GPU that the device is, or the processor and how many cores it has."""
    if (device or "").startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def origin_of(record: dict[str, Any]) -> Origin:
    """Who measured a result; records of versions before say nothing about it."""
    return dict.fromkeys(("code", "torch", "machine", "date"), UNKNOWN) | record.get("measured_by", {})


def is_by(now: Origin, one: Origin) -> bool:
    """Whether a result was measured as it would be now; fields that `now` lacks do not count."""
    return all(one[name] == value for name, value in now.items())


def listed(origins: Sequence[Origin], name: str) -> str:
    """The different values of one field."""
    return "; ".join(sorted({one[name] for one in origins}))


def difference(now: Sequence[Origin], origins: Sequence[Origin]) -> str | None:
    """One line that says which results were measured by other code, another torch or machine than now; None if none.

    now: what would measure each of them.
    """
    pairs = list(zip(now, origins, strict=True))
    others = [pair for pair in pairs if not is_by(*pair)]
    if not others:
        return None
    phrases = {"code": "by other code ({})", "torch": "with torch {}", "machine": "on {}"}
    names = [name for name in phrases if name in others[0][0]]
    changed = {name: [there for here, there in others if there[name] != here[name]] for name in names}
    how = ", ".join(phrases[name].format(listed(own, name)) for name, own in changed.items() if own)
    return f"{len(others)} of {len(origins)} results were measured {how}: --redo measures them again"
