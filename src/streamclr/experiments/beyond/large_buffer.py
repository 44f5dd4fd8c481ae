"""Not in the paper: accuracy of every policy when the buffer is larger than one mini-batch."""

from statistics import mean
from typing import TYPE_CHECKING

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.experiments.findings import NAMES, Findings, accuracy
from streamclr.sweeps.lab import Lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = (256, 512, 1024, 2048, 4096, 8192)
BATCH = 256


def large_buffer(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=50_000)
    largest = {  # these compute on the whole pool in every step
        "selective-bp": lab.pick(paper=8192, cpu=2048),
        "k-center": lab.pick(paper=8192, cpu=2048),
    }
    jobs = {}
    for policy in NAMES:
        for size in SIZES:
            if size <= largest.get(policy, size):
                rescore_every = 50 if policy == "contrast" else None
                settings = {"batch": BATCH, "segment": BATCH, "rescore_every": rescore_every}
                jobs[f"{policy} {size}"] = lab.runs(policy=policy, buffer=size, images=images, probes=0, **settings)
    results = lab.do(jobs)
    measured = {row: {"accuracy": accuracy(own)} for row, own in results.items()}
    rows = [
        [name, *(spread(measured.get(f"{policy} {size}", {}).get("accuracy", [])) for size in SIZES)]
        for policy, name in NAMES.items()
    ]
    n_bytes = [size * 3 * 32 * 32 for size in SIZES]
    head = ["", *(f"{size:,} ({n / 2**20:g} MiB)" for size, n in zip(SIZES, n_bytes, strict=True))]
    title = f"Accuracy on CIFAR-10 with all labels after {lab.images or images:,} images, %, by images in the buffer"
    note = f"Batches of {BATCH} from the buffer, segments of {BATCH}; contrast scoring with T = 50. Not in the paper."
    if any(most < SIZES[-1] for most in largest.values()):
        names = " and ".join(NAMES[policy] for policy in largest)
        note += (
            f" {names} compute on the whole pool in every step: measured up to {max(largest.values()):,} images only."
        )

    def draw(axes: "Axes") -> None:
        for policy, name in NAMES.items():
            points = [(n, measured.get(f"{policy} {s}")) for n, s in zip(n_bytes, SIZES, strict=True)]
            own = [(n, mean(found["accuracy"])) for n, found in points if found]
            axes.plot(*zip(*own, strict=True), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes of buffer")
        axes.legend(fontsize=7)

    return Findings([Table(title, head, rows, note)], measured, "Accuracy with all labels, %", draw)
