"""Not in the paper: accuracy of every policy against the strength of temporal correlation."""

from streamclr.experiments.findings import Findings, accuracies, policies_by, policies_of
from streamclr.sweeps.lab import Lab

STC = (1, 10, 100, 500, 2500)


def experiment(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=50_000)
    names = policies_of(lab)
    jobs = {f"{policy} {n}": lab.runs(policy=policy, stc=n, images=images, probes=0) for policy in names for n in STC}
    title = f"Accuracy on CIFAR-10 with all labels after {lab.images or images:,} images, %"
    note = "STC: consecutive images of one class. Not in the paper."
    columns = {n: f"STC {n}" for n in STC}
    measured = accuracies(lab.do(jobs))
    return policies_by(columns, measured, title, note, "STC, consecutive images of one class", log=10, names=names)
