"""Which images to ask about: those that `asking_order` chooses, against a uniform draw of as many; not in the paper."""

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from streamclr.base.table import Table
from streamclr.classifier import train_head
from streamclr.experiments.findings import Findings, spread
from streamclr.labelling.order import asking_order
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream
from streamclr.runs.evaluation import extract, head_accuracy
from streamclr.sweeps.job import Result
from streamclr.sweeps.lab import Lab, run_job

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = (0.001, 0.01)  # of the labels
N_DRAWS = 5  # reservoirs for each run
RESERVOIR = 8  # images that the run keeps for each label to come
WAYS = ("chosen", "uniform")


def asked(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=500_000)
    runs = [replace(job, function=f"{__name__}:measure") for job in lab.runs(images=images)]
    results = lab.do({"contrast": runs})["contrast"]
    measured: dict[str, Any] = {}
    rows = []
    for n in results[0]["asked"]:
        own = {way: [100 * draw[way] for result in results for draw in result["asked"][n]] for way in WAYS}
        own["difference"] = [a - b for a, b in zip(own["chosen"], own["uniform"], strict=True)]
        measured[n] = own
        better = sum(difference > 0 for difference in own["difference"])
        rows.append([n, *(spread(values) for values in own.values()), f"{better} of {len(own['difference'])}"])
    table = Table(
        "Accuracy on CIFAR-10 by which images are labelled, %",
        ["labels asked", *WAYS, "difference", "chosen is better in"],
        rows,
        f"{N_DRAWS} draws for each seed: both ways ask about images of one reservoir, a uniform draw of {RESERVOIR} "
        "images for each of the most labels. Uniform is not balanced by class, as labels are elsewhere. Not in the "
        "paper.",
    )

    def draw(axes: "Axes") -> None:
        for i, way in enumerate(WAYS):
            for j, own in enumerate(measured.values()):
                axes.bar(j + 0.4 * i, mean(own[way]), 0.38, color=f"C{i}", label=way if j == 0 else None)
                axes.plot([j + 0.4 * i] * len(own[way]), own[way], "k.", ms=3)
        axes.set_xticks([j + 0.2 for j in range(len(measured))], [f"{n} labels" for n in measured])
        axes.set_ylabel("%")
        axes.legend(fontsize=8)

    return Findings([table], measured, "CIFAR-10, labels asked for and labels drawn", draw)


def measure(directory: Path, **config: Any) -> Result:
    """A run, and the accuracy with the labels of each way, reservoir by reservoir."""
    result = run_job(directory, **config)
    one = RunOptions(**config)
    stream = open_run_stream(one)
    train, test = stream.train, stream.test
    assert train is not None
    assert test is not None
    model = RunDirectory(directory / "run").load_model()
    tested = extract(model, test)
    budgets = [max(1, round(share * len(train))) for share in SHARES]
    found: dict[str, list[dict[str, float]]] = {str(n): [] for n in budgets}
    for number in range(N_DRAWS):
        seed = N_DRAWS * one.seed + number
        generator = torch.Generator().manual_seed(seed)
        # Uniform and without repeats, as a reservoir of a stream that shows each image equally often.
        reservoir = torch.randperm(len(train), generator=generator)[: RESERVOIR * budgets[-1]]
        features, labels, _ = extract(model, train, reservoir)
        orders = {
            "chosen": asking_order(features, budgets[-1], seed),
            "uniform": torch.randperm(len(features), generator=generator)[: budgets[-1]],
        }
        for n in budgets:
            accuracies = {}
            for way, order in orders.items():
                head = train_head(features[order[:n]], labels[order[:n]], len(train.classes), seed=one.seed)
                accuracies[way] = head_accuracy(head, tested).top1
            found[str(n)].append(accuracies)
    return result | {"asked": found}
