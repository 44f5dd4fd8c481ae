"""The rows of a benchmark: printed as they are measured, then written as one table for each section."""

import datetime
import platform
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from streamclr.base.machine import cpu_name


class Row(NamedTuple):
    figure: str
    measured: str
    target: str


TABLES: dict[str, list[Row]] = {}  # by section, in the order in which they were measured
QUESTIONS: dict[str, str] = {}  # that each section answers


def begin(section: str, question: str) -> None:
    TABLES[section], QUESTIONS[section] = [], question
    print(f"\n{section}: {question}", flush=True)


def row(figure: str, measured: object, target: str = "", met: bool | None = None) -> None:
    """A line of the table of the section that was begun last. met: whether the target was."""
    verdict = "" if met is None else (" (met)" if met else " (not met)")
    found = Row(figure, str(measured), target + verdict)
    if TABLES:
        next(reversed(TABLES.values())).append(found)
    print(f"{found.figure:78} {found.measured:>24}   {found.target}", flush=True)


def write(directory: Path, words: list[str], minutes: float) -> Path:
    """A file with all tables. words: the sections that were asked for; none if all were."""
    today = datetime.date.today().isoformat()
    made_by = f"`python benchmarks/bench.py {' '.join(words)}`" if words else "`make bench`"
    lines = [
        f"# Benchmark of {today}",
        "",
        f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; Python "
        f"{platform.python_version()}, torch {torch.__version__}; {minutes:.1f} minutes. Made by {made_by}.",
    ]
    for section, rows in TABLES.items():
        lines += ["", f"## {section}", "", QUESTIONS[section], "", "| figure | measured | target |", "|---|---|---|"]
        lines += [f"| {' | '.join(cell.strip() for cell in cells)} |" for cells in rows]
    file = directory / f"{'-'.join([today, *words])}.md"
    directory.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
    return file


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
