"""Not in the paper: how much of the gap between FIFO on the stream and on an iid one each policy recovers."""

from statistics import mean
from typing import TYPE_CHECKING

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.experiments.findings import NAMES, Findings, accuracy, mean_curve
from streamclr.sweeps.job import Result
from streamclr.sweeps.lab import Lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POLICIES = ("contrast", "random", "fifo", "selective-bp", "k-center", "reservoir")


def iid(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=500_000)
    jobs = {policy: lab.runs(policy=policy, images=images) for policy in POLICIES}
    jobs["iid"] = lab.runs(policy="fifo", stc=1, images=images)
    results = lab.do(jobs)
    measured = {
        row: {
            "accuracy": accuracy(own),
            "relative_time": [result["relative_time"] for result in own],
            "knn": [100 * result["curve"][-1]["knn"] for result in own],
            "knn_at_equal_seconds": [100 * at_equal_seconds(result) for result in own],
        }
        for row, own in results.items()
    }

    def recovered(row: str, key: str) -> str:
        floor, top = (mean(measured[end][key]) for end in ("fifo", "iid"))
        return "–" if top - floor < 1 else f"{100 * (mean(measured[row][key]) - floor) / (top - floor):.0f} %"

    rows = [
        [
            NAMES.get(row, "iid stream"),
            spread(values["accuracy"]),
            recovered(row, "accuracy"),
            spread(values["relative_time"], 2),
            spread(values["knn_at_equal_seconds"]),
            recovered(row, "knn_at_equal_seconds"),
        ]
        for row, values in measured.items()
    ]
    head = ["", "accuracy, all labels, %", "gap recovered, equal images", "relative batch time"]
    head += ["kNN at equal seconds, %", "gap recovered, equal seconds"]
    note = (
        "The gap is the difference between FIFO on the stream with STC 500 and FIFO on an iid stream. Equal seconds: "
        "a policy whose batch takes r times as long as one without scoring sees 1/r of the images. Not in the paper."
    )

    def draw(axes: "Axes") -> None:
        for row, own in results.items():
            axes.plot(*zip(*mean_curve(own), strict=True), label=NAMES.get(row, "iid stream"))
        axes.set_xlabel("images seen")
        axes.legend(fontsize=7)

    return Findings([Table("From FIFO to iid, CIFAR-10", head, rows, note)], measured, "kNN accuracy, %", draw)


def at_equal_seconds(result: Result) -> float:
    """The accuracy at the time when a run without scoring would have ended, interpolated on the curve."""
    end = result["curve"][-1]["seen"] / result["relative_time"]
    before = result["curve"][0]
    for point in result["curve"]:
        if point["seen"] >= end:
            width = point["seen"] - before["seen"]
            share = (end - before["seen"]) / width if width else 0.0
            return before["knn"] + max(0.0, share) * (point["knn"] - before["knn"])
        before = point
    return before["knn"]
