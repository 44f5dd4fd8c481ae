"""Buffer sizes 8 to 256, with the learning rate scaled as in the paper (Sec. IV-E)."""

from statistics import mean

from streamclr.experiments.findings import (
    POLICIES,
    Findings,
    accuracies,
    lines,
    policies_of,
    policies_table,
    scale_note,
)
from streamclr.sweeps.lab import SCALES, Lab

PAPER = {8: (69.38, 66.71, 65.91), 32: (73.26, 70.65, 70.80), 128: (73.97, 71.28, 70.65), 256: (76.06, 72.75, 70.53)}
RATES = {8: 0.1, 32: 0.3, 128: 0.5, 256: 1.0}  # of the rate at 256; the paper's {1, 3, 5, 10} x 1e-5


def experiment(lab: Lab) -> Findings:
    n_images = {size: lab.pick(paper=5_000_000, cpu=500_000 if size == 256 else 100_000) for size in PAPER}
    jobs, policies = {}, policies_of(lab, POLICIES)
    for size, n in n_images.items():
        lr = (SCALES[lab.scale].lr or 1e-4) * RATES[size]
        for policy in policies:
            jobs[f"{size} {policy}"] = lab.runs(policy=policy, buffer=size, lr=lr, images=n)
    measured = accuracies(lab.do(jobs))
    settings = {}
    for size, paper in PAPER.items():
        ours = [measured[f"{size} {policy}"]["accuracy"] for policy in policies]
        settings[str(size)] = ours, paper, [f"{lab.images or n_images[size]:,}"] * len(policies)
    series = []
    for i, (policy, label) in enumerate(policies.items()):
        for n in sorted(set(n_images.values())):  # a line connects the sizes with equally many images
            name = label if n == max(n_images.values()) else ""
            own = [(size, mean(measured[f"{size} {policy}"]["accuracy"])) for size in PAPER if n_images[size] == n]
            series.append((name, own, f"C{i}o-"))
    table = policies_table(
        "Buffer sizes on CIFAR-10", policies.values(), "buffer", "images", settings, scale_note(lab).strip()
    )
    draw = lines(series, "images in the buffer", log=2, fontsize=8)
    return Findings([table], measured, "Accuracy with all labels, %", draw)
