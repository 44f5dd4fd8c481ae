"""Not in the paper: the share of unusable frames in the buffer with guards off and on, and what guards cost."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.base.tensors import load_tensors, save_tensors
from streamclr.experiments.findings import Findings, lines, margins
from streamclr.guards import GUARDS
from streamclr.records.options import RunOptions
from streamclr.runs.evaluation import extract, labelled, probe_accuracy
from streamclr.runs.prepare import prepare
from streamclr.streams.datasets.images import Source
from streamclr.streams.stream import DatasetStream, open_stream
from streamclr.sweeps.job import Job, Result
from streamclr.sweeps.lab import Lab

SHARES = (0.01, 0.05, 0.2)  # of the stream
SHARE_OFF = 0.05  # the share in the runs without guards and in those that measure accuracy
CLIP = "dog.mp4"
SENSOR_NOISE = 2.0  # standard deviation, in levels of 255
COLUMNS = ("unusable", "accuracy", "kept_out", "time")  # of a result


def experiment(lab: Lab) -> Findings:
    n_share = lab.images or lab.pick(paper=500_000, cpu=20_480)  # for the share in the buffer, one seed
    n_accuracy = lab.images or lab.pick(paper=5_000_000, cpu=51_200)  # for the accuracy, all seeds
    clip, n_clip = decoded(lab), n_share // 3
    kinds = ("mixture", *KINDS)

    def jobs(images: int, kind: str = "", share: float = 0.0, guards: str = "off", clip: str = "") -> list[Job]:
        own: Result = {"kind": kind, "share": share, "clip": clip, "probe": images == n_accuracy, "images": images}
        runs = lab.runs(probes=0, guards=guards, images=max(images, n_share))
        needs = (f"{clip}.safetensors",) if clip else ()
        return [replace(job.doing("unusable", measure, **own), needs=needs) for job in runs]

    streams = {f"clean, {guards}": jobs(n_accuracy, guards=guards) for guards in ("off", "on", "quarantine")}
    for guards in ("off", "on"):
        streams[f"mixture, {SHARE_OFF:.0%}, {guards}"] = jobs(n_accuracy, "mixture", SHARE_OFF, guards)
    rows = {f"accuracy: {stream}": own for stream, own in streams.items()}
    guarded = [(kind, share, "on") for share in SHARES for kind in kinds]
    for kind, share, guards in [*((kind, SHARE_OFF, "off") for kind in kinds), *guarded]:
        rows[f"{kind}, {share:.0%}, {guards}"] = jobs(n_share, kind, share, guards)[:1]
    for kind, share, guards in [("mixture", SHARE_OFF, "off"), *guarded] if clip else []:
        rows[f"{clip}, {kind}, {share:.0%}, {guards}"] = jobs(n_clip, kind, share, guards, clip)[:1]
    results = lab.do(rows)
    measured = {row: {name: [result[name] for result in own] for name in COLUMNS} for row, own in results.items()}
    in_buffer = {row: 100 * own["unusable"][0] for row, own in measured.items()}

    def shares_table(stream: str, note: str, where: str = "") -> Table:
        columns, rows = [f"{SHARE_OFF:.0%}, off", *(f"{share:.0%}, on" for share in SHARES)], []
        for kind in kinds:
            shares = (in_buffer.get(f"{where}{kind}, {column}") for column in columns)
            rows.append([kind, *("–" if share is None else f"{share:.1f}" for share in shares)])
        title = f"Unusable frames in the buffer, %, by their share of the stream, {stream}"
        return Table(title, ["kind", *columns], rows, note)

    clean, accuracies, costs = measured["accuracy: clean, off"]["accuracy"], [], []
    for stream in streams:
        own = measured[f"accuracy: {stream}"]
        kept_out = [100 * sum(kept.values()) / n_accuracy for kept in own["kept_out"]]
        time = [100 * sum(times.values()) for times in own["time"]]
        values = (own["accuracy"], margins(own["accuracy"], clean), kept_out, time)
        accuracies.append([stream, *map(spread, values)])
    own = measured["accuracy: clean, on"]
    for guard in GUARDS:
        kept_out = [100 * kept.get(guard, 0) / n_accuracy for kept in own["kept_out"]]
        costs.append([guard, spread(kept_out, 2), spread([100 * times[guard] for times in own["time"]])])
    head = ["stream, guards", "accuracy, %", "against clean, off", "images kept out, %", "time of guards, % of a step"]
    tables = [
        shares_table(
            "guards off and on, CIFAR-10",
            f"{n_share:,} images, one seed, mean over the second half of the run. Not in the paper.",
        ),
        Table(
            f"Accuracy with {SHARE_OFF:.0%} of a mixture of unusable frames, CIFAR-10",
            head,
            accuracies,
            f"{n_accuracy:,} images; linear probe on all labels; seeds are paired with the clean run, guards off.",
        ),
        Table(
            "Cost of each guard on clean data, CIFAR-10",
            ["guard", "images kept out, %", "time, % of a step"],
            costs,
            f"{n_accuracy:,} images, all guards on; a guard that keeps nothing out does not change the run.",
        ),
    ]
    if clip:
        note = f"{n_clip:,} images, one seed; guards off was measured for the mixture only."
        tables.append(shares_table(f"{clip} repeated with sensor noise", note, f"{clip}, "))
    series = []
    for i, kind in enumerate(kinds):
        series.append((kind, [(100 * share, in_buffer[f"{kind}, {share:.0%}, on"]) for share in SHARES], f"C{i}.-"))
        series.append(("", [(100 * SHARE_OFF, in_buffer[f"{kind}, {SHARE_OFF:.0%}, off"])], f"C{i}x"))
    series.append(("twice the share", [(100 * share, 200 * share) for share in SHARES], "k:"))
    draw = lines(series, "unusable frames in the stream, %", log=10, fontsize=6)
    return Findings(tables, measured, "Unusable frames in the buffer, %, guards on; crosses: off", draw)


def measure(directory: Path, kind: str, share: float, clip: str, probe: bool, **config: Any) -> Result:
    """Learn from a stream of which a share of the frames is unusable."""
    torch.set_num_threads(1)  # a second thread gains nothing on layers this small
    plan, stream, learner = prepare(RunOptions(**config))
    assert isinstance(stream, DatasetStream)
    source = stream.source
    if clip:
        source = Clip(load_tensors(directory.parent / f"{clip}.safetensors")["images"])
    spoiled = SpoiledSource(source, kind, share, config["images"], plan.seed)
    shares, steps = [], []
    for images in DatasetStream(spoiled).segments(plan.segment, until=plan.images):
        steps.append(learner.learn_many(images))
        shares.append(float(spoiled.unusable[learner.buffer.arrivals.cpu()].float().mean()))
    accuracy = float("nan")
    if probe:
        known, tested = (extract(learner.model, images) for images in labelled(source))
        accuracy = 100 * probe_accuracy(known, tested, len(source.classes))
    seconds, spent = getattr(learner.policy, "seconds", {}), sum(s.seconds_scoring + s.seconds_training for s in steps)
    return {
        "unusable": mean(shares[len(shares) // 2 :]),
        "curve": shares,
        "accuracy": accuracy,
        "kept_out": dict(getattr(learner.policy, "kept_out", {})),
        "time": {guard: t / (spent - sum(seconds.values())) for guard, t in seconds.items()},
    }


# ----------------------------------------------------------------------------------------------------------------------
# Unusable frames


class SpoiledSource(Source):
    """A source in which a share of the frames is replaced by unusable ones.

    kind: one of KINDS, or `mixture`; empty: none.
    n_images: how long the stream is.
    """

    def __init__(self, source: Source, kind: str, share: float, n_images: int, seed: int):
        self.source, self.seed, self.n_images = source, seed, n_images
        generator = torch.Generator().manual_seed(seed)
        self.unusable = torch.rand(n_images, generator=generator) < share
        names = list(KINDS) if kind == "mixture" else [kind]
        self._kinds = [names[i] for i in torch.randint(len(names), (n_images,), generator=generator).tolist()]

    def images(self, numbers: np.ndarray) -> np.ndarray:
        images = torch.from_numpy(self.source.images(numbers))
        for row in self.unusable[numbers].nonzero()[:, 0].tolist():
            number = int(numbers[row])
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
            # A frozen frame repeats the image whose number is the multiple of 1000 before it.
            seen = torch.from_numpy(self.source.images(np.array([number // 1000 * 1000])))[0]
            kind = self._kinds[number]
            images[row] = KINDS[kind](seen if kind == "frozen" else images[row], generator)
        return images.numpy()

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        return self.source.labels(numbers)


def _between(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def uniform(image: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(256, image.shape, generator=generator)


def gaussian(image: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian noise around one colour."""
    return 255 * torch.rand(3, 1, 1, generator=generator) + 50 * torch.randn(image.shape, generator=generator)


