"""Not in the paper: how much of the gap between FIFO on the stream and on an iid one each policy recovers."""

import numpy as np

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.experiments.findings import Findings, accuracy, lines, mean_curve, policies_of, shares_of_gap
from streamclr.sweeps.job import Result
from streamclr.sweeps.lab import Lab


def experiment(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=500_000)
    names = policies_of(lab)
    jobs = {policy: lab.runs(policy=policy, images=images) for policy in names}
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

    def cells(row: str, key: str) -> list[str]:
        own, fifo, iid = (measured[name][key] for name in (row, "fifo", "iid"))
        return [spread(own), spread(shares_of_gap(own, fifo, iid), 0)]

    rows = []
    for row, values in measured.items():
        time = spread(values["relative_time"], 2)
        rows.append([names.get(row, "iid stream"), *cells(row, "accuracy"), time, *cells(row, "knn_at_equal_seconds")])
    head = ["", "accuracy, all labels, %", "gap recovered, equal images, %", "relative batch time"]
    head += ["kNN at equal seconds, %", "gap recovered, equal seconds, %"]
    note = (
        "The gap is the difference between FIFO on the stream with STC 500 and FIFO on an iid stream, seed by seed. "
        "Equal seconds: a policy whose batch takes r times as long as one without scoring sees 1/r of the images. "
        "Not in the paper."
    )
    table = Table("From FIFO to iid, CIFAR-10", head, rows, note)
    series = [(names.get(row, "iid stream"), mean_curve(own), "-") for row, own in results.items()]
    return Findings([table], measured, "kNN accuracy, %", lines(series, "images seen"))


def at_equal_seconds(result: Result) -> float:
    """The accuracy at the time when a run without scoring would have ended, interpolated on the curve."""
    seen, knn = ([point[key] for point in result["curve"]] for key in ("seen", "knn"))
    return float(np.interp(seen[-1] / result["relative_time"], seen, knn))
