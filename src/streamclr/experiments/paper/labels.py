"""CIFAR-10 with 1 % and 10 % of the labels, after learning without labels, in the paper for 100 epochs (Sec. IV-B)."""

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from streamclr.base.statistics import spread
from streamclr.base.table import Table, labels_heading
from streamclr.experiments.findings import (
    ALL,
    NAMES,
    Findings,
    accuracy,
    against,
    bars,
    margins,
    policies_of,
    scale_note,
)
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
READINGS = {"supervised, end to end": "end_to_end", "supervised, head on an untrained encoder": "untrained_encoder"}
PAPER |= dict.fromkeys(READINGS, (32.11, 40.53))  # the paper does not say which of the two it is


def experiment(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=500_000)
    names = policies_of(lab)
    jobs = {policy: lab.runs(policy=policy, images=images) for policy in names}
    jobs["supervised"] = [
        replace(job.doing("supervised", supervised, images=None), title=f"supervised-{seed}")
        for seed, job in enumerate(jobs["fifo"])
    ]
    results = lab.do(jobs)
    ours = {policy: {f: accuracy(results[policy], f) for f in (*FRACTIONS, ALL)} for policy in names}
    for name, reading in READINGS.items():
        ours[name] = {f: [100 * result[f][reading] for result in results["supervised"]] for f in FRACTIONS}

    rows = []
    for row, values in ours.items():
        cells = [_name(row)]
        for i, fraction in enumerate(FRACTIONS):
            cells += against(values[fraction], PAPER[row][i] if row in PAPER else None)
        rows.append([*cells, spread(values.get(ALL, []))])
    head = ["", *(f"{100 * float(f):g} %{what}" for f in FRACTIONS for what in (" labels", ", paper", ", difference"))]
    title = f"Accuracy on CIFAR-10 with few labels after learning from {lab.images or images:,} images, %"
    accuracies = Table(title, [*head, "all labels"], rows)

    rows = []
    for row, values in list(ours.items())[1:]:
        paired = [spread(margins(ours["contrast"][f], values[f])) if f in values else "–" for f in (*FRACTIONS, ALL)]
        theirs = zip(PAPER["contrast"], PAPER[row], strict=True) if row in PAPER else ()
        paper = [f"{a - b:.2f}" for a, b in theirs] or ["–"] * 2
        rows.append([f"Contrast Scoring less {_name(row)}", paired[0], paper[0], paired[1], paper[1], paired[2]])
    margins_table = Table(
        "Margin of contrast scoring in points, seeds paired on the same stream",
        ["", "1 % labels", "1 %, paper", "10 % labels", "10 %, paper", "all labels"],
        rows,
        f"{reversals(ours)}{scale_note(lab)} A reservoir is not in the paper. In shorter runs it can be ahead of "
        "contrast scoring: `large-buffer` and `stc` have a row for that.",
    )
    groups = {row: [values[fraction] for fraction in FRACTIONS] for row, values in ours.items()}
    draw = bars(groups, rotation=20, ha="right", fontsize=7)
    return Findings([accuracies, margins_table], ours, "CIFAR-10, 1 % (left) and 10 % of the labels", draw)


def reversals(ours: dict[str, dict[str, list[float]]]) -> str:
    """Which rows are above others here, by their means, that are above them in the paper."""
    said = ["Not as in the paper, by the means."]
    for i, fraction in enumerate(FRACTIONS):
        means = {row: mean(ours[row][fraction]) for row in PAPER}
        passed = {a: [b for b in PAPER if means[a] > means[b] and PAPER[a][i] < PAPER[b][i]] for a in PAPER}
        above = (f"{_name(a)} is above {', '.join(map(_name, others))}" for a, others in passed.items() if others)
        said.append(f"{labels_heading(fraction)}: {'; '.join(above) or 'nothing'}.")
    return " ".join(said)


def _name(row: str) -> str:
    return NAMES.get(row, row)


def supervised(directory: Path, **config: Any) -> Result:
    """Both readings of the supervised baseline, with the encoder and the labels of the run."""
    one = RunOptions(**config)
    stream = open_run_stream(one)
    train, test = labelled(stream)
    fractions, encoder = tuple(float(f) for f in FRACTIONS), resolve(one, stream).architecture.make
    return dict(evaluate_supervised(encoder, train, test, fractions, one.seed, one.device or "cpu"))
