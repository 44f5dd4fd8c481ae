"""What this machine has: processor, memory, disk, software, cameras, datasets."""

import math
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from streamclr.base.extras import extras, how_to_install, package_of
from streamclr.base.machine import cache_dir, cpu_name, read_text
from streamclr.streams.datasets.registry import DATASETS, is_at, is_cached

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    processor: str
    n_cores: float  # that this process may use, by its affinity and its share of time
    n_cores_present: int
    memory: int | None  # bytes
    memory_available: int | None
    memory_limit: int | None  # of the cgroup, if that is below what there is
    disk_free: int  # at the run directory
    python: str
    torch: str
    cuda: str | None  # of this build of torch; None is a build for the CPU
    n_threads: int
    extras: dict[str, str | None]  # extra: its main package with the version; None: not all of it is installed
    cameras: dict[str, str]  # device: name
    datasets: list[str]  # in the cache

    @classmethod
    def here(cls, run_directory: Path, root: Path = Path("/")) -> "Machine":
        """root: of the system's own files; tests make up theirs."""
        memory, limit = _meminfo(root), _memory_limit(root)
        total = memory.get("MemTotal")
        place = next(path for path in (run_directory, *run_directory.absolute().parents) if path.is_dir())
        return cls(
            processor=cpu_name(root),
            n_cores=min(_affinity(), _cpu_quota(root)),
            n_cores_present=os.cpu_count() or 1,
            memory=total,
            memory_available=memory.get("MemAvailable"),
            memory_limit=int(limit) if limit < (total or math.inf) else None,
            disk_free=shutil.disk_usage(place).free,
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda,
            n_threads=torch.get_num_threads(),
            extras={extra: _installed(requirements) for extra, requirements in extras().items()},
            cameras=_cameras(root),
            datasets=[name for name in DATASETS if is_cached(name) or is_at(name, cache_dir())],
        )

    def rows(self) -> list[tuple[str, str]]:
        """A name and what is said about it."""
        cores = f"{self.n_cores:g} of {self.n_cores_present} cores"
        memory = "unknown on this system" if self.memory is None else f"{self.memory / GIB:.1f} GiB"
        if self.memory_available is not None:
            memory += f", {self.memory_available / GIB:.1f} GiB available"
        if self.memory_limit is not None:
            memory += f", this process is limited to {self.memory_limit / GIB:.2f} GiB"
        threads = f"threads: {self.n_threads}"
        if self.n_threads > math.ceil(self.n_cores):
            threads += f", more than cores: set OMP_NUM_THREADS={math.ceil(self.n_cores)}"
        here = [f"{extra} ({package})" for extra, package in self.extras.items() if package]
        missing = [f"no {extra}: {how_to_install(extra)}" for extra, package in self.extras.items() if not package]
        return [
            ("processor", f"{self.processor}, {cores}"),
            ("memory", memory),
            ("disk", f"{self.disk_free / GIB:.1f} GiB free for the run directory"),
            ("software", f"Python {self.python}, torch {self.torch} ({self._build}), {threads}"),
            ("extras", "; ".join([", ".join(here), *missing] if here else missing)),
            ("cameras", ", ".join(f"{device} ({name})" for device, name in self.cameras.items()) or "none found"),
            ("datasets", ", ".join(self.datasets) or "none in the cache"),
        ]

    @property
    def _build(self) -> str:
        if self.cuda is None:
            return "for the CPU"
        return f"CUDA {self.cuda}, {'with' if torch.cuda.is_available() else 'but without'} a GPU"


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _meminfo(root: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB$", read_text(root / "proc/meminfo"), re.MULTILINE)
    return {name: 1024 * int(n) for name, n in found}


def _cpu_quota(root: Path) -> float:
    """Cores' worth of time that the cgroups allow."""
    quotas = [math.inf]
    for group in _cgroups(root, "cpu"):
        limits = read_text(group / "cpu.max").split()  # version 2: quota and period, or "max"
        limits = limits or [read_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(limits) == 2 and all(limit.isdecimal() for limit in limits) and int(limits[1]):
            quotas.append(int(limits[0]) / int(limits[1]))
    return min(quotas)


def _memory_limit(root: Path) -> float:
    files = ("memory.max", "memory.limit_in_bytes")  # of versions 2 and 1
    found = [read_text(group / file).strip() for group in _cgroups(root, "memory") for file in files]
    return min([float(text) for text in found if text.isdecimal()], default=math.inf)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and those above it, of version 1 and 2: the tightest of their limits counts."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            own = top / path.strip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(top) and group.is_dir())


def _cameras(root: Path) -> dict[str, str]:
    devices = sorted((root / "dev").glob("video*"), key=lambda path: (len(path.name), path.name))
    names = {device: read_text(root / f"sys/class/video4linux/{device.name}/name").strip() for device in devices}
    return {f"/dev/{device.name}": name or "no name" for device, name in names.items()}


def _installed(requirements: list[str]) -> str | None:
    """The main package of an extra with its version; None if one of its packages is missing."""
    with suppress(PackageNotFoundError):
        first, *_ = [f"{name} {version(name)}" for name in map(package_of, requirements)]
        return first
    return None
