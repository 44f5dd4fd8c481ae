"""Several policies on the same streams, seed by seed: one table with means and their 95 % intervals."""

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.files import write_json
from streamclr.base.options import option
from streamclr.base.plots import line_plot
from streamclr.base.statistics import mean_by, seeds_note, spread
from streamclr.base.table import Table, labels_heading
from streamclr.policy import listed_policies, policy_options
from streamclr.recipe import SCRATCH
from streamclr.records.directory import RunDirectory, new_directory
from streamclr.records.options import (
    EvaluationOptions,
    KeepingOptions,
    LabellingOptions,
    LearnerOptions,
    LengthOptions,
    PaceOptions,
    RunOptions,
    StreamOptions,
    as_run,
)
from streamclr.records.plan import RunPlan, open_run_stream
from streamclr.runs.evaluation import Extracted, labelled, probe_accuracy
from streamclr.runs.prepare import prepare
from streamclr.runs.report import write_report
from streamclr.runs.run import run
from streamclr.streams.datasets.images import Images
from streamclr.sweeps.job import Job, Result
from streamclr.sweeps.places import ON, Place, open_place, work


@dataclass(frozen=True)
class PoliciesOptions:
    """What is compared, and where it runs."""

    policies: str = option(
        "contrast,random,fifo", "the policies to compare, with commas between; of your own as package.module:Class"
    )
    seeds: int = option(3, "how many seeds, from --seed on; a seed has one stream for all policies")
    on: str | None = option(None, ON)


# The fields of the last base come first, in `--help` too.
@dataclass(frozen=True)
class CompareOptions(
    PaceOptions,
    EvaluationOptions,
    LearnerOptions,
    LabellingOptions,
    KeepingOptions,
    LengthOptions,
    PoliciesOptions,
    StreamOptions,
):
    """Run several policies on the same streams and print one table with mean and spread over the seeds."""

    out: str | None = option(None, "the directory, which must be new [runs/compare]")


Rows = dict[str, dict[str, list[float]]]  # row: column: a value for each seed
PROBE = "linear probe, all labels"


def compare(
    options: CompareOptions,
    default_out: str = "compare",
    title: str = "Policies compared",
    baselines: Rows | None = None,
) -> tuple[Path, Table]:
    """Every policy and seed is a run of its own inside the directory. Returns the directory and the table.

    baselines: further rows of the table.
    """
    policies = listed_policies(options.policies)
    if options.seeds < 1:
        raise UserError(f"seeds is {options.seeds}: use at least 1")
    takes = {policy: policy_options(policy) for policy in policies}
    if options.rescore_every is not None and not any("rescore_every" in names for names in takes.values()):
        raise UserError("--rescore-every is for the policy contrast, which is not among --policies")
    ready: dict[str, RunPlan] = {}
    for policy in policies:  # a wrong option is refused before the first run starts
        lazily = options.rescore_every if "rescore_every" in takes[policy] else None
        device = options.device if options.on is None else None
        asked = as_run(options, policy=policy, rescore_every=lazily, device=device)
        ready[policy], stream, _ = prepare(asked)
        if stream.test is None:
            need = "a dataset, or a folder with a folder for each class"
            raise UserError(f"{options.source} has no labels, by which policies are compared: use {need}")
    place = None if options.on is None else open_place(options.on, None, options.device, torch.get_num_threads())
    out = new_directory(options.out, Path("runs") / default_out)
    directories: dict[str, list[RunDirectory]] = {policy: [] for policy in policies}
    plans: dict[Path, RunPlan] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        for policy, plan in ready.items():
            path = out / opts.file_name(f"{policy}-{seed}")
            # The supervised baselines depend on the seed alone.
            plans[path] = replace(plan, seed=seed, supervised=plan.supervised and policy == policies[0])
            directories[policy].append(RunDirectory(path))
    if place is None:
        for path, plan in plans.items():
            run(replace(plan, out=str(path)))
            _report(path, plan)
    else:
        _work(plans, place, out)

    rows = _rows(directories, options) | (baselines or {})
    write_json(out / "results.json", {"config": asdict(options) | {"out": None}, "accuracy": rows})
    heads = {str(f): labels_heading(str(f)) for f in options.label_fractions} | {PROBE: PROBE}
    cells = []
    for name, own in rows.items():
        cells.append([name, *(spread([100 * x for x in own.get(column, [])], unit=" %") for column in heads)])
    note = f"accuracy on the test set, {seeds_note(options.seeds)}"
    table = Table(title, ["", *heads.values()], cells, note)
    (out / "table.md").write_text(table.markdown(), encoding="utf-8")
    curves = []
    for policy, runs in directories.items():
        probed = ((step["seen"], 100 * step["accuracy"]) for one in runs for step in one.steps() if "accuracy" in step)
        curves.append((policy, mean_by(probed)))
    line_plot("kNN accuracy on the test set, %, mean over seeds", curves, out / "curves.png")
    write_report([one.path for runs in directories.values() for one in runs], out / "report.html", [table])
    return out, table


