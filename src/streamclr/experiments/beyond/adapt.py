"""Not in the paper: a public encoder adapts to a stream; what the policies, fine-tuning and tracks add to it."""

from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.classifier import Head, draw_labelled
from streamclr.encoders.projection import ContrastiveModel
from streamclr.experiments.findings import Findings, lines, margins
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream, resolve
from streamclr.runs.assemble import initial_model
from streamclr.runs.evaluation import Extracted, extract, head_accuracy, labelled, spread_over_tracks
from streamclr.scenes import REACH, SPREAD_WEIGHT, find_scenes_in
from streamclr.scenes import spread as spread_rows
from streamclr.stage_two import fine_tune, fit_linear
from streamclr.streams.datasets.images import Images
from streamclr.sweeps.job import Job, Result
from streamclr.sweeps.lab import Lab, run_job

FRACTIONS = (0.01, 0.1, 1.0)
DECAY_OF_ALL = 1e-3  # of the linear classifier with all labels, which is not chosen again for each row
MORE_LABELS = (0.02, 0.04, 0.08, 0.16)  # for the labels that fine-tuning without the stream needs
SHORT, LONG = 9_984, 39_936  # frames of the stream
BUFFER = "12M"  # where policies are compared: 512 frames of 64 px with their neighbours
POLICIES = {
    "fifo": "FIFO, no buffer",
    "random": "Random Replace",
    "reservoir": "reservoir",
    "contrast?rescore_every=20": "contrast scoring, T = 20",
    "mixture": "half reservoir, half contrast",
    "scored-reservoir": "reservoir, batch drawn by score",
    "min-red": "MinRed",
    "k-center": "K-Center",
}
# What is measured of a row, and the heading of its column.
COLUMNS = {
    "cpu_seconds": "CPU s",
    "linear 0.01": "linear, 1 %",
    "linear 0.1": "linear, 10 %",
    "linear 1.0": "linear, all",
    "tuned": "fine-tuned, 1 %",
    "tuned spread": "the same, spread over tracks",
    "tuned found": "spread, cuts found",
}


def experiment(lab: Lab) -> Findings:
    jobs: dict[str, list[Job]] = {}
    for dataset, settings in (("GTSRB", {"source": "gtsrb"}), ("CIFAR-10", {"source": "cifar10", "stc": 500})):
        if lab.at_hand(dataset, **settings):
            jobs |= {f"{dataset}, {row}": own for row, own in _rows(lab, dataset == "GTSRB", settings).items()}
    results = lab.do(jobs)
    measured = {
        row: {name: [one[name] for one in own] for name in own[0] if name in COLUMNS or name.startswith("tuned ")}
        for row, own in results.items()
    }
    table = Table(
        "A public MobileNetV2 adapted at 64 px: accuracy on held-out tracks (GTSRB) or test images, %",
        ["", *COLUMNS.values()],
        [[row, *(spread(own.get(name, []), 1) for name in COLUMNS)] for row, own in measured.items()],
        "Labels: a class-balanced draw of the training frames, the same for each row of a seed. "
        f"Rows without a number of frames learn from {SHORT:,}, policies with a buffer of {BUFFER}. CPU seconds are of "
        "learning alone, one thread. Spread: a label counts for the other frames of its track; cuts found: "
        "the stream is read as one video, and the adapted encoder finds the cuts. Not in the paper.",
    )
    series = [(row, [(mean(own["cpu_seconds"]), mean(own["linear 0.01"]))], "o") for row, own in measured.items()]
    findings = [table, *_goals(measured)]
    return Findings(findings, measured, "Linear classifier with 1 % of the labels, %", lines(series, "CPU seconds"))


def _rows(lab: Lab, has_tracks: bool, settings: dict[str, Any]) -> dict[str, list[Job]]:
    public = {"encoder": "mobilenet_v2", "size": 64, "width": None, "stem": None, "lr": None, "stc": None, **settings}
    public |= {"probes": 0, "fractions": "0.01", "classifier": "linear", "spread": "off"}

    def adapted(tuned: bool = False, images: int = SHORT, **own: Any) -> list[Job]:
        runs = lab.runs(**public | {"images": images} | own)
        return [job.doing("adapt", measure, tuned=tuned) for job in runs]

    rows = {
        "public encoder": [job.doing("adapt", measure_public, tuned=True) for job in lab.runs(**public, images=SHORT)]
    }
    for policy, name in POLICIES.items():
        rows[name] = adapted(policy=policy, buffer=64 if policy == "fifo" else BUFFER, batch=64, segment=64)
    rows["default buffer"] = adapted()
    rows["two views of one frame"] = adapted(positives="views")
    rows["all stages learn"] = adapted(train="all")
    rows["flip"] = adapted(flip="on")
    rows[f"{LONG:,} frames"] = adapted(tuned=True, images=LONG)
    if has_tracks:
        rows[f"{LONG:,} frames in random order"] = adapted(images=LONG, source="gtsrb?order=iid")
    return rows


