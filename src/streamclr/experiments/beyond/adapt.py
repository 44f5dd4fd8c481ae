"""Not in the paper: a public encoder adapts to a stream; what the policies, fine-tuning and tracks add to it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamclr.base.files import read_json, write_json
from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.classifier import Accuracy, Head, draw_labelled
from streamclr.encoders.projection import ContrastiveModel
from streamclr.experiments.findings import Findings, Series, first_reached, lines, margins, reached, shares_of_gap
from streamclr.linear import fit_linear
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream, resolve
from streamclr.runs.assemble import initial_model
from streamclr.runs.evaluation import Extracted, extract, head_accuracy, labelled, train_supervised
from streamclr.scenes import REACH, SPREAD_WEIGHT, find_scenes_in
from streamclr.scenes import spread as spread_rows
from streamclr.stage_two import Unlabelled, fine_tune, self_train
from streamclr.streams.datasets.images import Images
from streamclr.sweeps.job import Job, Result
from streamclr.sweeps.lab import Lab, run_job

FRACTIONS = (0.01, 0.1, 1.0)
DECAY_OF_ALL = 1e-3  # of the linear classifier with all labels, which is not chosen again for each row
# For the labels that are needed to reach GOAL %: fine-tuning without the stream, and adapted with labels spread.
GOAL = 90.0
MORE_LABELS, FEWER_LABELS = (0.02, 0.04), (0.005,)
SHORT = {"GTSRB": 9_984, "CIFAR-10": 4_992}  # frames of the stream where policies are compared
LONG = {"GTSRB": 99_840, "CIFAR-10": 19_968}  # where the encoder is then fine-tuned
LONGEST = {"GTSRB": 159_744, "CIFAR-10": 99_840}  # two cores learn from them in ten minutes; fine-tuned, too
# Where policies are compared; 512 frames of 64 px with their neighbours.
IN_BUFFER: dict[str, Any] = {"buffer": "12M", "batch": 64, "segment": 64}
NO_BUFFER = {"buffer": 64}  # of FIFO, which then learns from the newest frames alone
PUBLIC, RESERVOIR, ADAPTED = "public encoder as it is", "reservoir", "default, many frames"
ADAPTED_LONGER = "default, ten minutes of two cores"
IN_RANDOM_ORDER = "the same, neighbours in pairs, pairs in random order"
TWICE = "reservoir, twice as many frames"  # with it, what a reservoir would have in the CPU seconds of another policy
POLICIES = {
    "fifo": "FIFO, no buffer",
    "random": "Random Replace",
    "reservoir": RESERVOIR,
    "contrast?rescore_every=20": "contrast scoring, T = 20",
    "mixture": "half reservoir, half contrast",
    "scored-reservoir": "reservoir, batch drawn by score",
    "min-red": "MinRed",
    "k-center": "K-Center",
}
# A run that adapts a public encoder.
SETTINGS: dict[str, Any] = {"recipe": "device", "encoder": "mobilenet_v2", "size": 64, "width": None, "stem": None}
SETTINGS |= {"lr": None, "stc": None, "probes": 0, "fractions": "0.01", "classifier": "linear", "spread": "off"}
SETTINGS["fresh"] = 0.0
DATASETS: dict[str, dict[str, Any]] = {"GTSRB": {"source": "gtsrb"}, "CIFAR-10": {"source": "cifar10", "stc": 500}}
# What is measured of a row, and the heading of its column.
COLUMNS = {
    "cpu_seconds": "CPU s",
    "linear 0.01": "linear, 1 %",
    "linear 0.1": "linear, 10 %",
    "linear 1.0": "linear, all",
    "tuned": "fine-tuned, 1 %",
    "tuned spread": "the same, spread over tracks",
    "taught": "spread and self-trained",
    "tuned found": "spread, cuts found",
    "taught found": "spread and self-trained, cuts found",
}
MEASURED = ("cpu_seconds", "linear", "tuned", "taught")  # beginnings of these names and those for other fractions


def experiment(lab: Lab) -> Findings:
    jobs: dict[str, list[Job]] = {}
    for dataset, settings in DATASETS.items():
        if lab.at_hand(dataset, **settings):
            jobs |= {f"{dataset}, {row}": own for row, own in rows_of(lab, dataset, settings).items()}
    results = lab.do(jobs)
    measured = {
        row: {name: [one[name] for one in own] for name in own[0] if name.startswith(MEASURED)}
        for row, own in results.items()
    }
    table = Table(
        "A public MobileNetV2 adapted at 64 px: accuracy on held-out tracks (GTSRB) or test images, %",
        ["", *COLUMNS.values()],
        [[row, *(spread(own.get(name, []), 1) for name in COLUMNS)] for row, own in measured.items()],
        "Labels: a class-balanced draw of the training frames, the same for each row of a seed. "
        f"Frames: {SHORT['GTSRB']:,} (CIFAR-10: {SHORT['CIFAR-10']:,}), where it says many, and in random order, "
        f"{LONG['GTSRB']:,} ({LONG['CIFAR-10']:,}), in ten minutes of two cores {LONGEST['GTSRB']:,} "
        f"({LONGEST['CIFAR-10']:,}); policies have a buffer of {IN_BUFFER['buffer']}. CPU seconds are of learning "
        "alone, one thread. Spread: a label counts for the other frames of its track; self-trained: "
        "fine-tuned again with what it is sure of in the other tracks; cuts found: the stream is read "
        "as one video, and the adapted encoder finds the cuts. Not in the paper.",
    )
    names = _policies(lab).values()
    findings = [table, _equal_seconds(measured, names), *_goals(measured)]
    draw = lines(_series(measured, names), "CPU seconds")
    return Findings(findings, measured, "Linear classifier with 1 % of the labels, %", draw)


def _policies(lab: Lab) -> dict[str, str]:
    """With those of --policies."""
    return POLICIES | {policy: policy for policy in lab.policies if policy not in POLICIES}


def rows_of(lab: Lab, dataset: str, settings: dict[str, Any]) -> dict[str, list[Job]]:
    """The jobs of each row of a dataset."""
    short, long = SHORT[dataset], LONG[dataset]
    public = SETTINGS | settings

    def adapted(images: int = short, what: dict[str, bool] | None = None, **own: Any) -> list[Job]:
        runs = lab.runs(**public | {"images": images} | own)
        return [job.doing("adapt", measure, **{"whole": False} | (what or {})) for job in runs]

    has_tracks = dataset == "GTSRB"
    more, fewer = (MORE_LABELS, FEWER_LABELS) if has_tracks else ((), ())
    rows = {PUBLIC: [job.doing("public", measure_public, more=more) for job in lab.runs(**public, images=short)]}
    for policy, name in _policies(lab).items():
        rows[name] = adapted(policy=policy, **IN_BUFFER | (NO_BUFFER if policy == "fifo" else {}))
    rows[TWICE] = adapted(policy="reservoir", images=2 * short, **IN_BUFFER)
    if has_tracks:
        paper: dict[str, Any] = {"policy": "contrast?rescore_every=20", "positives": "views", "flip": "on"}
        rows["contrast scoring, two views of one frame, flip"] = adapted(**paper, **IN_BUFFER)
        rows["reservoir, two views of one frame"] = adapted(policy="reservoir", positives="views", **IN_BUFFER)
        rows[IN_RANDOM_ORDER] = adapted(images=long, source="gtsrb?order=pairs")
        scratch: dict[str, Any] = {"recipe": "paper", "encoder": None, "size": 32, "width": 8, "stem": "half"}
        scratch["lr"] = 3e-3
        rows["ResNet-18 of width 8 from scratch at 32 px, contrast scoring, many frames"] = adapted(
            images=long, positives="time", **scratch
        )
        rows["no stream: raw pixels of 32 px (linear), ResNet-18 of width 8 (fine-tuned)"] = [
            job.doing("labels-alone", measure_labels_alone) for job in lab.runs(**public | scratch, images=short)
        ]
    rows[ADAPTED] = [job.doing("adapt", measure, fewer=fewer) for job in adapted(long, {"whole": True})]
    rows[ADAPTED_LONGER] = adapted(LONGEST[dataset], {"tuned": True})
    return rows


def _series(measured: dict[str, dict[str, list[float]]], policies: Iterable[str]) -> Series:
    """For a plot: the reservoir with more and more frames as a line; of GTSRB the other policies too, as points."""

    def points(dataset: str, *rows: str) -> list[tuple[float, float]]:
        own = [measured[f"{dataset}, {row}"] for row in rows if f"{dataset}, {row}" in measured]
        return [(mean(one["cpu_seconds"]), mean(one["linear 0.01"])) for one in own]

    reservoirs = [(f"{d}, reservoir", points(d, PUBLIC, RESERVOIR, TWICE, ADAPTED), "o-") for d in SHORT]
    others = [(name, points("GTSRB", name), "s") for name in policies if name != RESERVOIR]
    return [one for one in reservoirs + others if one[1]]


def _equal_seconds(measured: dict[str, dict[str, list[float]]], policies: Iterable[str]) -> Table:
    """Each policy beside a reservoir that learns for as many CPU seconds."""
    rows = []
    for dataset in ("GTSRB", "CIFAR-10"):
        if f"{dataset}, {PUBLIC}" not in measured:
            continue
        curve = [measured[f"{dataset}, {row}"] for row in (PUBLIC, RESERVOIR, TWICE)]
        for name in policies:
            own = measured[f"{dataset}, {name}"]
            cells = [spread(less_curve(own, curve, column, "cpu_seconds")) for column in ("linear 0.01", "linear 0.1")]
            rows.append([f"{dataset}, {name}", spread(own["cpu_seconds"], 0), *cells])
    head = ["", "CPU s", "linear, 1 %: less the reservoir", "linear, 10 %: less the reservoir"]
    note = "The accuracy of the reservoir is interpolated between none, as many and twice as many frames."
    return Table("Policies at equal CPU seconds, points", head, rows, note)


def less_curve(
    own: Mapping[str, Sequence[float]], curve: Sequence[Mapping[str, Sequence[float]]], column: str, x: str
) -> list[float]:
    """How far a row is above a curve of other rows, interpolated where its x is, seed by seed."""
    rival = [
        float(np.interp(at, [one[x][i] for one in curve], [one[column][i] for one in curve]))
        for i, at in enumerate(own[x])
    ]
    return margins(own[column], rival)


def _goals(measured: dict[str, dict[str, list[float]]]) -> list[Table]:
    """What adapting gains over the public encoder, seed by seed."""
    rows = []
    for dataset in ("GTSRB", "CIFAR-10"):
        public, adapted, longer, iid = (
            measured.get(f"{dataset}, {row}", {}) for row in (PUBLIC, ADAPTED, ADAPTED_LONGER, IN_RANDOM_ORDER)
        )
        for what, name in (
            ("linear", "linear 0.01"),
            ("fine-tuned", "tuned"),
            ("spread", "tuned spread"),
            ("spread and self-trained", "taught"),
        ):
            if name in public and name in adapted:
                rows.append([f"{dataset}, {what}: adapted less public", spread(margins(adapted[name], public[name]))])
            if name in public and name in longer:
                difference = spread(margins(longer[name], public[name]))
                rows.append([f"{dataset}, {what}: adapted for ten minutes of two cores less public", difference])
        if iid:
            shares = shares_of_gap(*(own["linear 0.01"] for own in (adapted, public, iid)))
            rows.append([f"{dataset}, linear: share of the gain in random order, %", spread(shares)])
        for found, known in (("tuned found", "tuned spread"), ("taught found", "taught")):
            if found in adapted:
                difference = spread(margins(adapted[found], adapted[known]))
                rows.append([f"{dataset}, {COLUMNS[known]}: cuts found less known tracks", difference])
        if MORE_LABELS and f"tuned {MORE_LABELS[0]}" in public:
            rows += _labels_needed(dataset, public, adapted)
    return [Table("What adapting gains with 1 % of the labels, points", ["", "mean and 95 % interval"], rows, "")]


def _labels_needed(dataset: str, public: dict[str, list[float]], adapted: dict[str, list[float]]) -> list[list[str]]:
    """The share of the labels with which each seed reaches GOAL, interpolated between those that were measured."""
    curves = {
        "public encoder fine-tuned": {0.01: public["tuned"]} | {f: public[f"tuned {f}"] for f in MORE_LABELS},
        "adapted, spread and self-trained": {f: adapted[f"taught {f}"] for f in FEWER_LABELS}
        | {0.01: adapted["taught"]},
    }
    rows = []
    for name, curve in curves.items():
        percents = [100 * fraction for fraction in curve]
        points = ", ".join(f"{spread(own)} with {100 * fraction:g} %" for fraction, own in curve.items())
        seeds = [list(zip(percents, seed, strict=True)) for seed in zip(*curve.values(), strict=True)]
        needed = [first_reached(seed, GOAL) for seed in seeds]
        n_below = needed.count(percents[0])
        cell = f"below {percents[0]:g} in {n_below} of {len(seeds)} seeds" if n_below else reached(needed, 2)
        rows.append([f"{dataset}, {name}: % of the labels for {GOAL:.0f} %", f"{cell} ({points})"])
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# In the process of a job


def measure(directory: Path, whole: bool, fewer: Sequence[float] = (), tuned: bool = False, **config: Any) -> Result:
    """A run, and what its encoder is worth; tuned: fine-tuned, too; whole: with all labels and tracks, too.

    fewer: label fractions to self-train with; the cuts of the stream are then found, too.
    """
    result = run_job(directory, stage_two=False, **config)
    model = RunDirectory(directory / "run").load_model()
    found = {"cpu_seconds": result["cpu_seconds_learning"], "encoder": result.get("encoder")}
    return found | worth(Kept(directory), model, RunOptions(**config), whole, fewer, tuned)


def measure_public(directory: Path, more: Sequence[float], **config: Any) -> Result:
    """What the public encoder is worth as it is.

    more: label fractions to fine-tune with.
    """
    one = RunOptions(**config)
    plan = resolve(one, open_run_stream(one))
    model = initial_model(plan, plan.size).eval()
    kept = Kept(directory)
    worth(kept, model, one, whole=True)
    train, test = labelled(open_run_stream(one))
    for fraction in more:
        numbers = draw_labelled(train.labels, fraction, train.classes, one.seed)
        own = Extracted(torch.empty(0), torch.from_numpy(train.labels)[numbers], numbers, torch.ones(len(numbers)))
        kept.add(f"tuned {fraction}", measure=partial(_tuned, model, train, test, own, one.seed))
    return {"cpu_seconds": 0.0} | kept.found


def measure_labels_alone(directory: Path, **config: Any) -> Result:
    """What the labels are worth without a stream: a linear classifier of pixels, and an encoder from scratch."""
    one = RunOptions(**config)
    stream = open_run_stream(one)
    train, test = labelled(stream)
    plan = resolve(one, stream)
    numbers = draw_labelled(train.labels, FRACTIONS[0], train.classes, one.seed)
    pixels = [
        torch.from_numpy(part.images(rows)).flatten(1) / 255
        for part, rows in ((train, numbers.numpy()), (test, np.arange(len(test))))
    ]
    labels = torch.from_numpy(train.labels)[numbers]
    head = fit_linear(pixels[0], labels, len(train.classes), groups=_groups(train, numbers))
    linear = Accuracy.of(head(pixels[1]).argmax(1), torch.from_numpy(test.labels), len(test.classes)).top1
    model, own_head = train_supervised(plan.architecture.make, train, numbers, seed=one.seed)
    tuned = head_accuracy(own_head, extract(model, test)).top1
    return {"cpu_seconds": 0.0, "linear 0.01": 100 * linear, "tuned": 100 * tuned}


class Kept:
    """What a job has measured so far: each part takes minutes, and an interrupted job goes on after the last."""

    def __init__(self, directory: Path):
        self.file = directory / "measured.json"
        self.found: Result = read_json(self.file) if self.file.exists() else {}

    def add(self, *names: str, measure: Callable[[], Sequence[Any]]) -> None:
        """measure: returns a value for each name, and perhaps more."""
        if not all(name in self.found for name in names):
            self.found |= dict(zip(names, measure(), strict=False))
            write_json(self.file, self.found)


def worth(
    kept: Kept, model: ContrastiveModel, one: RunOptions, whole: bool, fewer: Sequence[float] = (), tuned: bool = False
) -> Result:
    """Accuracies in %: of a linear classifier with few labels and, if wanted, with all and fine-tuned on few."""
    train, test = labelled(open_run_stream(one))
    fractions = FRACTIONS if whole else FRACTIONS[:-1]
    numbers = {f: draw_labelled(train.labels, f, train.classes, one.seed) for f in fractions}
    needed = None if whole else torch.cat(list(numbers.values())).unique()
    known, tested = extract(model, train, needed), extract(model, test)
    draws = {fraction: torch.isin(known.numbers, own) for fraction, own in numbers.items()}

    def linear(fraction: float, drawn: Tensor) -> tuple[float]:
        decay, groups = DECAY_OF_ALL if fraction == 1 else None, _groups(train, known.numbers[drawn])
        head = fit_linear(known.features[drawn], known.labels[drawn], len(train.classes), groups=groups, decay=decay)
        return (100 * head_accuracy(head, tested).top1,)

    for fraction, drawn in draws.items():
        kept.add(f"linear {fraction}", measure=partial(linear, fraction, drawn))
    few = draws[FRACTIONS[0]]
    if whole or tuned:
        kept.add("tuned", measure=partial(_tuned, model, train, test, Extracted(*(c[few] for c in known)), one.seed))
    if whole and train.tracks is not None:
        tracks = torch.from_numpy(train.tracks)[known.numbers]
        teach = partial(taught, model, train, test)
        kept.add("tuned spread", "taught", measure=partial(teach, known, few, tracks, one.seed))
        if fewer:
            video = as_one_video(tracks, one.seed)
            scenes = find_scenes_in(known.features[video])
            parts = Extracted(*(column[video] for column in known)), few[video], scenes
            kept.add("tuned found", "taught found", measure=partial(teach, *parts, one.seed, REACH))
        for fraction in fewer:
            drawn = torch.isin(known.numbers, draw_labelled(train.labels, fraction, train.classes, one.seed))
            names = f"tuned spread {fraction}", f"taught {fraction}"
            kept.add(*names, measure=partial(teach, known, drawn, tracks, one.seed))
    return kept.found


def _groups(train: Images, numbers: Tensor) -> Tensor | None:
    return None if train.tracks is None else torch.from_numpy(train.tracks)[numbers]


def as_one_video(tracks: Tensor, seed: int) -> Tensor:
    """The rows of whole tracks in random order: one video, in which the cuts have to be found."""
    generator = torch.Generator().manual_seed(seed)
    _, number = tracks.unique(return_inverse=True)
    place = torch.randperm(int(number.max()) + 1, generator=generator)[number]
    return (place * len(tracks) + torch.arange(len(tracks))).argsort()


def taught(
    model: ContrastiveModel,
    train: Images,
    test: Images,
    known: Extracted,
    drawn: Tensor,
    scenes: Tensor,
    seed: int,
    reach: int | None = None,
) -> tuple[float, float]:
    """Fine-tuned on labels that are spread over their scenes, and self-trained on the other scenes, in %."""
    rows, sources = spread_rows(drawn.nonzero()[:, 0], scenes, len(scenes) if reach is None else reach)
    weights = torch.where(rows == sources, 1.0, SPREAD_WEIGHT)
    own = Extracted(known.features[rows], known.labels[sources], known.numbers[rows], weights)
    accuracy, teacher = _tuned(model, train, test, own, seed)
    others = (~torch.isin(scenes, scenes[rows])).nonzero()[:, 0]
    numbers = known.numbers[others].numpy()
    unlabelled = Unlabelled(lambda chosen: train.images(numbers[chosen]), scenes[others])
    images = torch.from_numpy(train.images(own.numbers.numpy()))
    pupil = self_train(model, teacher, images, own.labels, unlabelled, own.weights, seed=seed, quiet=True)
    return accuracy, 100 * head_accuracy(pupil[1], extract(pupil[0], test)).top1


def _tuned(
    model: ContrastiveModel, train: Images, test: Images, own: Extracted, seed: int
) -> tuple[float, tuple[ContrastiveModel, Head]]:
    """Fine-tuned on these labels: the accuracy in %, and the classifier."""
    images = torch.from_numpy(train.images(own.numbers.numpy()))
    tuned = fine_tune(model, images, own.labels, len(train.classes), own.weights, seed=seed, quiet=True)
    return 100 * head_accuracy(tuned[1], extract(tuned[0], test)).top1, tuned
