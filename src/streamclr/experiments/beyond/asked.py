"""Not in the paper: accuracy when `asking_order` chooses which images are labelled, against a uniform draw."""

from pathlib import Path
from statistics import mean
from typing import Any

import torch

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.classifier import train_head
from streamclr.experiments.findings import Findings, bars, margins
from streamclr.labelling.order import asking_order
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream
from streamclr.runs.evaluation import extract, head_accuracy, labelled
from streamclr.sweeps.job import Result
from streamclr.sweeps.lab import Lab, run_job

SHARES = (0.001, 0.01)  # of the labels
N_DRAWS = 5  # reservoirs for each run
RESERVOIR = 8  # images in a reservoir for each label
WAYS = ("chosen", "uniform")


def experiment(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=500_000)
    runs = [job.doing("asked", measure) for job in lab.runs(images=images)]
    results = lab.do({"contrast": runs})["contrast"]
    measured: dict[str, Any] = {}
    rows = []
    for n in results[0]["asked"]:
        own = {way: [100 * draw[way] for result in results for draw in result["asked"][n]] for way in WAYS}
        own["difference"] = margins(own["chosen"], own["uniform"])
        measured[n] = own
        better = sum(difference > 0 for difference in own["difference"])
        # The draws of one seed share its run: the seeds alone are independent.
        by_seed = ([mean(values[i : i + N_DRAWS]) for i in range(0, len(values), N_DRAWS)] for values in own.values())
        rows.append([n, *map(spread, by_seed), f"{better} of {len(own['difference'])}"])
    table = Table(
        "Accuracy on CIFAR-10 by which images are labelled, %",
        ["labels", *WAYS, "difference", "draws in which chosen is better"],
        rows,
        f"Mean of {N_DRAWS} draws for each seed. In a draw both ways take images of one reservoir, which is a uniform "
        f"sample of {RESERVOIR} images for each label of the last row. The uniform labels are not balanced by class; "
        "those of the other experiments are. Not in the paper.",
    )
    draw = bars({f"{n} labels": [own[way] for way in WAYS] for n, own in measured.items()}, WAYS)
    return Findings([table], measured, "CIFAR-10, accuracy with chosen and with uniform labels", draw)


def measure(directory: Path, **config: Any) -> Result:
    """A run, and the accuracy with the labels of each way, draw by draw."""
    result = run_job(directory, **config)
    one = RunOptions(**config)
    train, test = labelled(open_run_stream(one))
    model = RunDirectory(directory / "run").load_model()
    tested = extract(model, test)
    n_labels = [max(1, round(share * len(train))) for share in SHARES]
    found: dict[str, list[dict[str, float]]] = {str(n): [] for n in n_labels}
    for number in range(N_DRAWS):
        seed = N_DRAWS * one.seed + number
        generator = torch.Generator().manual_seed(seed)
        # Without repeats, as a reservoir of a stream that shows each image equally often.
        reservoir = torch.randperm(len(train), generator=generator)[: RESERVOIR * n_labels[-1]]
        features, labels, *_ = extract(model, train, reservoir)
        orders = {
            "chosen": asking_order(features, n_labels[-1], seed),
            "uniform": torch.randperm(len(features), generator=generator)[: n_labels[-1]],
        }
        for n in n_labels:
            accuracies = {}
            for way, order in orders.items():
                head = train_head(features[order[:n]], labels[order[:n]], len(train.classes), seed=one.seed)
                accuracies[way] = head_accuracy(head, tested).top1
            found[str(n)].append(accuracies)
    return result | {"asked": found}
