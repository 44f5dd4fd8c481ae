"""Frames that lie: how many the buffer hoards without guards and with them, and what guards cost on clean data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from streamclr.checkpoint import load_tensors, save_tensors
from streamclr.classifier import extract, linear_probe
from streamclr.errors import UserError
from streamclr.experiments.findings import Findings, signed, spread
from streamclr.experiments.lab import Job, Lab, Result
from streamclr.guard import GUARDS
from streamclr.report import Table
from streamclr.run import RunConfig, prepare
from streamclr.sources.dataset import Images
from streamclr.stream import Source, Stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = (0.01, 0.05, 0.2)  # of the stream
ACCURACY_AT = 0.05
CLIP = "dog.mp4"
COLUMNS = ("liars", "accuracy", "kept_out", "time")  # of a result


def lies(lab: Lab) -> Findings:
    images = lab.images or lab.pick(paper=500_000, cpu=20_480)
    clip, n_clip = decoded(lab), images // 3

    def jobs(kind: str = "", share: float = 0.0, guards: str = "off", clip: str = "") -> list[Job]:
        own: Result = {"kind": kind, "share": share, "clip": clip}
        runs = lab.runs(probes=0, guards=guards, images=images)
        if clip:
            own["images"] = n_clip
        return [replace(job, function=f"{__name__}:measure", arguments=job.arguments | own) for job in runs]

    kinds = ("mixture", *KINDS)
    grid = [(kind, share) for share in sorted(SHARES, key=lambda share: share != ACCURACY_AT) for kind in kinds]
    wanted = {f"clean, {guards}": jobs(guards=guards) for guards in ("off", "on", "quarantine", "stay")}
    wanted |= {f"{kind}, {share:.0%}, on": jobs(kind, share, "on") for kind, share in grid}
    wanted |= {f"{kind}, {ACCURACY_AT:.0%}, off": jobs(kind, ACCURACY_AT) for kind in kinds}
    if clip:
        wanted |= {f"{clip}, {kind}, {share:.0%}, on": jobs(kind, share, "on", clip) for kind, share in grid}
        wanted[f"{clip}, mixture, {ACCURACY_AT:.0%}, off"] = jobs("mixture", ACCURACY_AT, "off", clip)
    results = lab.do(wanted)
    measured = {row: {name: [result[name] for result in own] for name in COLUMNS} for row, own in results.items()}

    def cost(row: str, guards: Sequence[str]) -> list[str]:
        """What guards kept out and how long they took when all were on, and the accuracy of a run with them alone."""
        on, own = measured["clean, on"], measured.get(f"clean, {row}")
        n_out = [sum(out.get(guard, 0) for guard in guards) for out in on["kept_out"]]
        return [
            row,
            spread([100 * n / images for n in n_out], 2),
            spread(own["accuracy"]) if own else "–" if any(n_out) else "as off",
            signed(mean(losses(f"clean, {row}"))) if own else "–" if any(n_out) else "0",
            spread([100 * sum(times[guard] for guard in guards) for times in on["time"]]),
        ]

    at = f"{ACCURACY_AT:.0%}"
    columns = [f"{at}, off", *(f"{share:.0%}, on" for share in SHARES)]

    def cells(kind: str, where: str = "") -> list[str]:
        return [
            spread([100 * liars for liars in measured[row]["liars"]]) if row in measured else "–"
            for row in (f"{where}{kind}, {column}" for column in columns)
        ]

    def losses(row: str) -> list[float]:
        """Accuracy against the clean run of the same seed, in points."""
        return [a - b for a, b in zip(measured[row]["accuracy"], measured["clean, off"]["accuracy"], strict=True)]

    rows = [
        [kind, *cells(kind), *(signed(mean(losses(f"{kind}, {at}, {guards}"))) for guards in ("off", "on"))]
        for kind in kinds
    ]
    clean = spread(measured["clean, off"]["accuracy"])
    tables = [
        Table(
            "Liars in the buffer in %, by their share of the stream, CIFAR-10",
            ["liars", *columns, f"accuracy, {at}, off", f"{at}, on"],
            rows,
            f"{images:,} images a run; liars: mean over its second half, guards off or on; accuracy: linear probe, all "
            f"labels, in points against the clean run without guards, which has {clean} %. Not in the paper.",
        ),
        Table(
            "What guards cost on clean data, CIFAR-10",
            ["guards", "images kept out, %", "accuracy alone, %", "against off", "time of a step, %"],
            [cost("on", GUARDS), *(cost(guard, (guard,)) for guard in GUARDS)],
            f"Accuracy without guards {clean} %; a guard that hides nothing changes nothing. Time: of a step without.",
        ),
    ]
    if clip:
        tables.append(
            Table(
                f"Liars in the buffer in %, by their share of the stream, the clip {clip} again and again",
                ["liars", *columns],
                [[kind, *cells(kind, f"{clip}, ")] for kind in kinds],
                f"{n_clip:,} images a run, guards off for the mixture alone.",
            )
        )

    def draw(axes: "Axes") -> None:
        for number, kind in enumerate(kinds):
            shares = [100 * mean(measured[f"{kind}, {share:.0%}, on"]["liars"]) for share in SHARES]
            axes.plot([100 * s for s in SHARES], shares, marker=".", color=f"C{number}", label=kind)
            off = 100 * mean(measured[f"{kind}, {at}, off"]["liars"])
            axes.plot(100 * ACCURACY_AT, off, "x", color=f"C{number}")
        axes.plot([100 * s for s in SHARES], [200 * s for s in SHARES], ":", color="black", label="twice the share")
        axes.set_xscale("log")
        axes.set_xlabel("liars in the stream, %")
        axes.legend(fontsize=6)

    return Findings(tables, measured, "Liars in the buffer, %: guards on, and off (crosses)", draw)


def measure(directory: Path, kind: str, share: float, clip: str, **config: Any) -> Result:
    """Learn from a stream of which a share lies."""
    torch.set_num_threads(1)  # a second one waits more than it works on layers this small
    one, stream, learner = prepare(RunConfig(**config))
    assert one.segment is not None
    assert one.images is not None
    assert isinstance(stream, Stream)
    source = stream.source
    if clip:
        source = Clip(load_tensors(directory.parents[1] / f"{clip}.safetensors")["images"])
    lying = Lying(source, kind, share, one.images, one.seed)
    liars, steps = [], []
    for images in Stream(lying).segments(one.segment, until=one.images):
        steps.append(learner.learn_many(images))
        liars.append(float(lying.lies[learner.buffer.arrivals.cpu()].float().mean()))
    accuracy = float("nan")
    if not clip and share in (0, ACCURACY_AT):
        assert source.train is not None
        assert source.test is not None
        known, tested = (extract(learner.model, images) for images in (source.train, source.test))
        probe = linear_probe(known.features, known.labels, len(source.classes))
        accuracy = 100 * float((probe(tested.features).argmax(1) == tested.labels).float().mean())
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

    def images(self, numbers: Tensor) -> Tensor:
        images = self.source.images(numbers).clone()
        for row in self.lies[numbers].nonzero()[:, 0].tolist():
            number = int(numbers[row])
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
            # A frozen picture is that of the last thousandth image, until the next.
            seen = self.source.images(torch.tensor([number // 1000 * 1000]))[0]
            images[row] = KINDS[self._kinds[number]](
                images[row] if self._kinds[number] != "frozen" else seen, generator
            )
        return images

    def labels(self, numbers: Tensor) -> Tensor:
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
    import numpy as np
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
    """The frames of a film, again and again."""

    n_images, epoch = None, None
    classes: tuple[str, ...] = ()
    train: Images | None = None
    test: Images | None = None

    def __init__(self, frames: Tensor):
        self.frames = frames

    def images(self, numbers: Tensor) -> Tensor:
        return self.frames[numbers % len(self.frames)]

    def labels(self, numbers: Tensor) -> Tensor:
        raise UserError("a film has no labels")


def decoded(lab: Lab) -> str:
    """The clip's frames beside the runs, 32 px, for those who have it; its name, or nothing."""
    name = Path(CLIP).stem
    if (lab.out / f"{name}.safetensors").exists():
        return name
    if lab.data_dir is None or not (lab.data_dir / CLIP).exists():
        return ""
    import av

    frames = []
    with av.open(str(lab.data_dir / CLIP)) as film:
        for frame in film.decode(video=0):
            pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
            side = min(pixels.shape[1:])
            top, left = ((n - side) // 2 for n in pixels.shape[1:])
            square = pixels[None, :, top : top + side, left : left + side].float()
            frames.append(F.interpolate(square, (32, 32), mode="bilinear", antialias=True).round().byte())
    lab.out.mkdir(parents=True, exist_ok=True)
    save_tensors(lab.out / f"{name}.safetensors", {"images": torch.cat(frames)})
    return name
