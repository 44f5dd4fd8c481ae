"""`streamclr reproduce`: does an experiment, writes its tables and plot, and an index of all experiments."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.files import read_json, write_json
from streamclr.base.options import argument, option
from streamclr.base.plots import save_plot
from streamclr.base.statistics import seeds_note
from streamclr.experiments.beyond.asked import asked
from streamclr.experiments.beyond.fleet import fleet
from streamclr.experiments.beyond.iid import iid
from streamclr.experiments.beyond.large_buffer import large_buffer
from streamclr.experiments.beyond.stc import stc
from streamclr.experiments.beyond.sweep import sweep
from streamclr.experiments.beyond.unusable import unusable
from streamclr.experiments.findings import Findings
from streamclr.experiments.paper.buffer import buffer
from streamclr.experiments.paper.curves import curves
from streamclr.experiments.paper.gradient import gradient
from streamclr.experiments.paper.labels import labels
from streamclr.experiments.paper.lazy import lazy
from streamclr.sweeps.lab import SCALES, Lab
from streamclr.sweeps.origin import listed
from streamclr.sweeps.places import ON

EXPERIMENTS: dict[str, Callable[[Lab], Findings]] = {
    "labels": labels,
    "curves": curves,
    "lazy": lazy,
    "buffer": buffer,
    "gradient": gradient,
    "stc": stc,
    "iid": iid,
    "large-buffer": large_buffer,
    "sweep": sweep,
    "unusable": unusable,
    "asked": asked,
    "fleet": fleet,
}


@dataclass(frozen=True)
class ReproduceOptions:
    """Run one of the paper's experiments, with its numbers beside ours; if it was interrupted, it continues."""

    name: str = argument(f"the experiment: {', '.join(EXPERIMENTS)}")
    scale: str = option(
        "cpu", f"{' or '.join(SCALES)}: the paper's settings, for GPUs, or smaller ones for two CPU cores"
    )
    seeds: int = option(3, "how many seeds, from 0 on")
    images: int | None = option(None, "images in each run, for a quick look [the scale's own]")
    workers: int | None = option(
        None, "runs at the same time [one for each GPU, or each core; on Ray, as many as there is room for]"
    )
    device: str | None = option(None, "cpu or cuda [GPUs if there are any]")
    on: str | None = option(None, ON)
    data: str | None = option(None, "directory with official files of datasets that are not in the cache")
    out: str = option(
        "runs/reproduce", "the directory, shared by experiments: a job with a result there is not done again"
    )
    plan: bool = option(False, "only print what would run and how long it should take")
    redo: bool = option(False, "do jobs again whose results were measured by other code, another torch or machine")


def reproduce(config: ReproduceOptions) -> Path:
    """Do an experiment and print its tables. Returns the directory with results.json, table.md and the plot."""
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
        config.redo,
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
        "machine": ", ".join(filter(None, [lab.place.name, listed(lab.origins, "machine")])),
        "hours_of_work": lab.seconds / 3600,
        "versions": {name: listed(lab.origins, name) for name in ("code", "torch")},
        "dates": sorted({one["date"] for one in lab.origins}),
    }
    write_json(directory / "results.json", facts | {"measured": findings.measured})
    save_plot(findings.title, findings.draw, directory / config.name)
    note = (
        f"`{command}`: {seeds_note(config.seeds)}; measured on {facts['machine']}, in {lab.seconds / 3600:.1f} hours "
        f"of jobs, with torch {listed(lab.origins, 'torch')}."
    )
    sections = [f"**{t.title}**\n\n{t.markdown()}" + (f"\n{t.note}\n" if t.note else "") for t in findings.tables]
    (directory / "table.md").write_text("\n".join([*sections, note, ""]), encoding="utf-8")
    write_index(lab.out)
    for table in findings.tables:
        table.print()
    print(note.replace("`", ""), file=sys.stderr)
    return directory


def _title(config: ReproduceOptions) -> str:
    """The name of its directory: another scale or number of images has its own."""
    scale = "" if config.scale == "cpu" else f"-{config.scale}"
    return config.name + scale + (f"-{config.images}" if config.images else "")


def _place(directory: Path, seeds: int, findings: Findings) -> Path:
    """The directory, or one beside it if its results have more seeds, or rows of a dataset that is missing now."""
    try:
        there = read_json(directory / "results.json")
        is_more = there["seeds"] > seeds or not set(there["measured"]) <= set(map(str, findings.measured))
    except (UserError, LookupError, TypeError):
        return directory
    return directory.with_name(f"{directory.name}-part") if is_more else directory


def write_index(out: Path) -> None:
    """README.md: the tables and plots of all experiments in a directory."""
    parts = ["# What the experiments measured", "Written by `streamclr reproduce`. docs/log.md discusses the results."]
    for name, experiment in EXPERIMENTS.items():
        about = (sys.modules[experiment.__module__].__doc__ or "").strip()
        for table in sorted((*out.glob(f"{name}/table.md"), *out.glob(f"{name}-*/table.md"))):
            title = table.parent.name
            parts += [f"## {title}", about, table.read_text("utf-8").strip(), f"![{title}]({title}/{name}.png)"]
    (out / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
