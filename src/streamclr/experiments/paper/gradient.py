"""Whether a high contrast score means a large gradient: score against gradient norm of each image (Sec. III-C)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamclr.base.statistics import evenly_spaced, spread
from streamclr.base.table import Table
from streamclr.encoders.inference import infer, infer_views
from streamclr.encoders.projection import ContrastiveModel
from streamclr.experiments.findings import Findings, lines
from streamclr.records.options import RunOptions
from streamclr.runs.evaluation import labelled
from streamclr.runs.prepare import prepare
from streamclr.score import contrast_score, rank_correlation
from streamclr.sweeps.job import Result
from streamclr.sweeps.lab import Lab
from streamclr.views import StrongViews, flip

MARKS = (0.0, 0.01, 0.1, 0.5, 1.0)  # of the images
N_BATCHES, N_DRAWS = 8, 4  # mini-batches measured, and strong views of each
PAIRS = {"flip": "x and its flip", "strong": "strong views"}
COLUMNS = {  # name, digits
    "correlation": ("rank correlation", 2),
    "gradient_low": ("gradient, lowest tenth of scores", 2),
    "gradient_high": ("gradient, highest tenth", 2),
    "match_low": ("p+, lowest tenth", 4),
    "match_high": ("p+, highest tenth", 4),
}


def experiment(lab: Lab) -> Findings:
    images = lab.pick(paper=5_000_000, cpu=100_000)
    runs = [job.doing("gradient", measure) for job in lab.runs(images=images, probes=0)]
    results = lab.do({"contrast": runs})["contrast"]
    measured: dict[str, Any] = {}
    rows: dict[str, list[list[str]]] = {pair: [] for pair in PAIRS}
    for mark in range(len(MARKS)):
        points = [result["marks"][mark] for result in results]
        seen = f"{points[0]['seen']:,}"
        measured[seen] = {key: [point[key] for point in points] for key in points[0] if key != "scatter"}
        for pair, own in rows.items():
            cells = (spread(measured[seen][f"{pair}_{key}"], digits) for key, (_, digits) in COLUMNS.items())
            own.append([seen, *cells])
    head = ["images seen", *(name for name, _ in COLUMNS.values())]
    note = (
        "The gradient with respect to z, Eq. 4. By case 1 of the paper the lowest tenth of the scores has p+ near 1 "
        "and a gradient near 0; by case 2 the highest tenth has p+ near 0 and a large gradient."
    )
    tables = [
        Table(f"Contrast score and gradient of {name}, CIFAR-10", head, rows[pair], note if pair == "strong" else "")
        for pair, name in PAIRS.items()
    ]
    last = results[0]["marks"][-1]
    scatter = last["scatter"]
    series = [(name, list(zip(scatter["score"], scatter[pair], strict=True)), ".") for pair, name in PAIRS.items()]
    draw = lines(series, "contrast score", fontsize=8, markersize=2)
    return Findings(tables, measured, f"Norm of the gradient of each image after {last['seen']:,} images, seed 0", draw)


def measure(directory: Path, **config: Any) -> Result:
    """Learn as in a run; at each mark measure scores and gradients of mini-batches of test images."""
    plan, stream, learner = prepare(RunOptions(**config))
    _, test = labelled(stream)
    tested = torch.from_numpy(test.images(evenly_spaced(len(test), N_BATCHES * plan.segment)))
    marks = []
    for share in MARKS:
        until = round(share * config["images"])
        for images in stream.segments(plan.segment, until=until):
            learner.learn_many(images)
        generator = torch.Generator().manual_seed(plan.seed)
        found = measure_scores(learner.model, tested, plan.segment, plan.temperature, generator)
        marks.append({"seen": until, **found})
        print(f"after {until} images: {found['strong_correlation']:.3f}", flush=True)
    return {"marks": marks}


def measure_scores(
    model: ContrastiveModel, images: Tensor, n: int, temperature: float, generator: torch.Generator
) -> Result:
    """Scores, gradients and matching probabilities of images, in mini-batches of `n`."""
    score = contrast_score(model, images)
    views, parts = StrongViews(), []
    for batch in images.split(n):
        flipped = eq4(infer(model, batch), infer(model, flip(batch)), temperature)
        drawn = []
        for _ in range(N_DRAWS):
            z0, z1 = (infer_views(model, views(batch, generator)) for _ in range(2))
            drawn.append(eq4(z0, z1, temperature))
        strong = (torch.stack(values).mean(0) for values in zip(*drawn, strict=True))
        parts.append(torch.stack([*flipped, *strong]))
    norms = dict(zip(("flip", "flip_match", "strong", "strong_match"), torch.cat(parts, 1), strict=True))
    order, tenth = score.argsort(), len(score) // 10
    found: Result = {}
    for pair in PAIRS:
        found[f"{pair}_correlation"] = rank_correlation(score, norms[pair])
        for name, value in (("gradient", norms[pair]), ("match", norms[f"{pair}_match"])):
            found[f"{pair}_{name}_low"] = float(value[order[:tenth]].mean())
            found[f"{pair}_{name}_high"] = float(value[order[-tenth:]].mean())
    some = slice(None, None, -(-len(score) // 512))  # enough for a scatter
    rounded = {name: [round(v, 4) for v in x[some].tolist()] for name, x in ({"score": score} | norms).items()}
    return found | {"scatter": {name: rounded[name] for name in ("score", "flip", "strong")}}


def eq4(z0: Tensor, z1: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The norm of the gradient of l(i, i+) with respect to z_i (Eq. 4, corrected), and p+ (Eq. 5); mean of both."""
    z = torch.cat([z0, z1])
    n = len(z0)
    similarity = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    p = similarity.softmax(1)
    partner = torch.cat([z1, z0])
    gradients = (p @ z - partner) / temperature
    match = p[torch.arange(2 * n), (torch.arange(2 * n) + n) % (2 * n)]
    return gradients.norm(dim=1).view(2, n).mean(0), match.view(2, n).mean(0)
