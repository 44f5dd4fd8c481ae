"""Not in the paper: the recipe `device` from scratch, choice by choice, and what it reaches in minutes of one core."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import numpy as np
import torch

from streamclr.base.progress import Progress
from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.classifier import draw_labelled
from streamclr.encoders.projection import ContrastiveModel
from streamclr.experiments.beyond.adapt import DECAY_OF_ALL, measure_labels_alone
from streamclr.experiments.findings import Findings, Points, lines, margins
from streamclr.linear import fit_linear
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.options import RunOptions
from streamclr.runs.evaluation import extract, head_accuracy, labelled
from streamclr.runs.prepare import prepare
from streamclr.streams.datasets.images import ArrayImages, Images
from streamclr.sweeps.job import Job, Result
from streamclr.sweeps.lab import Lab

FEW, ALL = 0.01, 1.0  # label fractions
# CPU seconds of one core, at which an encoder is measured.
SHORT, MIDDLE = 100, 400
LONG = (600, 1200, 2400)
SAVE_EVERY = 300  # CPU seconds
IMAGES_PER_SECOND = 1000  # more than a core learns from: nothing ends by their number, unless --images says so
USUAL: dict[str, Any] = {"recipe": "device", "encoder": "compact", "width": None, "stem": None, "lr": None}
USUAL |= {"probes": 0, "classifier": "linear"}
DATASETS: dict[str, dict[str, Any]] = {
    "CIFAR-10": {"source": "cifar10", "stc": 500},
    "GTSRB": {"source": "gtsrb", "stc": None, "size": 32, "flip": "off"},
}
# The recipe with one thing changed.
CHOICES: dict[str, dict[str, Any]] = {
    "device": {},
    "Adam, learning rate 1e-3": {"optimizer": "adam", "lr": 1e-3},
    "views as large as the image": {"side": 1.0},
    "constant learning rate": {"lr_half": 0},
    "projection head without BatchNorm": {"projection": "plain"},
    "ResNet-18 of width 8, half stem": {"encoder": "resnet18", "width": 8, "stem": "half"},
}
N_CHOICES_OF_TRACKS = 3  # the first, for GTSRB
POLICIES: dict[str, dict[str, Any]] = {
    "contrast scoring, T = 50, buffer of 256": {"policy": "contrast?rescore_every=50", "buffer": 256},
    "Reservoir, buffer of 256": {"policy": "reservoir", "buffer": 256},
    "contrast scoring, T = 50, buffer of 10M": {"policy": "contrast?rescore_every=50"},
}
CONTRAST, RESERVOIR, CONTRAST_MANY = POLICIES
DEVICE, IID, WIDE = "device (fading reservoir of 10M)", "the same, iid stream", "device, width 48, longer"
PAIRS = ((DEVICE, IID), (CONTRAST, RESERVOIR), (CONTRAST_MANY, DEVICE))
ALONE = "no stream: raw pixels (linear), compact encoder (supervised, end to end)"


def experiment(lab: Lab) -> Findings:
    datasets = {name: own for name, own in DATASETS.items() if lab.at_hand(name, **own)}
    choices: dict[str, list[Job]] = {}
    jobs: dict[str, list[Job]] = {}
    for dataset, settings in datasets.items():
        for row, own in list(CHOICES.items())[: None if dataset == "CIFAR-10" else N_CHOICES_OF_TRACKS]:
            choices[f"{dataset}, choice: {row}"] = _jobs(lab, (SHORT,), True, **settings | own)[:1]
        jobs |= {f"{dataset}, {row}": own for row, own in _rows(lab, dataset, settings).items()}
    results = lab.do(jobs | choices)
    measured = {row: _by_seconds(own) for row, own in results.items()}
    tables = [
        _reached(measured, jobs),
        _policies(measured, lab.policies),
        _margins(measured),
        _choices(measured, choices),
    ]
    series = [(row, _points(measured[row], str(FEW)), "o-") for row in measured if row in jobs and _is_curve(row)]
    draw = lines(series, "CPU seconds of one core", log=10)
    return Findings(tables, measured, "Linear classifier with 1 % of the labels, %", draw)


def _jobs(lab: Lab, seconds: Sequence[int], held_back: bool = False, **settings: Any) -> list[Job]:
    runs = lab.runs(**USUAL | {"images": IMAGES_PER_SECOND * seconds[-1]} | settings)
    return [job.doing("recipe", learn_for, seconds=list(seconds), held_back=held_back) for job in runs]


def _rows(lab: Lab, dataset: str, settings: dict[str, Any]) -> dict[str, list[Job]]:
    runs = lab.runs(**USUAL | {"images": IMAGES_PER_SECOND} | settings)
    alone = [job.doing("labels-alone", measure_labels_alone) for job in runs]
    if dataset == "GTSRB":
        return {DEVICE: _jobs(lab, (MIDDLE,), **settings), ALONE: alone}
    rows = {
        WIDE: _jobs(lab, LONG, **settings | {"width": 48}),
        DEVICE: _jobs(lab, (MIDDLE,), **settings),
        IID: _jobs(lab, (MIDDLE,), **settings | {"stc": 1}),
    }
    policies = POLICIES | {policy: {"policy": policy} for policy in lab.policies}
    rows |= {row: _jobs(lab, (MIDDLE,), **settings | own) for row, own in policies.items()}
    return rows | {ALONE: alone}


def _by_seconds(results: Sequence[Result]) -> dict[str, Any]:
    """{measure: {CPU seconds: one value for each seed}}; seconds 0 for what has learned from no stream."""
    if "marks" not in results[0]:
        return {str(FEW): {"0": [r[f"linear {FEW}"] for r in results]}, "tuned": {"0": [r["tuned"] for r in results]}}
    marks = results[0]["marks"]
    names = marks[next(iter(marks))]
    return {name: {mark: [r["marks"][mark][name] for r in results] for mark in marks} for name in names}


def _is_curve(row: str) -> bool:
    return row.endswith((DEVICE, IID, WIDE))


def _points(own: Mapping[str, Mapping[str, Sequence[float]]], name: str) -> Points:
    return [(float(mark), mean(values)) for mark, values in own[name].items()]


def _reached(measured: Mapping[str, Any], jobs: Mapping[str, Any]) -> Table:
    rows = []
    for row in jobs:
        own = measured[row]
        for mark, few in own[str(FEW)].items():
            if mark == "0":
                rows.append([row, "0", "0", spread(few), "–", spread(own["tuned"][mark])])
            elif _is_curve(row):
                seen = f"{mean(own['images'][mark]):,.0f}"
                rows.append([row, mark, seen, spread(few), spread(own[str(ALL)][mark]), "–"])
    head = ["", "CPU s", "images", "linear, 1 % labels, %", "linear, all labels, %", "supervised, 1 % labels, %"]
    note = (
        "From random weights; CIFAR-10's test images, GTSRB's held-out tracks (32 px, no mirror images). CPU "
        "seconds are of one core, scoring included. `adapt` has what a public MobileNetV2 is worth. Not in the paper."
    )
    return Table("From scratch: accuracy after CPU seconds of one core", head, rows, note)


def _policies(measured: Mapping[str, Any], further: Sequence[str]) -> Table:
    rows = []
    for row in (DEVICE, IID, *POLICIES, *further):
        own = measured.get(f"CIFAR-10, {row}", {str(FEW): {}})
        for mark in own[str(FEW)]:
            cells = [spread(own[name][mark]) for name in (str(FEW), str(ALL))]
            moved = [spread([100 * share for share in own[name][mark]]) for name in ("replaced", "least_replaced")]
            rows.append([row, mark, f"{mean(own['images'][mark]):,.0f}", *cells, *moved])
    head = ["", "CPU s", "images", "linear, 1 %", "linear, all", "replaced in a step, %", "the least, %"]
    note = "Replaced: share of the buffer, mean and least over the steps of the second half. Not in the paper."
    return Table("Policies in the recipe at equal CPU seconds, CIFAR-10, STC 500", head, rows, note)


def _margins(measured: Mapping[str, Any]) -> Table:
    rows = []
    for one, other in PAIRS:
        own, rival = (measured.get(f"CIFAR-10, {row}", {str(FEW): {}}) for row in (one, other))
        for mark in sorted(own[str(FEW)].keys() & rival[str(FEW)].keys(), key=int):
            cells = [spread(margins(own[name][mark], rival[name][mark])) for name in (str(FEW), str(ALL))]
            rows.append([f"{one} less {other}", mark, *cells])
    head = ["", "CPU s", "linear, 1 %", "linear, all"]
    return Table("Margins at equal CPU seconds, points, seeds paired on the same stream", head, rows, "")


def _choices(measured: Mapping[str, Any], choices: Mapping[str, Any]) -> Table:
    rows, mark = [], str(SHORT)
    for row in choices:
        own = measured[row]
        cells = [f"{own[name][mark][0]:.1f}" for name in (str(FEW), str(ALL))]
        rows.append([row.replace("choice: ", ""), f"{own['images'][mark][0]:,.0f}", *cells])
    note = "One seed: ± 1.5 points. A fifth of the training images (of GTSRB, of the tracks) is held back for the test."
    head = ["", "images", "linear, 1 %", "linear, all"]
    return Table(
        f"The recipe with one choice changed, {SHORT} CPU seconds, held-out training images, %", head, rows, note
    )


# ----------------------------------------------------------------------------------------------------------------------
# In the process of a job


def learn_for(directory: Path, seconds: Sequence[int], held_back: bool, **config: Any) -> Result:
    """Learn for these CPU seconds, and measure the encoder at each of them. Interrupted, it goes on where it saved."""
    plan, stream, learner = prepare(RunOptions(**config, out=str(directory / "run")))
    train, test = labelled(stream)
    if held_back:
        train, test = _split(train)
    saved = Checkpoints(directory / "checkpoints", keep=1)
    spent, shares, marks = 0.0, list[float](), dict[str, Any]()
    if found := saved.latest():
        learner.load_state_dict(found[1]["learner"])
        stream.load_state_dict(found[1]["stream"])
        spent, shares, marks = (found[1][name] for name in ("spent", "shares", "marks"))

    def save() -> None:
        state = {"learner": learner.state_dict(copy=False), "stream": stream.state_dict()}
        saved.save(learner.n_steps, state | {"spent": spent, "shares": shares, "marks": marks})

    with (
        Progress("learning, CPU seconds", int(seconds[-1])) as bar,
        closing(stream.segments(plan.segment, until=plan.images)) as segments,
    ):
        bar.start_from(int(spent))
        for mark in seconds:
            while spent < mark:
                started = process_time()
                if (images := next(segments, None)) is None:
                    break
                n_seen = learner.buffer.n_seen
                tracks = stream.tracks(torch.arange(n_seen, n_seen + len(images)))
                step = learner.learn_many(images, tracks if learner.positives == "time" else None)
                shares.append(step.replaced / (step.kept + step.replaced))
                before, spent = spent, spent + process_time() - started
                bar.advance(int(spent) - int(before), f"loss {step.loss:.2f}")
                if before // SAVE_EVERY < spent // SAVE_EVERY:
                    save()
            if str(mark) not in marks:
                half = shares[len(shares) // 2 :]
                marks[str(mark)] = _worth(learner.model, train, test, plan.seed) | {
                    "images": learner.buffer.n_seen,
                    "replaced": mean(half),
                    "least_replaced": min(half),
                }
                save()
    return {"marks": marks}


def _worth(model: ContrastiveModel, train: Images, test: Images, seed: int) -> dict[str, float]:
    """Accuracies in % of a linear classifier with few and with all labels."""
    known, tested = extract(model, train), extract(model, test)
    found = {}
    for fraction in (FEW, ALL):
        drawn = draw_labelled(train.labels, fraction, train.classes, seed)
        groups = None if train.tracks is None else torch.from_numpy(train.tracks)[drawn]
        decay = DECAY_OF_ALL if fraction == ALL else None
        head = fit_linear(known.features[drawn], known.labels[drawn], len(train.classes), groups=groups, decay=decay)
        found[str(fraction)] = 100 * head_accuracy(head, tested).top1
    return found


def _split(images: Images) -> tuple[Images, Images]:
    """A fifth of the images, or of the tracks, is held back."""
    groups = np.arange(len(images)) if images.tracks is None else np.unique(images.tracks, return_inverse=True)[1]
    fold = (np.random.default_rng(0).permutation(groups.max() + 1) % 5)[groups]
    parts = []
    for numbers in (np.flatnonzero(fold), np.flatnonzero(fold == 0)):
        tracks = None if images.tracks is None else images.tracks[numbers]
        parts.append(ArrayImages(images.images(numbers), images.labels[numbers], images.classes, tracks))
    return parts[0], parts[1]