def _work(runs: dict[Path, RunPlan], place: Place, out: Path) -> None:
    """Each run is a job elsewhere, and its directory comes back."""
    jobs = {}
    for path, plan in runs.items():
        arguments = asdict(replace(plan, device=place.device))
        job = Job(path.name, "compare", f"{__name__}:run_for_compare", arguments, keeps_run=True)
        jobs[out / "jobs" / path.name] = job

    def keep(directory: Path) -> None:
        path = out / directory.name
        (directory / "run").rename(path)
        shutil.rmtree(directory)
        _report(path, runs[path])

    work(jobs, place, keep)
    (out / "jobs").rmdir()


def run_for_compare(directory: Path, **config: Any) -> Result:
    """In the process of a job."""
    own = RunDirectory(directory / "run")
    return own.results or run(RunOptions(**config | {"out": str(own.path)}))[1]


def _report(path: Path, plan: RunPlan) -> None:
    write_report([path], path / "report.html", title=f"{plan.policy}, seed {plan.seed}")


def _rows(directories: dict[str, list[RunDirectory]], options: CompareOptions) -> Rows:
    fractions = [str(f) for f in options.label_fractions]
    results = {policy: [one.results or {} for one in runs] for policy, runs in directories.items()}
    rows: Rows = {}
    for policy, contents in results.items():
        rows[policy] = {f: [c["labels"][f]["accuracy"] for c in contents if f in c["labels"]] for f in fractions}
        rows[policy][PROBE] = [c["linear_probe"] for c in contents if "linear_probe" in c]
    supervised = [c["supervised"] for contents in results.values() for c in contents if "supervised" in c]
    if supervised:
        rows["supervised"] = {f: [c[f]["end_to_end"] for c in supervised] for f in fractions}
        rows["untrained encoder"] = {f: [c[f]["untrained_encoder"] for c in supervised] for f in fractions}
    return rows


DEMO = CompareOptions(
    source="synthetic:",
    policies=f"{SCRATCH.policy},fifo",
    seeds=3,
    on="cores",
    encoder="compact",
    width=12,
    size=24,
    images=30_080,
    crop=0.35,
    fractions="0.01",
    classifier="linear",
    spread="off",
    probes=3,
    supervised=True,
)


def demo(out: str | None = None) -> tuple[Path, Table]:
    """The whole job on the embedded default, with a linear probe on raw pixels to show that it is no toy."""
    options = replace(DEMO, out=out)
    baselines = {"raw pixels": {PROBE: [pixel_probe(*labelled(open_run_stream(as_run(options))))]}}
    return compare(options, "demo", "Learned from an unlabelled stream, classified from 1 % labels", baselines)


def pixel_probe(train: Images, test: Images) -> float:
    """What a linear classifier reads from raw pixels with all labels."""

    def pixels(images: Images) -> Extracted:
        numbers = torch.arange(len(images))
        features = torch.from_numpy(images.images(numbers.numpy())).flatten(1) / 255
        return Extracted(features, torch.from_numpy(images.labels), numbers, torch.ones(len(images)))

    return probe_accuracy(pixels(train), pixels(test), len(train.classes))