def salt(image: Tensor, generator: torch.Generator) -> Tensor:
    """Salt and pepper noise on 30 % of the pixels."""
    u = torch.rand(image.shape[1:], generator=generator)
    return image.float().masked_fill(u < 0.15, 0).masked_fill(u > 0.85, 255)


def smear(image: Tensor, generator: torch.Generator) -> Tensor:
    """One column repeated across the image, or a row of the upper half repeated to the bottom."""
    if _between(0, 1, generator) < 0.5:
        return image[:, :, int(_between(0, image.shape[2], generator))][:, :, None].expand_as(image)
    row = int(_between(0, image.shape[1] / 2, generator))
    return torch.cat([image[:, :row], image[:, row : row + 1].expand_as(image[:, row:])], 1)


def dark(image: Tensor, generator: torch.Generator) -> Tensor:
    """Black, or nearly black with sensor noise."""
    level = max(0.0, _between(-6, 12, generator))
    return level + min(level, _between(0, 6, generator)) * torch.randn(image.shape, generator=generator)


def frozen(image: Tensor, generator: torch.Generator) -> Tensor:
    return image


def text(image: Tensor, generator: torch.Generator) -> Tensor:
    """Two lines of letters and digits over the image."""
    from PIL import Image, ImageDraw, ImageFont

    side = image.shape[1]
    mask = Image.new("L", (image.shape[2], side))
    drawing, font = ImageDraw.Draw(mask), ImageFont.load_default(size=max(8, side // 3))
    for line in range(2):
        letters = "".join(chr(c) for c in torch.randint(48, 91, (4,), generator=generator).tolist())
        place = (_between(0, side / 6, generator), line * side / 2 + _between(0, side / 6, generator))
        drawing.text(place, letters, fill=255, font=font)
    opacity = torch.from_numpy(np.array(mask)) / 255
    return image * (1 - opacity) + 255 * torch.rand(3, 1, 1, generator=generator) * opacity


def blotches(image: Tensor, generator: torch.Generator) -> Tensor:
    """Smooth coloured noise, which no guard can tell by its pixels."""
    coarse = torch.rand(1, 3, max(1, image.shape[1] // 4), max(1, image.shape[2] // 4), generator=generator)
    return 255 * F.interpolate(coarse, image.shape[1:], mode="bilinear")[0]


def _as_pixels(spoil: Callable[[Tensor, torch.Generator], Tensor]) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda image, generator: spoil(image, generator).clamp(0, 255).byte()


KINDS = {spoil.__name__: _as_pixels(spoil) for spoil in (text, blotches, smear, frozen, salt, gaussian, uniform, dark)}


class Clip(Source):
    """The frames of a video, repeated with new sensor noise each time, because no camera sends a frame twice."""

    def __init__(self, frames: Tensor):
        self.frames = frames

    def images(self, numbers: np.ndarray) -> np.ndarray:
        frames = self.frames[numbers % len(self.frames)].float()
        for frame, number in zip(frames, numbers.tolist(), strict=True):
            frame += SENSOR_NOISE * torch.randn(frame.shape, generator=torch.Generator().manual_seed(number))
        return frames.round_().clamp_(0, 255).byte().numpy()

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        raise UserError("a video has no labels: use a dataset where labels are needed")


def decoded(lab: Lab) -> str:
    """Decode the clip to 32 px beside the runs, if --data has it. Returns its name, or an empty string."""
    file = lab.out / "runs" / f"{CLIP}.safetensors"
    if not file.exists():
        if lab.data_dir is None or not (lab.data_dir / CLIP).exists():
            return ""
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(file, {"images": torch.cat(list(open_stream(lab.data_dir / CLIP, size=32).segments(256)))})
    return CLIP
