"""Not in the paper: methods of other papers under the protocol of `adapt`, what each costs and what it gives."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import torch

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.experiments.beyond import adapt
from streamclr.experiments.beyond.adapt import IN_BUFFER, NO_BUFFER, PUBLIC, RESERVOIR, SHORT, TWICE, less_curve
from streamclr.experiments.findings import Findings, Series, lines, margins
from streamclr.recipe import ADAPT
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream, resolve
from streamclr.runs.assemble import make_learner
from streamclr.streams.stream import Stream
from streamclr.sweeps.job import Job, Result
from streamclr.sweeps.lab import Lab

FEW, MORE = "linear 0.01", "linear 0.1"
CURVE = (PUBLIC, RESERVOIR, TWICE)  # a reservoir by its frames: none, as many, twice as many
# Rows that `adapt` has.
KNOWN = (PUBLIC, *(adapt.POLICIES[name] for name in ("fifo", "reservoir", "contrast?rescore_every=20", "min-red")))
ORTHOGONAL: dict[str, Any] = {"optimizer": "orthogonal-adam", "lr": ADAPT.lr}
PLAIN: dict[str, Any] = {"policy": "reservoir", "loss": "nt-xent", "optimizer": "adam", "lr": ADAPT.lr} | IN_BUFFER
PEERS: dict[str, dict[str, Any]] = {
    "SCALE's selection": {"policy": "scale"},
    "reservoir, CLA": {"loss": "cla"},
    "reservoir, orthogonal gradients": ORTHOGONAL,
    "FIFO, orthogonal gradients": ORTHOGONAL | {"policy": "fifo"} | NO_BUFFER,
}
N_TIMED = 8  # steps of which the cost is taken

Rows = dict[str, dict[str, list[float]]]


def experiment(lab: Lab) -> Findings:
    further = [adapt.POLICIES[policy] for policy in lab.policies if policy in adapt.POLICIES]
    peers = PEERS | {policy: {"policy": policy} for policy in lab.policies if policy not in adapt.POLICIES}
    jobs: dict[str, list[Job]] = {}
    for dataset, settings in adapt.DATASETS.items():
        if lab.at_hand(dataset, **settings):
            known = adapt.rows_of(lab, dataset, settings)
            usual = adapt.SETTINGS | settings | {"policy": "reservoir", "images": SHORT[dataset]} | IN_BUFFER
            jobs |= {f"{dataset}, {row}": known[row] for row in (*KNOWN, *further)}
            for row, own in peers.items():
                jobs[f"{dataset}, {row}"] = [job.doing("peer", measure) for job in lab.runs(**usual | own)]
            jobs[f"{dataset}, {TWICE}"] = known[TWICE]
    measured = _measured(lab.do(jobs))
    rows = []
    for row, own in measured.items():
        dataset = row.partition(", ")[0]
        curve = [measured[f"{dataset}, {one}"] for one in CURVE]
        cells = [spread(own["cost"], 2), spread(own["cpu_seconds"], 0), spread(own[FEW]), spread(own[MORE])]
        for column in (FEW, MORE):
            cells.append(spread(margins(own[column], curve[1][column])))
            cells.append(spread(less_curve(own, curve, column, "cost")))
        rows.append([row, *cells])
    head = ["", "cost", "CPU s", "linear, 1 %", "linear, 10 %"]
    head += [f"{labels}: less the reservoir, equal {what}" for labels in ("1 %", "10 %") for what in ("frames", "cost")]
    note = (
        f"{SHORT['GTSRB']:,} frames of GTSRB, {SHORT['CIFAR-10']:,} of CIFAR-10, and a buffer of "
        f"{IN_BUFFER['buffer']}, as in `adapt`, which has the other policies. Cost: of a step, where that of a "
        f"reservoir with NT-Xent and Adam is 1; of a peer {N_TIMED} steps of both with full buffers are timed in turn, "
        "of the rows of `adapt` the CPU seconds of its runs. CPU seconds: the cost times those of the reservoir. "
        "Equal cost: the reservoir is interpolated between none, as many and twice as many frames, and what costs more "
        "than that is compared with twice as many. Not in the paper."
    )
    title = "Methods of other papers: accuracy on held-out tracks (GTSRB) or test images, %, and points"
    draw = lines(_series(measured, peers), "cost, of the reservoir's")
    return Findings([Table(title, head, rows, note)], measured, "Linear classifier with 1 % of the labels, %", draw)


def _measured(results: Mapping[str, Sequence[Result]]) -> Rows:
    """What is measured of each row, seed by seed."""
    measured: Rows = {}
    for row, own in results.items():
        reservoir = [one["cpu_seconds"] for one in results[f"{row.partition(', ')[0]}, {RESERVOIR}"]]
        pairs = list(zip(own, reservoir, strict=True))
        cost = [one.get("cost", one["cpu_seconds"] / seconds) for one, seconds in pairs]
        seconds = [share * of_reservoir for share, of_reservoir in zip(cost, reservoir, strict=True)]
        measured[row] = {"cost": cost, "cpu_seconds": seconds}
        measured[row] |= {name: [one[name] for one in own] for name in (FEW, MORE)}
    return measured


def _series(measured: Rows, peers: Mapping[str, Any]) -> Series:
    """The reservoir with more and more frames as a line, the peers as points."""

    def point(row: str) -> tuple[float, float]:
        return mean(measured[row]["cost"]), mean(measured[row][FEW])

    series = []
    for dataset, marker in zip(adapt.DATASETS, "s^", strict=True):
        if f"{dataset}, {PUBLIC}" in measured:
            series.append((f"{dataset}, reservoir", [point(f"{dataset}, {row}") for row in CURVE], "o-"))
            series += [(f"{dataset}, {row}", [point(f"{dataset}, {row}")], marker) for row in peers]
    return series


# ----------------------------------------------------------------------------------------------------------------------
# In the process of a job


def measure(directory: Path, **config: Any) -> Result:
    """As `adapt` measures a policy, and what a step costs."""
    found = adapt.measure(directory, whole=False, **config)
    options = RunOptions(**config)
    return found | {"cost": cost(options, open_run_stream(options))}


def cost(options: RunOptions, stream: Stream) -> float:
    """The CPU seconds of some steps with a full buffer over those of a plain reservoir, on the same images."""
    plans = [resolve(one, stream) for one in (options, replace(options, **PLAIN))]
    learners, spent = [make_learner(plan) for plan in plans], [0.0, 0.0]
    n_full = max(plan.buffer for plan in plans)
    images = torch.cat(list(stream.segments(plans[0].segment, until=n_full + N_TIMED * plans[0].segment)))
    tracks = stream.tracks(torch.arange(len(images)))
    parts = torch.arange(len(images)).split([n_full, *[plans[0].segment] * N_TIMED])
    for number, part in enumerate(parts):
        for i, learner in enumerate(learners):
            started = process_time()
            learner.learn_many(images[part], None if tracks is None else tracks[part])
            spent[i] += process_time() - started if number else 0.0
    return spent[0] / spent[1]
