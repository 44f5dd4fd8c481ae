"""Not in the paper: ten devices that share an encoder but no images, against devices alone and one pooled learner."""

import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from streamclr.base.progress import Progress
from streamclr.base.statistics import evenly_spaced, spread
from streamclr.base.table import Table
from streamclr.encoders.projection import ContrastiveModel
from streamclr.experiments.findings import Findings, lines, margins, shares_of_gap
from streamclr.fleet.options import SimulateOptions
from streamclr.fleet.rounds import read_rounds
from streamclr.fleet.simulate import prepared, run_rounds
from streamclr.fleet.split import shard, whole_of
from streamclr.records.plan import RunPlan
from streamclr.runs.assemble import make_learner
from streamclr.runs.evaluation import extract, labelled, probe_accuracy
from streamclr.streams.datasets.images import DatasetSource
from streamclr.streams.stream import DatasetStream
from streamclr.sweeps.job import Job, Result
from streamclr.sweeps.lab import Lab

N_DEVICES, N_ROUNDS, DROPOUT = 10, 50, 0.2
BUFFER = 64  # of each learner: with 256 a device would take only two steps in a round
N_PROBED = 10_000  # labelled images of the probe, evenly spaced: fewer than all, because ten devices are probed
EQUAL = "pooled, as many steps as a device"
SPLITS = {"classes:2": "two classes each", "stc": "all classes each"}


def experiment(lab: Lab) -> Findings:
    n_total = lab.images or lab.pick(paper=25_000_000, cpu=256_000)
    n_device = n_total // N_DEVICES
    n_round = -(-n_device // N_ROUNDS)  # images of a device in a round

    def jobs(measure: Callable[..., Result], images: int, **own: Any) -> list[Job]:
        runs = lab.runs(probes=0, images=images, buffer=BUFFER)
        return [job.doing(f"fleet-{measure.__name__}", measure, **own, images=images) for job in runs]

    rows: dict[str, list[Job]] = {"pooled": jobs(pooled, n_total), EQUAL: jobs(pooled, n_device)}
    for split, seen in SPLITS.items():
        own = {"split": split, "dropout": 0.0, "round_images": n_round}
        rows[f"{seen}: single"] = jobs(single, n_total, split=split, device_images=n_device)
        rows[f"{seen}: fleet"] = jobs(federated, n_total, **own)
        rows[f"{seen}: fleet, {DROPOUT:.0%} drop out"] = jobs(federated, n_total, **own | {"dropout": DROPOUT})
    results = lab.do(rows)
    measured = {row: [100 * result["accuracy"] for result in own] for row, own in results.items()}

    def cells(row: str) -> list[str]:
        seen = row.partition(":")[0]
        if f"{seen}: fleet" not in measured:
            return [row, spread(measured[row]), "–", "–", "–"]
        less = spread(margins(measured[row], measured[f"{seen}: fleet"]))
        alone = measured[f"{seen}: single"]
        closed = (spread(shares_of_gap(measured[row], alone, measured[end]), 0) for end in ("pooled", EQUAL))
        return [row, spread(measured[row]), less, *closed]

    table = Table(
        f"A fleet of {N_DEVICES}, CIFAR-10",
        ["", "linear probe, %", "against the fleet", "gap closed to pooled, %", "to pooled, equal steps, %"],
        [cells(row) for row in measured],
        f"Not in the paper. {N_DEVICES} devices with buffers of {BUFFER} images learn for {N_ROUNDS} rounds of "
        f"{n_round} images each. Single: each device alone, mean of all. Pooled: one learner on the images of all "
        f"devices, so it takes {N_DEVICES} times the steps of a device, or in the second row as many. Linear probe on "
        f"{N_PROBED:,} labels. –: the gap of a seed is below one point, or none.",
    )
    series = []
    for row, ours in results.items():
        if "loss" in ours[0]:
            losses = np.array([result["loss"] for result in ours], np.float64)  # None becomes NaN
            series.append((row, list(enumerate(losses.mean(axis=0))), "-"))
    names = ("refused", "failed", "silent", "devices")
    facts = {row: [{n: result[n] for n in names if n in result} for result in own] for row, own in results.items()}
    draw = lines(series, "round", fontsize=6)
    return Findings([table], {"accuracy": measured, "facts": facts}, "Loss on the devices", draw)


# ----------------------------------------------------------------------------------------------------------------------
# In the process of a job


def federated(directory: Path, **config: Any) -> Result:
    # After an interruption it starts again: its devices may be a round ahead of its server.
    shutil.rmtree(directory / "fleet", ignore_errors=True)
    own = {"out": str(directory / "fleet"), "devices": N_DEVICES, "rounds": N_ROUNDS, "workers": 1}
    taken = {field.name for field in fields(SimulateOptions)}
    asked = SimulateOptions(**{name: value for name, value in config.items() if name in taken} | own)
    learner, out = prepared(asked)
    rounds = run_rounds(asked, learner, out)
    journal = read_rounds(out)
    return {
        "accuracy": probe(rounds.kept_model(), whole_of(asked.source)),
        "loss": [line["loss"] for line in journal],
        "failed": sum(len(line["failed"]) for line in journal),
        "silent": sum(line["silent"] for line in journal),
        "refused": dict(rounds.refused),
    }


def single(directory: Path, split: str, device_images: int, **config: Any) -> Result:
    """Each device alone, with its stream of the fleet and its own initial weights."""
    plan, accuracies = RunPlan.of(config, "the job"), []
    with Progress("devices alone", N_DEVICES) as bar:
        for device in range(N_DEVICES):
            source = shard(plan.source, split, device, N_DEVICES, plan.stc, plan.seed)
            accuracies.append(learn(replace(plan, seed=plan.seed + device), source, device_images))
            bar.advance(1)
    return {"accuracy": mean(accuracies), "devices": accuracies}


def pooled(directory: Path, **config: Any) -> Result:
    plan = RunPlan.of(config, "the job")
    return {"accuracy": learn(plan, whole_of(f"{plan.source}?stc={plan.stc}&seed={plan.seed}"), config["images"])}


def learn(plan: RunPlan, source: DatasetSource, n_images: int) -> float:
    """Learn from one source; returns the accuracy of the probe."""
    torch.set_num_threads(1)
    learner = make_learner(plan)
    for images in DatasetStream(source).segments(plan.segment, until=n_images):
        learner.learn_many(images)
    return probe(learner.model, source)


def probe(model: ContrastiveModel, source: DatasetSource) -> float:
    train, test = labelled(source)
    numbers = torch.from_numpy(evenly_spaced(len(train), N_PROBED))
    return probe_accuracy(extract(model, train, numbers), extract(model, test), len(source.classes))
