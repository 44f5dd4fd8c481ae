"""`streamclr reproduce`: does an experiment, writes its tables and plot, and an index of all experiments."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.files import read_json, write_json
from streamclr.base.options import argument
from streamclr.base.plots import save_plot
from streamclr.base.statistics import seeds_note
from streamclr.experiments.beyond import (
    adapt,
    asked,
    fleet,
    iid,
    large_buffer,
    peers,
    recipe,
    stc,
    sweep,
    trust,
    unusable,
    weak_views,
)
from streamclr.experiments.findings import Findings
from streamclr.experiments.paper import buffer, curves, gradient, labels, lazy
from streamclr.sweeps.job import USUAL
from streamclr.sweeps.lab import OF_EVERY_RUN, Lab, LabOptions
from streamclr.sweeps.origin import listed

SCRIPTS = (
    labels,
    curves,
    lazy,
    buffer,
    gradient,
    stc,
    iid,
    large_buffer,
    sweep,
    unusable,
    asked,
    fleet,
    adapt,
    peers,
    recipe,
    trust,
    weak_views,
)
EXPERIMENTS: dict[str, Callable[[Lab], Findings]] = {
    script.__name__.rpartition(".")[2].replace("_", "-"): script.experiment for script in SCRIPTS
}
NO_POLICIES = ("lazy", "gradient", "sweep", "unusable", "asked", "fleet", "weak-views")


@dataclass(frozen=True)
class ReproduceOptions(LabOptions):
    """Run one of the paper's experiments, with its numbers beside ours; if it was interrupted, it continues."""

    name: str = argument(f"the experiment: {', '.join(EXPERIMENTS)}")


def reproduce(config: ReproduceOptions) -> Path:
    """Do an experiment and print its tables. Returns the directory with results.json, table.md and the plot."""
    if config.name not in EXPERIMENTS:
        raise UserError(f"no experiment {config.name!r}: {opts.one_of(config.name, EXPERIMENTS)}")
    if config.classes and (config.name, config.scale) != ("curves", "paper"):
        raise UserError(f"classes is for 'curves --scale paper', and {config.name} reads no ImageNet: leave it out")
    if config.policies and config.name in NO_POLICIES:
        raise UserError(f"{config.name} has no table of policies: leave --policies out")
    lab = Lab(config)
    findings = EXPERIMENTS[config.name](lab)
    scale = "" if config.scale == "cpu" else f"-{config.scale}"  # another scale or number of images has its directory
    title = config.name + scale + (f"-{config.images}" if config.images else "")
    others = {name: value for name in OF_EVERY_RUN if (value := getattr(config, name)) != USUAL[name]}
    title = "-".join([title, *map(opts.file_name, others.values())])
    title += f"-{Path(config.classes).stem}" if config.classes else ""
    directory = _place(lab.out / title, config.seeds, findings)
    directory.mkdir(exist_ok=True)
    images = f" --images {config.images}" if config.images else ""
    data = " --data DIR" if config.data else ""
    other = "".join(f" --{name} {shlex.quote(value)}" for name, value in others.items())
    classes = f" --classes {Path(config.classes).name}" if config.classes else ""
    policies = f" --policies {shlex.quote(config.policies)}" if config.policies else ""
    how = f"--scale {config.scale} --seeds {config.seeds}{policies}{images}{data}{other}{classes}"
    command = f"streamclr reproduce {config.name} {how}"
    facts = {
        "command": command,
        "scale": config.scale,
        "seeds": config.seeds,
        "images": config.images,
        "classes": lab.classes,
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
