"""CIFAR-10 with 1 % and 10 % of the labels, after learning without labels, in the paper for 100 epochs (Sec. IV-B)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.experiments.findings import ALL, NAMES, Findings, accuracy, against, bars, margins, signed
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream, resolve
from streamclr.runs.evaluation import evaluate_supervised, labelled
from streamclr.sweeps.job import Result
from streamclr.sweeps.lab import Lab

FRACTIONS = ("0.01", "0.1")
PAPER = {
    "contrast": (60.47, 71.75),
    "random": (60.47 - 8.33, 71.75 - 4.58),
    "fifo": (60.47 - 12.02, 71.75 - 7.49),
    "selective-bp": (60.47 - 13.90, 71.75 - 10.09),
    "k-center": (60.47 - 13.21, 71.75 - 9.24),
}
PAPER_SUPERVISED = (32.11, 40.53)  # the paper does not say which of the two readings below it is


def experiment(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=500_000)
    jobs = {policy: lab.runs(policy=policy, images=images) for policy in PAPER}
    jobs["supervised"] = [
        replace(job.doing("supervised", supervised, images=None), title=f"supervised-{seed}")
        for seed, job in enumerate(jobs["fifo"])
    ]
    results = lab.do(jobs)
    ours = {policy: {f: accuracy(results[policy], f) for f in (*FRACTIONS, ALL)} for policy in PAPER}
    readings = {"supervised, end to end": "end_to_end", "supervised, head on an untrained encoder": "untrained_encoder"}
    for name, reading in readings.items():
        ours[name] = {f: [100 * result[f][reading] for result in results["supervised"]] for f in FRACTIONS}

    rows = []
    for row, values in ours.items():
        cells = [NAMES.get(row, row)]
        for i, fraction in enumerate(FRACTIONS):
            cells += against(values[fraction], PAPER.get(row, PAPER_SUPERVISED)[i])
        rows.append([*cells, spread(values.get(ALL, []))])
    head = ["", *(f"{100 * float(f):g} %{what}" for f in FRACTIONS for what in (" labels", ", paper", ", difference"))]
    title = f"Accuracy on CIFAR-10 with few labels after learning from {lab.images or images:,} images, %"
    accuracies = Table(title, [*head, "all labels"], rows)

    rows = []
    for policy in list(PAPER)[1:]:
        paired = [spread(margins(ours["contrast"][f], ours[policy][f])) for f in (*FRACTIONS, ALL)]
        paper = [signed(a - b, 2) for a, b in zip(PAPER["contrast"], PAPER[policy], strict=True)]
        rows.append([f"Contrast Scoring less {NAMES[policy]}", paired[0], paper[0], paired[1], paper[1], paired[2]])
    margins_table = Table(
        "Margin of contrast scoring in points, seeds paired on the same stream",
        ["", "1 % labels", "1 %, paper", "10 % labels", "10 %, paper", "all labels"],
        rows,
    )
    groups = {row: [values[fraction] for fraction in FRACTIONS] for row, values in ours.items()}
    draw = bars(groups, rotation=20, ha="right", fontsize=7)
    return Findings([accuracies, margins_table], ours, "CIFAR-10, 1 % (left) and 10 % of the labels", draw)


def supervised(directory: Path, **config: Any) -> Result:
    """Both readings of the supervised baseline, with the encoder and the labels of the run."""
    one = RunOptions(**config)
    stream = open_run_stream(one)
    train, test = labelled(stream)
    fractions, encoder = tuple(float(f) for f in FRACTIONS), resolve(one, stream).architecture.make
    return dict(evaluate_supervised(encoder, train, test, fractions, one.seed, one.device or "cpu"))
