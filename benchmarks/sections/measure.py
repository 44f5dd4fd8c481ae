"""How the sections measure: cases in turns, wall time beside CPU time, ratios within one run, memory."""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

BENCHMARKS = Path(__file__).parents[1]
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds

# Does its work once. It may return the seconds that count as its wall time, where not all of them do.
Case = Callable[[], float | None]
Name = TypeVar("Name", bound=Hashable)


class Cost(NamedTuple):
    wall: float  # seconds
    cpu: float  # of all threads and processes below this one


class Spread(NamedTuple):
    """The median of some values, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        n_digits = 3 if self.median < 0.1 else 2 if self.median < 10 else 1 if self.median < 100 else 0
        median, low, high = (f"{value:.{n_digits}f}" for value in self)
        return f"{median} ({low} to {high})"


class Ratio(NamedTuple):
    """One cost over another that was measured in the same turn."""

    wall: Spread
    cpu: Spread

    @classmethod
    def of(cls, costs: list[Cost], base: list[Cost]) -> "Ratio":
        turns = list(zip(costs, base, strict=True))
        return cls(
            Spread.of([cost.wall / usual.wall for cost, usual in turns]),
            Spread.of([cost.cpu / usual.cpu for cost, usual in turns]),
        )

    def at_most(self, most: float) -> bool:
        return self.wall.median <= most and self.cpu.median <= most

    def at_least(self, least: float) -> bool:
        return self.wall.median >= least and self.cpu.median >= least

    def __str__(self) -> str:
        return f"wall {self.wall}, CPU {self.cpu}"


def in_turns(cases: Mapping[Name, Case], turns: int, warm_up: bool = True) -> dict[Name, list[Cost]]:
    """Each case once to warm up, then all of them turn by turn, so that a slow moment of the machine hits all."""
    for case in cases.values() if warm_up else ():
        case()
    found: dict[Name, list[Cost]] = {name: [] for name in cases}
    for _ in range(turns):
        for name, case in cases.items():
            found[name].append(cost_of(case))
    return found


def cost_of(case: Case) -> Cost:
    cpu, started = cpu_seconds(), time.perf_counter()
    counted = case()
    wall = time.perf_counter() - started
    return Cost(wall if counted is None else counted, cpu_seconds() - cpu)


def calling(function: Callable[..., object], *arguments: object) -> Case:
    """A case that takes what it takes, whatever the function returns."""

    def once() -> None:
        function(*arguments)

    return once


def cpu_seconds() -> float:
    """Of this process, of those below it that have ended, and of those that have not, in ticks of a hundredth."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_cpu_seconds_of, below()))


def _cpu_seconds_of(process: int) -> float:
    """With what ended below it."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return TICK * sum(map(int, fields[11:15]))


def below() -> list[int]:
    """The processes that this one has started, and those that they have."""
    found, new = [], ["self"]
    while new:
        lists = [file for process in new for file in Path(f"/proc/{process}/task").glob("*/children")]
        new = [word for file in lists for word in _read(file).split()]
        found += map(int, new)
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def seconds(function: Callable[[], object], repeat: int = 3) -> float:
    """The median of some calls after one that warms up."""
    function()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def private_bytes(process: int) -> int:
    """Memory that a process shares with no other."""
    lines = _read(Path(f"/proc/{process}/smaps_rollup")).splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def forget_peak() -> None:
    """From now on the peak of this process's memory is counted anew (see proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def child(code: str, threads: int = 2, **names: object) -> list:
    """What a script in a process of its own prints as JSON."""
    for name, value in names.items():
        code = code.replace(f"${name}", repr(value))
    places = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(places)}
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env).stdout)
