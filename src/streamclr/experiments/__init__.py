"""The paper's experiments, one script per table or figure, and some that are not in the paper."""

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.files import read_json, write_json
from streamclr.base.machine import cpu_name
from streamclr.base.options import option
from streamclr.base.plots import save_plot
from streamclr.experiments.beyond.asked import asked
from streamclr.experiments.beyond.fleet import fleet
from streamclr.experiments.beyond.iid import iid
from streamclr.experiments.beyond.large_buffer import budget
from streamclr.experiments.beyond.stc import stc
from streamclr.experiments.beyond.sweep import sweep
from streamclr.experiments.beyond.unusable import lies
from streamclr.experiments.findings import Findings
from streamclr.experiments.paper.buffer import buffer
from streamclr.experiments.paper.curves import curves
from streamclr.experiments.paper.gradient import gradient
from streamclr.experiments.paper.labels import labels
from streamclr.experiments.paper.lazy import lazy
from streamclr.sweeps.lab import SCALES, Lab
from streamclr.sweeps.places import ON

EXPERIMENTS: dict[str, Callable[[Lab], Findings]] = {
    "labels": labels,
    "curves": curves,
    "lazy": lazy,
    "buffer": buffer,
    "gradient": gradient,
    "stc": stc,
    "iid": iid,
    "budget": budget,
    "sweep": sweep,
    "lies": lies,
    "asked": asked,
    "fleet": fleet,
}


@dataclass(frozen=True)
class ReproduceOptions:
    """Run one of the paper's experiments, its numbers beside ours; started again it goes on where it was."""

    name: str = option("", f"the experiment: {', '.join(EXPERIMENTS)}")
    scale: str = option("cpu", f"{' or '.join(SCALES)}: the paper's settings, for GPUs, or smaller ones for two cores")
    seeds: int = option(3, "how many seeds, from 0 on")
    images: int | None = option(None, "images in each run, for a quick look [the scale's own]")
    workers: int | None = option(
        None, "runs side by side [one for each GPU, or each core; on Ray, as many as there is room for]"
    )
    device: str | None = option(None, "cpu or cuda [GPUs if there are any]")
    on: str | None = option(None, ON)
    data: str | None = option(None, "where official files of datasets are that are not in the cache")
    out: str = option("runs/reproduce", "the directory, which experiments share: what is done there is not done again")
    plan: bool = option(False, "only say what would run and how long it should take")


def reproduce(config: ReproduceOptions) -> Path:
    """Do an experiment and print its tables. Returns the directory with results.json, tables and plots."""
    if config.name not in EXPERIMENTS:
        raise UserError(f"no experiment {config.name!r}: {opts.one_of(config.name, EXPERIMENTS)}")
    lab = Lab(
        Path(config.out),
        config.scale,
        config.seeds,
        config.images,
        config.workers,
        config.device,
        config.data,
        config.plan,
        config.on,
    )
    findings = EXPERIMENTS[config.name](lab)
    directory = _place(lab.out / _title(config), config.seeds, findings)
    directory.mkdir(exist_ok=True)
    images = f" --images {config.images}" if config.images else ""
    data = " --data DIR" if config.data else ""
    command = f"streamclr reproduce {config.name} --scale {config.scale} --seeds {config.seeds}{images}{data}"
    facts = {
        "command": command,
        "scale": config.scale,
        "seeds": config.seeds,
        "images": config.images,
        "machine": f"{lab.place.name or machine()}, {lab.workers} x {lab.device}",
        "hours_of_work": lab.seconds / 3600,
        "versions": {name: version(name) for name in ("streamclr", "torch")} | {"python": platform.python_version()},
    }
    write_json(directory / "results.json", facts | {"measured": findings.measured})
    save_plot(findings.title, findings.draw, directory / config.name)
    seeds = f"{config.seeds} seeds, mean ± standard deviation" if config.seeds > 1 else "one seed"
    note = (
        f"`{command}`: {seeds}; {facts['machine']}, {lab.seconds / 3600:.1f} hours of work on one of them, "
        f"torch {version('torch')}."
    )
    sections = [f"**{t.title}**\n\n{t.markdown()}" + (f"\n{t.note}\n" if t.note else "") for t in findings.tables]
    (directory / "table.md").write_text("\n".join([*sections, note, ""]), encoding="utf-8")
    write_index(lab.out)
    for table in findings.tables:
        table.print()
    print(note.replace("`", ""), file=sys.stderr)
    return directory


def _title(config: ReproduceOptions) -> str:
    """Its directory: a quick look does not take the place of the whole experiment, nor one scale that of another."""
    scale = "" if config.scale == "cpu" else f"-{config.scale}"
    return config.name + scale + (f"-{config.images}" if config.images else "")


def _place(directory: Path, seeds: int, findings: Findings) -> Path:
    """The directory, or one beside it if what is there has more seeds or more rows, as of a dataset not at hand now."""
    try:
        there = read_json(directory / "results.json")
        is_more = there["seeds"] > seeds or not set(there["measured"]) <= set(map(str, findings.measured))
    except (UserError, LookupError, TypeError):
        return directory
    return directory.with_name(f"{directory.name}-part") if is_more else directory


def write_index(out: Path) -> None:
    """README.md: the tables and plots of all experiments in a directory."""
    parts = ["# What the experiments measured", "Written by `streamclr reproduce`; what it means is in docs/log.md."]
    for name, experiment in EXPERIMENTS.items():
        about = (sys.modules[experiment.__module__].__doc__ or "").strip()
        for table in sorted((*out.glob(f"{name}/table.md"), *out.glob(f"{name}-*/table.md"))):
            title = table.parent.name
            parts += [f"## {title}", about, table.read_text("utf-8").strip(), f"![{title}]({title}/{name}.png)"]
    (out / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def machine() -> str:
    """The processor or the GPU, and how many cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} cores"
