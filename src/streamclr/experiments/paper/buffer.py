"""Buffer sizes 8 to 256, with the learning rate scaled as in the paper (Sec. IV-E)."""

from statistics import mean
from typing import TYPE_CHECKING

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.experiments.findings import NAMES, Findings, accuracy, against
from streamclr.sweeps.lab import SCALES, Lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POLICIES = ("contrast", "random", "fifo")
PAPER = {8: (69.38, 66.71, 65.91), 32: (73.26, 70.65, 70.80), 128: (73.97, 71.28, 70.65), 256: (76.06, 72.75, 70.53)}
RATES = {8: 0.1, 32: 0.3, 128: 0.5, 256: 1.0}  # of the rate at 256; the paper's {1, 3, 5, 10} x 1e-5


def buffer(lab: Lab) -> Findings:
    n_images = {size: lab.pick(paper=5_000_000, cpu=500_000 if size == 256 else 100_000) for size in PAPER}
    rate = SCALES[lab.scale].lr
    results = lab.do(
        {
            f"{size} {policy}": lab.runs(policy=policy, buffer=size, lr=rate * RATES[size], images=n_images[size])
            for size in PAPER
            for policy in POLICIES
        }
    )
    measured = {row: {"accuracy": accuracy(own)} for row, own in results.items()}
    rows = []
    for size, paper in PAPER.items():
        contrast = measured[f"{size} contrast"]["accuracy"]
        for i, policy in enumerate(POLICIES):
            ours = measured[f"{size} {policy}"]["accuracy"]
            margins = [a - b for a, b in zip(contrast, ours, strict=True)]
            rows.append(
                [
                    f"{size}, {NAMES[policy]}",
                    *against(ours, paper[i]),
                    *(["–", "–"] if i == 0 else [spread(margins), f"{paper[0] - paper[i]:.2f}"]),
                    f"{lab.images or n_images[size]:,}",
                ]
            )
    head = ["buffer", "accuracy, all labels, %", "paper", "difference", "contrast less this", "paper", "images"]

    def draw(axes: "Axes") -> None:
        for i, policy in enumerate(POLICIES):
            for n in sorted(set(n_images.values())):  # a line connects the sizes with equally many images
                own = [size for size in PAPER if n_images[size] == n]
                means = [mean(measured[f"{size} {policy}"]["accuracy"]) for size in own]
                axes.plot(own, means, f"C{i}o-", label=NAMES[policy] if n == max(n_images.values()) else None)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("images in the buffer")
        axes.legend(fontsize=8)

    return Findings([Table("Buffer sizes on CIFAR-10", head, rows)], measured, "Accuracy with all labels, %", draw)
