"""Not in the paper: how far the labelling page can be trusted: its look-alikes, its guesses, and when it says stop."""

from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.classifier import Head
from streamclr.experiments.beyond.adapt import DATASETS, SETTINGS, SHORT
from streamclr.experiments.findings import Findings, lines
from streamclr.labelling.order import asking_order, directions
from streamclr.labelling.session import N_AHEAD, N_ALIKE
from streamclr.labelling.trust import least_similarity, look_alikes, settled
from streamclr.linear import cross_validate, fit_linear
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream
from streamclr.runs.evaluation import Extracted, extract, labelled
from streamclr.sweeps.job import Result
from streamclr.sweeps.lab import Lab, run_job

N_LABELS = (30, 50, 100, 200)
N_QUESTIONS = 2 * N_LABELS[-1]  # to see what twice as many labels bring
N_CANDIDATES = 8 * N_QUESTIONS
N_BINS = 10  # of how certain a guess is, for the calibration error


def experiment(lab: Lab) -> Findings:
    jobs = {}
    for dataset, own in DATASETS.items():
        if lab.at_hand(dataset, **own):
            runs = lab.runs(**SETTINGS | own, images=SHORT[dataset])
            jobs[dataset] = [job.doing("trust", measure) for job in runs]
    measured: dict[str, dict[str, dict[str, list[float]]]] = {}
    for dataset, results in lab.do(jobs).items():
        found = [result["trust"] for result in results]
        measured[dataset] = {n: {key: [one[n][key] for one in found] for key in found[0][n]} for n in found[0]}
    rows = [[f"{dataset}, {n} labels", *_cells(one)] for dataset, own in measured.items() for n, one in own.items()]
    head = [
        "", "accuracy, %", "calibration error, points", "the same, not calibrated", "look-alikes for a picture",
        "of its class, %", "the 11 nearest, of its class, %", "says stop", "twice as many labels bring, points",
    ]  # fmt: skip
    note = (
        f"MobileNetV2 adapted on {SHORT['GTSRB']:,} frames (CIFAR-10: {SHORT['CIFAR-10']:,}); labels in the order in "
        "which the page asks. Accuracy and calibration error of the guesses for test images (GTSRB: tracks held out); "
        f"a class without a label is a wrong guess. Look-alikes of the next {N_AHEAD} pictures, all seeds together. "
        "Not in the paper."
    )
    series = [
        (
            f"{dataset}, {name}",
            [(float(n), mean(_shown(one, key))) for n, one in own.items() if sum(one["shown"])],
            style,
        )
        for dataset, own in measured.items()
        for name, key, style in (("calibrated", "error", "o-"), ("not calibrated", "raw_error", "o--"))
    ]
    table = Table("How far the labelling page can be trusted", head, rows, note)
    return Findings([table], measured, "Calibration error of the guesses, points", lines(series, "labels", log=2))


def _cells(one: dict[str, list[float]]) -> list[str]:
    n, right = sum(one["offered"]), sum(one["offered_right"])
    return [
        spread(one["accuracy"]),
        spread(_shown(one, "error")) if sum(one["shown"]) else "not shown",
        spread(_shown(one, "raw_error")),
        f"{n / len(one['offered']) / N_AHEAD:.2f}",
        f"{100 * right / n:.0f} ({right:.0f} of {n:.0f})" if n else "none offered",
        f"{100 * sum(one['nearest_right']) / sum(one['nearest']):.0f}",
        f"{sum(one['stop']):.0f} of {len(one['stop'])}",
        spread(one["gain"]),
    ]


def _shown(one: dict[str, list[float]], key: str) -> list[float]:
    """Of the seeds whose page shows how certain a guess is."""
    return [value for value, is_shown in zip(one[key], one["shown"], strict=True) if is_shown]


def measure(directory: Path, **config: Any) -> Result:
    """A run, and what its labelling page would say after so many labels, beside the truth."""
    result = run_job(directory, stage_two=False, **config)
    one = RunOptions(**config)
    train, test = labelled(open_run_stream(one))
    model = RunDirectory(directory / "run").load_model()
    drawn = torch.randperm(len(train), generator=torch.Generator().manual_seed(one.seed))[:N_CANDIDATES]
    candidates, tested = extract(model, train, drawn), extract(model, test)
    order = asking_order(candidates.features, min(N_QUESTIONS, len(drawn)), one.seed)
    asked = Extracted(*(column[order] for column in candidates))
    found = {str(n): after(n, asked, tested) for n in N_LABELS if 2 * n <= len(order)}
    return {"cpu_seconds": result["cpu_seconds_learning"], "trust": found}


def after(n: int, asked: Extracted, tested: Extracted) -> dict[str, float]:
    """What the page says after n answers, and what is true."""
    features, truth = asked.features, asked.labels
    classes, targets = truth[:n].unique(return_inverse=True)
    weights, groups = torch.ones(n), torch.arange(n)
    validated = cross_validate(features[:n], targets, len(classes), weights, groups)
    raw = fit_linear(features[:n], targets, len(classes), decay=validated.decay)
    raw_error = calibration_error(raw, classes, tested)
    head = raw.cooled(validated.temperature)
    guesses = head(features).argmax(1)
    says = settled(features[:n], targets, weights, groups, validated.decay, features[n:], guesses[n:])
    looks, others = directions(features), list(range(n, len(truth)))
    least = least_similarity(looks[:n], targets)
    counts = dict.fromkeys(("offered", "offered_right", "nearest", "nearest_right"), 0)
    for row in others[:N_AHEAD]:
        for name, alike in (
            ("offered", look_alikes(row, others, looks, guesses, least)),
            ("nearest", look_alikes(row, others, looks, None, -1.0)),
        ):
            counts[name] += len(alike[:N_ALIKE])
            counts[f"{name}_right"] += int((truth[alike[:N_ALIKE]] == truth[row]).sum())
    double_classes, double_targets = truth[: 2 * n].unique(return_inverse=True)
    double = fit_linear(features[: 2 * n], double_targets, len(double_classes))
    accuracy = accuracy_of(head, classes, tested)
    return counts | {
        "accuracy": accuracy,
        "error": calibration_error(head, classes, tested),
        "raw_error": raw_error,
        "shown": float(validated.temperature is not None),
        "stop": float(says is not None and says.is_enough),
        "gain": accuracy_of(double, double_classes, tested) - accuracy,
    }


def accuracy_of(head: Head, classes: Tensor, tested: Extracted) -> float:
    """In %, of a head whose outputs are these classes."""
    return 100 * float((classes[head(tested.features).argmax(1)] == tested.labels).float().mean())


def calibration_error(head: Head, classes: Tensor, tested: Extracted) -> float:
    """How far the certainty of guesses is from the share that is right, in points: the mean over bins of certainty."""
    certainty, guess = head(tested.features).softmax(1).max(1)
    right = (classes[guess] == tested.labels).float()
    bins = (certainty * N_BINS).long().clamp(max=N_BINS - 1)
    sums = torch.zeros(N_BINS).index_add_(0, bins, certainty - right)
    return 100 * float(sums.abs().sum()) / len(right)
