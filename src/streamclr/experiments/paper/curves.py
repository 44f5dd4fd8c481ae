"""Learning curves, and how many images each policy needs to reach Random's best accuracy (Sec. IV-C)."""

from typing import Any

from streamclr.base.errors import UserError
from streamclr.experiments.findings import (
    POLICIES,
    Findings,
    accuracy,
    curve,
    first_reached,
    lines,
    mean_curve,
    policies_of,
    policies_table,
    reached,
    scale_note,
)
from streamclr.sweeps.lab import Lab

PAPER = {
    "CIFAR-10": (82.13, 79.63, 74.51),
    "CIFAR-100": (50.22, 45.40, 42.68),
    "SVHN": (89.71, 86.66, 85.96),
    "ImageNet-20": (70.64, 70.64 - 5.76, 70.64 - 8.19),
    "ImageNet-50": (60.99, 60.99 - 3.94, 60.99 - 6.39),
    "ImageNet-100": (55.05, 55.05 - 3.69, 55.05 - 6.39),
}


def experiment(lab: Lab) -> Findings:
    imagenet = {"stc": 100, "temperature": 0.07}
    subset = {"images": None, "lr": 4e-4, "stem": "imagenet", "size": 224} | imagenet
    settings: dict[str, dict[str, Any]] = lab.pick(
        paper={
            "CIFAR-10": {"images": None, "epochs": 500},
            "CIFAR-100": {"source": "cifar100", "images": None, "epochs": 500},
            "SVHN": {"source": "svhn", "images": None, "epochs": 500},
            "ImageNet-20": {"n_imagenet": 20, "epochs": 300} | subset,
            "ImageNet-50": {"n_imagenet": 50, "epochs": 300} | subset,
            "ImageNet-100": {"n_imagenet": 100, "epochs": 100} | subset,
        },
        cpu={
            "CIFAR-10": {},
            "CIFAR-100": {"source": "cifar100"},
            "SVHN": {"source": "svhn"},
            # 64 px and this stem give the first stage maps of 16 x 16, as 32 px and the half stem do
            "ImageNet-20": {"source": "tiny-imagenet-20", "stem": "imagenet", **imagenet},
        },
    )
    settings = {dataset: own for dataset, own in settings.items() if lab.at_hand(dataset, **own)}
    if not settings:
        raise UserError("no dataset was found: run 'streamclr data get cifar10' first, or give --data DIR")
    names = policies_of(lab, POLICIES)
    results = lab.do({f"{d} {p}": lab.runs(policy=p, **own) for d, own in settings.items() for p in names})

    of_table, measured, series = {}, {}, []
    for dataset, style in zip(settings, ("-", "--", ":", "-.", "-", "--"), strict=False):
        bests = [max(value for _, value in curve(result)) for result in results[f"{dataset} random"]]
        final, cells = [], []
        for i, (policy, name) in enumerate(names.items()):
            own = results[f"{dataset} {policy}"]
            final.append(accuracy(own))
            needed = [first_reached(curve(result), best) for result, best in zip(own, bests, strict=True)]
            cells.append(reached(needed))
            middle = mean_curve(own)
            measured[f"{dataset}, {policy}"] = {"accuracy": final[i], "curve": middle, "images_to_randoms_best": needed}
            series.append((f"{dataset}, {name}", middle, f"C{i}{style}"))
        of_table[dataset] = final, PAPER[dataset], cells
    note = (
        "Images to Random's best: when the kNN curve of a seed reaches the highest point of Random's with that "
        "seed; if not all do, how many. In the paper contrast scoring reaches 76.1 % on CIFAR-10 after 3.74 M images, "
        "Random after 9.98 M, 2.67 times as many." + scale_note(lab)
    )
    if lab.scale == "cpu" and "ImageNet-20" in settings:
        note += " ImageNet-20 is Tiny ImageNet-20 here: other classes, 64 px, 500 images of each class."
    if lab.left_out:
        note += f" Left out, because the files were not found: {', '.join(lab.left_out)}."
    table = policies_table("Learning curves", names.values(), "", "images to Random's best", of_table, note)
    return Findings([table], measured, "kNN accuracy on the test set, %", lines(series, "images seen", fontsize=6))
