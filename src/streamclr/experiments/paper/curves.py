"""Learning curves, and how many images each policy needs to reach Random's best accuracy (Sec. IV-C)."""

from typing import TYPE_CHECKING, Any

from streamclr.base.errors import UserError
from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.experiments.findings import NAMES, Findings, accuracy, against, images_to_reach, mean_curve
from streamclr.sweeps.lab import Lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POLICIES = ("contrast", "random", "fifo")
PAPER = {
    "CIFAR-10": (82.13, 79.63, 74.51),
    "CIFAR-100": (50.22, 45.40, 42.68),
    "SVHN": (89.71, 86.66, 85.96),
    "ImageNet-20": (70.64, 70.64 - 5.76, 70.64 - 8.19),
    "ImageNet-50": (60.99, 60.99 - 3.94, 60.99 - 6.39),
    "ImageNet-100": (55.05, 55.05 - 3.69, 55.05 - 6.39),
}


def curves(lab: Lab) -> Findings:
    imagenet = {"stc": 100, "temperature": 0.07}
    subset = {"images": None, "lr": 4e-4, "stem": "imagenet", "size": 224} | imagenet
    settings: dict[str, dict[str, Any]] = lab.pick(
        paper={
            "CIFAR-10": {"images": None, "epochs": 500},
            "CIFAR-100": {"source": "cifar100", "images": None, "epochs": 500},
            "SVHN": {"source": "svhn", "images": None, "epochs": 500},
            "ImageNet-20": {"source": f"imagenet:{lab.data_dir or ''}?classes=20", "epochs": 300} | subset,
            "ImageNet-50": {"source": f"imagenet:{lab.data_dir or ''}?classes=50", "epochs": 300} | subset,
            "ImageNet-100": {"source": f"imagenet:{lab.data_dir or ''}?classes=100", "epochs": 100} | subset,
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
    jobs = {f"{d} {p}": lab.runs(policy=p, **own) for d, own in settings.items() for p in POLICIES}
    results = lab.do(jobs)

    rows, measured = [], {}
    for dataset in settings:
        of = {policy: results[f"{dataset} {policy}"] for policy in POLICIES}
        best = max(value for _, value in mean_curve(of["random"]))
        for i, policy in enumerate(POLICIES):
            final, curve = accuracy(of[policy]), mean_curve(of[policy])
            margins = [a - b for a, b in zip(accuracy(of["contrast"]), final, strict=True)]
            paper = PAPER[dataset]
            needed = images_to_reach(curve, best)
            measured[f"{dataset}, {policy}"] = {"accuracy": final, "curve": curve, "images_to_randoms_best": needed}
            rows.append(
                [
                    f"{dataset}, {NAMES[policy]}",
                    *against(final, paper[i]),
                    *(["–", "–"] if policy == "contrast" else [spread(margins), f"{paper[0] - paper[i]:.2f}"]),
                    "never" if needed is None else f"{needed:,.0f}",
                ]
            )
    head = [
        "",
        "accuracy, all labels, %",
        "paper",
        "difference",
        "contrast less this",
        "paper",
        "images to Random's best",
    ]
    note = (
        "Images to Random's best: when the mean kNN curve reaches the highest point of Random's. In the paper contrast "
        "scoring reaches 76.1 % on CIFAR-10 after 3.74 M images, Random after 9.98 M, 2.67 times as many."
    )
    if lab.scale == "cpu" and "ImageNet-20" in settings:
        note += " ImageNet-20 is Tiny ImageNet-20 here: other classes, 64 px, 500 images of each class."
    if lab.left_out:
        note += f" Left out, because the files were not found: {', '.join(lab.left_out)}."

    def draw(axes: "Axes") -> None:
        for i, dataset in enumerate(settings):
            for j, policy in enumerate(POLICIES):
                curve = mean_curve(results[f"{dataset} {policy}"])
                label = f"{dataset}, {NAMES[policy]}"
                axes.plot(
                    *zip(*curve, strict=True), label=label, color=f"C{j}", ls=("-", "--", ":", "-.", "-", "--")[i]
                )
        axes.set_xlabel("images seen")
        axes.legend(fontsize=6)

    return Findings([Table("Learning curves", head, rows, note)], measured, "kNN accuracy on the test set, %", draw)
