"""Frames that lie: how many the buffer hoards without guards and with them, and what guards cost on clean data."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.table import Table
from streamclr.base.tensors import load_tensors, save_tensors
from streamclr.classifier import linear_probe
from streamclr.experiments.findings import Findings, spread
from streamclr.guards import GUARDS
from streamclr.records.options import RunOptions
from streamclr.runs.assemble import prepare
from streamclr.runs.evaluation import extract
from streamclr.streams.datasets.images import Images
from streamclr.streams.spec import Source
from streamclr.streams.stream import Stream, open_stream
from streamclr.sweeps.job import Job, Result
from streamclr.sweeps.lab import Lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = (0.01, 0.05, 0.2)  # of the stream
AT = 0.05  # where accuracy is looked at, and runs without guards
CLIP = "dog.mp4"
SENSOR_NOISE = 2.0  # standard deviation, of 255
COLUMNS = ("liars", "accuracy", "kept_out", "time")  # of a result


def lies(lab: Lab) -> Findings:
    n_share = lab.images or lab.pick(paper=500_000, cpu=20_480)  # for the share of liars, of one seed
    n_accuracy = lab.images or lab.pick(paper=5_000_000, cpu=51_200)  # for the accuracy, of all seeds
    clip, n_clip = decoded(lab), n_share // 3
    kinds = ("mixture", *KINDS)

    def jobs(images: int, kind: str = "", share: float = 0.0, guards: str = "off", clip: str = "") -> list[Job]:
        own: Result = {"kind": kind, "share": share, "clip": clip, "probe": images == n_accuracy, "images": images}
        runs = lab.runs(probes=0, guards=guards, images=max(images, n_share))
        needs = (f"{clip}.safetensors",) if clip else ()
        function = f"{__name__}:measure"
        return [replace(job, function=function, arguments=job.arguments | own, needs=needs) for job in runs]

    accuracies = {f"clean, {guards}": jobs(n_accuracy, guards=guards) for guards in ("off", "on", "quarantine")}
    accuracies |= {f"mixture, {AT:.0%}, {guards}": jobs(n_accuracy, "mixture", AT, guards) for guards in ("off", "on")}
    shares = {f"{kind}, {AT:.0%}, off": jobs(n_share, kind, AT)[:1] for kind in kinds}
    shares |= {f"{kind}, {x:.0%}, on": jobs(n_share, kind, x, "on")[:1] for x in SHARES for kind in kinds}
    if clip:
        grid = [("mixture", AT, "off"), *((kind, x, "on") for x in SHARES for kind in kinds)]
        shares |= {f"{clip}, {k}, {x:.0%}, {on}": jobs(n_clip, k, x, on, clip)[:1] for k, x, on in grid}
    results = lab.do({f"accuracy: {row}": own for row, own in accuracies.items()} | shares)
    measured = {row: {name: [result[name] for result in own] for name in COLUMNS} for row, own in results.items()}

    columns = [f"{AT:.0%}, off", *(f"{share:.0%}, on" for share in SHARES)]

    def cells(kind: str, where: str = "") -> list[str]:
        rows = (f"{where}{kind}, {column}" for column in columns)
        return [f"{100 * measured[row]['liars'][0]:.1f}" if row in measured else "–" for row in rows]

    clean = measured["accuracy: clean, off"]["accuracy"]

    def accuracy(row: str) -> list[str]:
        own = measured[f"accuracy: {row}"]
        out = [100 * sum(kept.values()) / n_accuracy for kept in own["kept_out"]]
        time = [100 * sum(times.values()) for times in own["time"]]
        losses = [a - b for a, b in zip(own["accuracy"], clean, strict=True)]
        return [row, spread(own["accuracy"]), spread(losses), spread(out), spread(time)]

    on = measured["accuracy: clean, on"]
    cost = [
        [
            guard,
            spread([100 * kept.get(guard, 0) / n_accuracy for kept in on["kept_out"]], 2),
            spread([100 * times[guard] for times in on["time"]]),
        ]
        for guard in GUARDS
    ]
    tables = [
        Table(
            "Liars in the buffer in %, by their share of the stream, guards off and on, CIFAR-10",
            ["liars", *columns],
            [[kind, *cells(kind)] for kind in kinds],
            f"{n_share:,} images, one seed, mean over the second half of the run. Not in the paper.",
        ),
        Table(
            f"Accuracy with {AT:.0%} of a mixture of liars, CIFAR-10",
            ["stream, guards", "accuracy, %", "against clean, off", "images kept out, %", "guards, % of a step"],
            [accuracy(row) for row in accuracies],
            f"{n_accuracy:,} images; linear probe on all labels, against the clean run of the same seed.",
        ),
        Table(
            "What each guard costs on clean data, CIFAR-10",
            ["guard", "images kept out, %", "% of a step"],
            cost,
            f"{n_accuracy:,} images, all guards on; one that hides nothing changes nothing.",
        ),
    ]
    if clip:
        tables.append(
            Table(
                f"Liars in the buffer in %, by their share of the stream, {clip} again and again with a sensor's noise",
                ["liars", *columns],
                [[kind, *cells(kind, f"{clip}, ")] for kind in kinds],
                f"{n_clip:,} images, one seed; guards off for the mixture alone.",
            )
        )

    def draw(axes: "Axes") -> None:
        for number, kind in enumerate(kinds):
            shares = [100 * mean(measured[f"{kind}, {share:.0%}, on"]["liars"]) for share in SHARES]
            axes.plot([100 * s for s in SHARES], shares, marker=".", color=f"C{number}", label=kind)
            off = 100 * mean(measured[f"{kind}, {AT:.0%}, off"]["liars"])
            axes.plot(100 * AT, off, "x", color=f"C{number}")
        axes.plot([100 * s for s in SHARES], [200 * s for s in SHARES], ":", color="black", label="twice the share")
        axes.set_xscale("log")
        axes.set_xlabel("liars in the stream, %")
        axes.legend(fontsize=6)

    return Findings(tables, measured, "Liars in the buffer, %: guards on, and off (crosses)", draw)


def measure(directory: Path, kind: str, share: float, clip: str, probe: bool, **config: Any) -> Result:
    """Learn from a stream of which a share lies."""
    torch.set_num_threads(1)  # a second one waits more than it works on layers this small
    plan, stream, learner = prepare(RunOptions(**config))
    assert isinstance(stream, Stream)
    source = stream.source
    if clip:
        source = Clip(load_tensors(directory.parent / f"{clip}.safetensors")["images"])
    lying = Lying(source, kind, share, config["images"], plan.seed)
    liars, steps = [], []
    for images in Stream(lying).segments(plan.segment, until=plan.images):
        steps.append(learner.learn_many(images))
        liars.append(float(lying.lies[learner.buffer.arrivals.cpu()].float().mean()))
    accuracy = float("nan")
    if probe:
        assert source.train is not None
        assert source.test is not None
        known, tested = (extract(learner.model, images) for images in (source.train, source.test))
        head = linear_probe(known.features, known.labels, len(source.classes))
        accuracy = 100 * float((head(tested.features).argmax(1) == tested.labels).float().mean())
    seconds, spent = getattr(learner.policy, "seconds", {}), sum(s.seconds_scoring + s.seconds_training for s in steps)
    return {
        "liars": mean(liars[len(liars) // 2 :]),
        "curve": liars,
        "accuracy": accuracy,
        "kept_out": dict(getattr(learner.policy, "kept_out", {})),
        "time": {guard: t / (spent - sum(seconds.values())) for guard, t in seconds.items()},
    }


# ----------------------------------------------------------------------------------------------------------------------
# The liars


class Lying:
    """A source of which a share of the images is not what the camera saw.

    kind: of the lie, or `mixture`; empty: none.
    n_images: of the stream that is asked for.
    """

    def __init__(self, source: Source, kind: str, share: float, n_images: int, seed: int):
        self.source, self.seed, self.n_images = source, seed, n_images
        generator = torch.Generator().manual_seed(seed)
        self.lies = torch.rand(n_images, generator=generator) < share
        names = list(KINDS) if kind == "mixture" else [kind]
        self._kinds = [names[i] for i in torch.randint(len(names), (n_images,), generator=generator).tolist()]

    epoch, classes, train, test = None, (), None, None

    def images(self, numbers: np.ndarray) -> np.ndarray:
        images = torch.from_numpy(self.source.images(numbers))
        for row in self.lies[numbers].nonzero()[:, 0].tolist():
            number = int(numbers[row])
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
            # A frozen picture is that of the last thousandth image, until the next.
            seen = torch.from_numpy(self.source.images(np.array([number // 1000 * 1000])))[0]
            images[row] = KINDS[self._kinds[number]](
                images[row] if self._kinds[number] != "frozen" else seen, generator
            )
        return images.numpy()

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        return self.source.labels(numbers)


def _between(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def uniform(image: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(256, image.shape, generator=generator)


def gaussian(image: Tensor, generator: torch.Generator) -> Tensor:
    """Noise around one colour."""
    return 255 * torch.rand(3, 1, 1, generator=generator) + 50 * torch.randn(image.shape, generator=generator)


def salt(image: Tensor, generator: torch.Generator) -> Tensor:
    """Salt and pepper on three pixels of ten."""
    u = torch.rand(image.shape[1:], generator=generator)
    return image.float().masked_fill(u < 0.15, 0).masked_fill(u > 0.85, 255)


def smear(image: Tensor, generator: torch.Generator) -> Tensor:
    """One column all across, or a row of the upper half repeated downwards."""
    if _between(0, 1, generator) < 0.5:
        return image[:, :, int(_between(0, image.shape[2], generator))][:, :, None].expand_as(image)
    row = int(_between(0, image.shape[1] / 2, generator))
    return torch.cat([image[:, :row], image[:, row : row + 1].expand_as(image[:, row:])], 1)


def dark(image: Tensor, generator: torch.Generator) -> Tensor:
    """Black, or nearly so with the sensor's noise."""
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
    """Coloured clouds: noise that is smooth, which no guard knows by its pixels."""
    coarse = torch.rand(1, 3, max(1, image.shape[1] // 4), max(1, image.shape[2] // 4), generator=generator)
    return 255 * F.interpolate(coarse, image.shape[1:], mode="bilinear")[0]


def _as_pixels(lie: Callable[[Tensor, torch.Generator], Tensor]) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda image, generator: lie(image, generator).clamp(0, 255).byte()


KINDS = {lie.__name__: _as_pixels(lie) for lie in (text, blotches, smear, frozen, salt, gaussian, uniform, dark)}


class Clip:
    """The frames of a film, again and again, each time with the noise of a sensor: no camera sends a frame twice."""

    n_images, epoch = None, None
    classes: tuple[str, ...] = ()
    train: Images | None = None
    test: Images | None = None

    def __init__(self, frames: Tensor):
        self.frames = frames

    def images(self, numbers: np.ndarray) -> np.ndarray:
        frames = self.frames[numbers % len(self.frames)].float()
        for frame, number in zip(frames, numbers.tolist(), strict=True):
            frame += SENSOR_NOISE * torch.randn(frame.shape, generator=torch.Generator().manual_seed(number))
        return frames.round_().clamp_(0, 255).byte().numpy()

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        raise UserError("a film has no labels")


def decoded(lab: Lab) -> str:
    """The clip's frames beside the runs, 32 px, for those who have it; its name, or nothing."""
    file = lab.out / "runs" / f"{CLIP}.safetensors"
    if not file.exists():
        if lab.data_dir is None or not (lab.data_dir / CLIP).exists():
            return ""
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(file, {"images": torch.cat(list(open_stream(lab.data_dir / CLIP, size=32).segments(256)))})
    return CLIP
