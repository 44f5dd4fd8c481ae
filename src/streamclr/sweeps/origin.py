"""Where a result comes from: the code, torch and the machine that measured it, and when."""

import hashlib
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

Origin = dict[str, str]  # code, torch, machine, date
UNKNOWN = "unknown"


def origin(device: str | None) -> Origin:
    """What measures a job on this device now; it becomes `measured_by` of the job's result."""
    today = date.today().isoformat()
    return {"code": code_hash(), "torch": version("torch"), "machine": machine(device), "date": today}


@cache
def code_hash() -> str:
    """A checksum of the package's source, which changes more often than its version."""
    digest, package = hashlib.sha256(), Path(streamclr.__file__).parent
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:8]


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


def difference(now: Origin, origins: Sequence[Origin]) -> str | None:
    """One line that says which results were measured by other code, another torch or machine than now; None if none."""
    others = [one for one in origins if not is_by(now, one)]
    if not others:
        return None
    phrases = {"code": "by other code ({})", "torch": "with torch {}", "machine": "on {}"}
    changed = {name: [one for one in others if one[name] != value] for name, value in now.items()}
    how = ", ".join(phrases[name].format(listed(own, name)) for name, own in changed.items() if own)
    return f"{len(others)} of {len(origins)} results were measured {how}: --redo measures them again"
