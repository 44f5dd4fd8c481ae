"""Not in the paper: accuracy of every policy when the buffer is larger than one mini-batch."""

from streamclr.experiments.findings import NAMES, Findings, accuracies, policies_by, policies_of
from streamclr.sweeps.lab import Lab

SIZES = (256, 512, 1024, 2048, 4096, 8192)
BATCH = 256
IMAGE_BYTES = 3 * 32 * 32
ON_THE_POOL = ("selective-bp", "k-center")  # these compute on the whole pool in every step


def experiment(lab: Lab) -> Findings:
    images, largest = lab.pick(paper=(5_000_000, 8192), cpu=(50_000, 2048))
    jobs, policies = {}, policies_of(lab)
    for policy in policies:
        settings = {"batch": BATCH, "segment": BATCH, "rescore_every": 50 if policy == "contrast" else None}
        for size in SIZES:
            if size <= largest or policy not in ON_THE_POOL:
                jobs[f"{policy} {size}"] = lab.runs(policy=policy, buffer=size, images=images, probes=0, **settings)
    measured = accuracies(lab.do(jobs))
    title = f"Accuracy on CIFAR-10 with all labels after {lab.images or images:,} images, %, by images in the buffer"
    note = f"Batches of {BATCH} from the buffer, segments of {BATCH}; contrast scoring with T = 50. Not in the paper."
    if largest < SIZES[-1]:
        names = " and ".join(NAMES[policy] for policy in ON_THE_POOL)
        note += f" {names} compute on the whole pool in every step: measured up to {largest:,} images only."
    columns = {size: f"{size:,} ({size * IMAGE_BYTES / 2**20:g} MiB)" for size in SIZES}
    return policies_by(columns, measured, title, note, "bytes of buffer", 2, IMAGE_BYTES, policies)