def _goals(measured: dict[str, dict[str, list[float]]]) -> list[Table]:
    """What adapting gains over the public encoder, seed by seed."""
    rows = []
    for dataset in ("GTSRB", "CIFAR-10"):
        public, adapted = (measured.get(f"{dataset}, {row}", {}) for row in ("public encoder", f"{LONG:,} frames"))
        iid = measured.get(f"{dataset}, {LONG:,} frames in random order", {})
        for what, name in (("linear", "linear 0.01"), ("fine-tuned", "tuned"), ("spread", "tuned spread")):
            if name in public and name in adapted:
                rows.append([f"{dataset}, {what}: adapted less public", spread(margins(adapted[name], public[name]))])
        if iid:
            gains = [mean(margins(own["linear 0.01"], public["linear 0.01"])) for own in (adapted, iid)]
            rows.append(
                [f"{dataset}, linear: share of the gain in random order, %", f"{100 * gains[0] / gains[1]:.0f}"]
            )
        if "tuned found" in adapted:
            difference = spread(margins(adapted["tuned found"], adapted["tuned spread"]))
            rows.append([f"{dataset}, spread: cuts found less known tracks", difference])
        for fraction in (0.01, *MORE_LABELS):
            name = "tuned" if fraction == 0.01 else f"tuned {fraction}"
            if name in public:
                rows.append(
                    [f"{dataset}, public encoder fine-tuned on {fraction:.0%} of the labels", spread(public[name])]
                )
    return [Table("What adapting gains with 1 % of the labels, points", ["", "mean and 95 % interval"], rows, "")]


# ----------------------------------------------------------------------------------------------------------------------
# In the process of a job


def measure(directory: Path, tuned: bool, **config: Any) -> Result:
    """A run, and what its encoder is worth."""
    result = run_job(directory, **config)
    model = RunDirectory(directory / "run").load_model()
    return {"cpu_seconds": result["cpu_seconds_learning"], "encoder": result["encoder"]} | worth(model, tuned, config)


def measure_public(directory: Path, tuned: bool, **config: Any) -> Result:
    """What the public encoder is worth as it is, and how many labels it needs."""
    one = RunOptions(**config)
    plan = resolve(one, open_run_stream(one))
    model = initial_model(plan, plan.size).eval()
    found = {"cpu_seconds": 0.0} | worth(model, tuned, config)
    train, test = labelled(open_run_stream(one))
    for fraction in MORE_LABELS if train.tracks is not None else ():
        numbers = draw_labelled(train.labels, fraction, train.classes, one.seed)
        own = Extracted(torch.empty(0), torch.from_numpy(train.labels)[numbers], numbers, torch.ones(len(numbers)))
        found[f"tuned {fraction}"] = tuned_accuracy(model, train, test, own, one.seed)
    return found


def worth(model: ContrastiveModel, tuned: bool, config: dict[str, Any]) -> Result:
    """Accuracies in %: of a linear classifier with each of FRACTIONS and, if wanted, fine-tuned on the first."""
    one = RunOptions(**config)
    stream = open_run_stream(one)
    train, test = labelled(stream)
    known, tested = extract(model, train), extract(model, test)
    found: Result = {}
    draws = {
        fraction: torch.isin(known.numbers, draw_labelled(train.labels, fraction, train.classes, one.seed))
        for fraction in FRACTIONS
    }
    for fraction, drawn in draws.items():
        decay = DECAY_OF_ALL if fraction == 1 else None
        head = fit_linear(
            known.features[drawn],
            known.labels[drawn],
            len(train.classes),
            groups=_groups(train, known.numbers[drawn]),
            decay=decay,
        )
        found[f"linear {fraction}"] = 100 * head_accuracy(head, tested).top1
    if tuned:
        drawn = draws[FRACTIONS[0]]
        accuracy = partial(tuned_accuracy, model, train, test, seed=one.seed)
        found["tuned"] = accuracy(own=Extracted(*(column[drawn] for column in known)))
        if train.tracks is not None:
            tracks = torch.from_numpy(train.tracks)[known.numbers]
            found["tuned spread"] = accuracy(own=spread_over_tracks(known, drawn, tracks))
            found["tuned found"] = accuracy(own=spread_over_found(known, drawn, tracks, one.seed))
    return found


def _groups(train: Images, numbers: Tensor) -> Tensor | None:
    return None if train.tracks is None else torch.from_numpy(train.tracks)[numbers]


def spread_over_found(known: Extracted, drawn: Tensor, tracks: Tensor, seed: int) -> Extracted:
    """Labels spread without known tracks: tracks in random order are one video, in which the cuts have to be found."""
    generator = torch.Generator().manual_seed(seed)
    _, number = tracks.unique(return_inverse=True)
    place = torch.randperm(int(number.max()) + 1, generator=generator)[number]
    order = (place * len(tracks) + torch.arange(len(tracks))).argsort()  # whole tracks, their frames in order
    rows, sources = spread_rows(drawn[order].nonzero()[:, 0], find_scenes_in(known.features[order]), REACH)
    weights = torch.where(rows == sources, 1.0, SPREAD_WEIGHT)
    return Extracted(known.features[order[rows]], known.labels[order[sources]], known.numbers[order[rows]], weights)


def tuned_accuracy(model: ContrastiveModel, train: Images, test: Images, own: Extracted, seed: int) -> float:
    """Fine-tuned on these labels, in %."""
    images = torch.from_numpy(train.images(own.numbers.numpy()))
    tuned: tuple[ContrastiveModel, Head] = fine_tune(
        model, images, own.labels, len(train.classes), own.weights, seed=seed, quiet=True
    )
    return 100 * head_accuracy(tuned[1], extract(tuned[0], test)).top1
