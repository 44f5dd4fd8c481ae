"""The encoder and learning rate of the CPU scale, chosen with the policy Random so that no other is favoured."""

from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.experiments.findings import Findings, accuracy, lines
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.evaluation import evaluate, labelled
from streamclr.runs.loop import learn_stream
from streamclr.runs.prepare import prepare
from streamclr.streams.datasets.images import ArrayImages
from streamclr.sweeps.job import Result
from streamclr.sweeps.lab import Lab

ENCODERS = (("small", 4), ("half", 8), ("imagenet", 8), ("imagenet", 16))
RATES = (3e-4, 1e-3, 3e-3)


def experiment(lab: Lab) -> Findings:
    images = lab.images or 100_000
    jobs = {}
    for stem, width in ENCODERS:
        for lr in RATES:
            runs = lab.runs(policy="random", images=images, stem=stem, width=width, lr=lr, probes=0)
            jobs[f"{stem}, {width}, {lr:g}"] = [job.doing("validate", validate) for job in runs]
    results = lab.do(jobs)
    measured = {
        row: {"accuracy": accuracy(own), "minutes": [500_000 / images * result["seconds"] / 60 for result in own]}
        for row, own in results.items()
    }
    table = Table(
        "Random Replace on CIFAR-10, all labels, 10,000 training images held back",
        ["stem, width, learning rate", "accuracy, %", "minutes of learning for 500,000 images"],
        [[row, spread(values["accuracy"]), spread(values["minutes"])] for row, values in measured.items()],
        "Not in the paper.",
    )
    series = []
    for stem, width in ENCODERS:
        points = [(lr, mean(measured[f"{stem}, {width}, {lr:g}"]["accuracy"])) for lr in RATES]
        series.append((f"{stem}, width {width}", points, "o-"))
    draw = lines(series, "learning rate", log=10, fontsize=8)
    return Findings([table], measured, f"Accuracy of Random Replace after {images:,} images, %", draw)


def validate(directory: Path, **config: Any) -> Result:
    """A run that is tested on a fifth of the training images, held back from the classifier."""
    one, stream, learner = prepare(RunOptions(**config, out=str(directory / "run")))
    seconds = learn_stream(one, learner, stream, RunDirectory.of(one))
    train, _ = labelled(stream)
    known, held_back = (
        ArrayImages(train.images(numbers), train.labels[numbers], train.classes)
        for numbers in np.split(np.arange(len(train)), [len(train) * 4 // 5])
    )
    results, _ = evaluate(learner.model, known, held_back, (1.0,), one.seed, one.classifier)
    return results | {"seconds": seconds}
