"""Not in the paper: accuracy of every policy against the strength of temporal correlation."""

from statistics import mean
from typing import TYPE_CHECKING

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.experiments.findings import NAMES, Findings, accuracy
from streamclr.sweeps.lab import Lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STC = (1, 10, 100, 500, 2500)


def stc(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=50_000)
    jobs = {f"{policy} {n}": lab.runs(policy=policy, stc=n, images=images, probes=0) for policy in NAMES for n in STC}
    results = lab.do(jobs)
    measured = {row: {"accuracy": accuracy(own)} for row, own in results.items()}
    rows = [[name, *(spread(measured[f"{policy} {n}"]["accuracy"]) for n in STC)] for policy, name in NAMES.items()]
    title = f"Accuracy on CIFAR-10 with all labels after {lab.images or images:,} images, %"
    table = Table(
        title, ["", *(f"STC {n}" for n in STC)], rows, "STC: consecutive images of one class. Not in the paper."
    )

    def draw(axes: "Axes") -> None:
        for policy, name in NAMES.items():
            axes.plot(STC, [mean(measured[f"{policy} {n}"]["accuracy"]) for n in STC], marker="o", label=name)
        axes.set_xscale("log")
        axes.set_xlabel("STC, consecutive images of one class")
        axes.legend(fontsize=7)

    return Findings([table], measured, "Accuracy with all labels, %", draw)
