"""Several policies on the same streams, seed by seed: one table with mean and spread."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from streamclr.checkpoint import write_json
from streamclr.classifier import Accuracy, linear_probe
from streamclr.errors import UserError
from streamclr.report import Table, labels_heading, line_plot, percent, write_report
from streamclr.run import RunConfig, RunDirectory, make_policy, new_directory, open_run_stream, option, read_json, run
from streamclr.sources.dataset import Images


@dataclass(frozen=True)
class CompareConfig(RunConfig):
    """Run several policies on the same streams and print one table with mean and spread over the seeds."""

    policies: str = option("contrast,random,fifo", "the policies to compare, with commas between")
    seeds: int = option(3, "how many seeds, from --seed on; a seed has one stream for all policies")


def compare(
    config: CompareConfig, default_out: str = "compare", title: str = "Policies compared"
) -> tuple[Path, Table]:
    """Every policy and seed is a run of its own inside the directory. Returns the directory and the table."""
    policies = [name.strip() for name in config.policies.split(",")]
    if config.seeds < 1:
        raise UserError(f"seeds is {config.seeds}: use at least 1")
    runs = [
        RunConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(RunConfig)} | {"policy": p, "seed": s})
        for s in range(config.seed, config.seed + config.seeds)
        for p in policies
    ]
    for one in runs:
        make_policy(one)  # a wrong name is said before the first run starts
    out = new_directory(config.out, Path("runs") / default_out)
    directories: dict[str, list[RunDirectory]] = {policy: [] for policy in policies}
    supervised: list[dict[str, Any]] = []
    for one in runs:
        first = one.policy == policies[0]  # the baselines depend on the seed alone
        one = dataclasses.replace(one, out=str(out / f"{one.policy}-{one.seed}"), supervised=one.supervised and first)
        path, results = run(one)
        directories[one.policy].append(RunDirectory(path))
        supervised += [results["supervised"]] if "supervised" in results else []

    table, content = _table(title, directories, supervised, config)
    write_json(out / "results.json", content)
    (out / "table.md").write_text(table.markdown())
    everything = [d for policy in policies for d in directories[policy]]
    line_plot(
        "kNN accuracy on the test set, %, mean over seeds",
        [(policy, _mean_curve(directories[policy])) for policy in policies],
        out / "curves.png",
    )
    write_report([d.path for d in everything], out / "report.html", [table], title)
    return out, table


def _table(
    title: str, directories: dict[str, list[RunDirectory]], supervised: list[dict[str, Any]], config: CompareConfig
) -> tuple[Table, dict[str, Any]]:
    fractions = [str(f) for f in config.label_fractions]
    rows: dict[str, dict[str, list[float]]] = {}
    for policy, runs in directories.items():
        results = [r.results or {} for r in runs]
        rows[policy] = {f: [r["labels"][f]["accuracy"] for r in results if f in r["labels"]] for f in fractions}
    for reading, name in (("end_to_end", "supervised"), ("untrained_encoder", "untrained encoder + head")):
        if supervised:
            rows[name] = {f: [r[f][reading] for r in supervised] for f in fractions}
    spread = f"mean ± standard deviation of {config.seeds} seeds" if config.seeds > 1 else "one seed"
    table = Table(
        title,
        ["", *(labels_heading(f) for f in fractions)],
        [[name, *(_spread(values[f]) for f in fractions)] for name, values in rows.items()],
        note=f"accuracy on the test set, {spread}",
    )
    return table, {"config": dataclasses.asdict(config) | {"out": None}, "accuracy": rows}


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    return percent(mean(values)) if len(values) == 1 else f"{percent(mean(values))} ± {100 * stdev(values):.1f}"


def _mean_curve(runs: list[RunDirectory]) -> list[tuple[float, float]]:
    points: dict[int, list[float]] = {}
    for one in runs:
        for step in one.steps():
            if "accuracy" in step:
                points.setdefault(step["seen"], []).append(100 * step["accuracy"])
    return [(seen, mean(values)) for seen, values in sorted(points.items())]


DEMO = CompareConfig(
    source="synthetic:",
    policies="contrast,fifo",
    seeds=1,
    images=25_600,
    buffer=64,
    width=8,
    lr=1e-3,
    fractions="0.01",
    probes=4,
    supervised=True,
)


def demo(out: str | None = None) -> tuple[Path, Table]:
    """The whole job on the embedded default, with the linear probe on raw pixels to show that it is no toy."""
    config = dataclasses.replace(DEMO, out=out)
    source = open_run_stream(config).source
    assert source.train is not None
    assert source.test is not None
    pixels = pixel_probe(source.train, source.test)
    path, table = compare(config, "demo", "Learned from an unlabelled stream, classified from 1 % of the labels")
    results = read_json(path / "results.json")
    write_json(path / "results.json", results | {"linear_probe_on_pixels": pixels})
    return path, table


def pixel_probe(train: Images, test: Images) -> float:
    """What a linear classifier reads from raw pixels with all labels."""
    pixels, queries = (images.images(torch.arange(len(images))).flatten(1) / 255 for images in (train, test))
    probe = linear_probe(pixels, train.labels, len(train.classes))
    return Accuracy.of(probe(queries).argmax(1), test.labels, len(train.classes)).top1
