"""What is measured: encoders with their usual learners, frames, full buffers, clips."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamclr import FIFOReplace, Guarded, Learner, UserError, mobilenet_v2, open_stream, resnet18
from streamclr.classifier import Classifier, Head
from streamclr.encoders.weights import places
from streamclr.policy import policy_state
from streamclr.recipe import ADAPT
from streamclr.streams.datasets.images import Images

from .measure import BENCHMARKS
from .report import row

N_DIFFERENT = 256  # frames of the built-in stream, of which `frames` makes others


def images(n: int, size: int = 32) -> Tensor:
    return open_stream(f"synthetic:?size={size}&stc=1").read(n)


@cache
def originals(size: int) -> Tensor:
    return images(N_DIFFERENT, size)


def frames(n: int, size: int, start: int = 0) -> Tensor:
    """The frames from number `start` on of an endless stream of different ones, made quickly: the built-in stream's,
    moved by some pixels."""
    own, parts, end = originals(size), [], start + n
    while start < end:
        turn, first = divmod(start, N_DIFFERENT)
        last = min(N_DIFFERENT, first + end - start)
        parts.append(own[first:last].roll((turn % size, 3 * turn // size), (2, 3)))
        start += last - first
    return torch.cat(parts)


class Subject(NamedTuple):
    """An encoder as its users have it."""

    name: str
    size: int
    make: Callable[..., Learner]  # of the options of a Learner
    most_scoring: float | None = None  # a step with exact scoring, T = 50, over the same without: at most so much
    most_whole: float | None = None  # the same with guards, predictions and label candidates


def adapted(**options: Any) -> Learner:
    """`Learner("mobilenet_v2")`. Without the public weights, the same with random ones: they take the same time."""
    if Path(dict(places())["mobilenet_v2"]).exists():
        return Learner("mobilenet_v2", device="cpu", **options)
    usual = {"policy": ADAPT.policy, "buffer": ADAPT.buffer, "batch_size": ADAPT.batch, "lr": ADAPT.lr}
    usual |= {"temperature": ADAPT.temperature, "positives": ADAPT.positives, "train": ADAPT.train}
    usual |= {"views": ADAPT.views, "optimizer": ADAPT.optimizer, "lr_half": ADAPT.lr_half}
    return Learner(mobilenet_v2(), recipe="device", device="cpu", **usual | options)


def from_scratch(**options: Any) -> Learner:
    return Learner(recipe="device", device="cpu", **options)


def of_the_paper(width: int = 64, n: int = 64) -> Callable[..., Learner]:
    """With a buffer, a batch and a segment of `n`, where the paper has 256 in each: the ratios are the same."""
    return lambda **options: Learner(resnet18(width), **{"buffer": n, "device": "cpu"} | options)


MOBILENET_64 = Subject("MobileNetV2, 64 px", 64, adapted, 1.10, 1.20)
MOBILENET_96 = Subject("MobileNetV2, 96 px", 96, adapted)
COMPACT = Subject("compact, 32 px", 32, from_scratch, 1.15, 1.20)
RESNET = Subject("ResNet-18 of width 64, 32 px", 32, of_the_paper(), 1.15, 1.20)


def full(learner: Learner, size: int) -> Learner:
    """The learner with a full buffer, as it is after the first minutes.

    The images have all ages up to 100 alike, so that with T = 20 or 50 a T-th of them is scored again in each step:
    the most that lazy scoring can come to.
    """
    learner.fit((learner.batch_size, 3, size, size))
    buffer, part, policy = learner.buffer, learner.batch_size, learner.policy
    filling = Guarded(FIFOReplace()) if isinstance(policy, Guarded) else FIFOReplace()
    while len(buffer) < buffer.size:
        pool = buffer.pool(frames(min(part, buffer.size - len(buffer)), size, len(buffer)))
        buffer.replace(pool, filling.keep(pool, len(pool), learner.model))
    if isinstance(policy, Guarded):  # its guards know the images, too
        policy.load_state_dict(filling.state_dict() | {"policy": policy_state(policy.policy)})
    generator = torch.Generator().manual_seed(0)
    buffer.scores.uniform_(generator=generator)
    buffer.ages.copy_(torch.randperm(buffer.size, generator=generator) * 100 // buffer.size + 1)
    return learner


class Steps:
    """A case: each call is a step of a learner with a full buffer, on a new segment."""

    def __init__(self, learner: Learner, size: int, n_segments: int, segment: int | None = None):
        self.learner = full(learner, size)
        n = segment or learner.batch_size
        self._segments = list(frames(n * n_segments, size, start=10**6).split(n))
        self.rescored = 0.0  # share of the buffer, in the last step

    def __call__(self) -> None:
        segment = self._segments.pop()
        self.rescored = self.learner.learn_many(segment).rescored


def untrained(learner: Learner, size: int, classes: str = "abcdefghij") -> Classifier:
    """A classifier on a copy of the learner's encoder, which takes the time of any other."""
    model = copy.deepcopy(learner.model)
    head = Head(model.n_features, len(classes))
    torch.nn.init.normal_(head.linear.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return Classifier(model, head, classes, size)


def cifar() -> Images | None:
    """CIFAR-10's test images, or None where it is not in the cache."""
    try:
        return open_stream("cifar10").test
    except UserError:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# Clips


def clips_at_hand() -> list[Path]:
    """Two recordings of 720p: those in CLIPS, as a.mp4:b.mp4, or those that lie beside the repository."""
    named = [Path(name) for name in os.environ.get("CLIPS", "").split(":") if name]
    usual = [BENCHMARKS.parents[1] / "shared" / "data" / name for name in ("dog.mp4", "coffee.mp4")]
    return [clip.absolute() for clip in named or usual if clip.exists()]


def clips_in(place: Path) -> list[Path]:
    """Those at hand or, where there are none, two that are made."""
    return clips_at_hand()[:2] or [make_clip(place / f"{name}.mp4", seed) for seed, name in enumerate(("one", "two"))]


def clip_and_weights(figure: str, place: Path) -> Path | None:
    """A 720p clip, with the public weights in the cache; None, and a row that says why, if these cannot be had."""
    command = [sys.executable, "-m", "streamclr", "models", "get", "mobilenet_v2"]
    got = subprocess.run(command, capture_output=True, text=True)
    if got.returncode:
        row(figure, f"skipped: {got.stderr.strip()}")
        return None
    return clips_in(place)[0]


def make_clip(path: Path, seed: int = 0, n_frames: int = 300, width: int = 1280, height: int = 720) -> Path:
    """A recording of a scene that moves, with a sensor's noise, so that it is as hard to decode as a real one."""
    import av

    scene = open_stream(f"synthetic:?size=96&stc=1&seed={seed}").read(1).float()
    scene = torch.nn.functional.interpolate(scene, (2 * height, 2 * width), mode="bicubic")[0]
    scene = scene.clamp(0, 255).byte().permute(1, 2, 0).numpy()
    noise = np.random.default_rng(seed).integers(-12, 13, (height, width, 1), np.int16)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=30, width=width, height=height, pix_fmt="yuv420p")
        stream.options = {"crf": "23", "preset": "veryfast"}
        for n in range(n_frames):
            top, left = n % height, 2 * n % width
            part = scene[top : top + height, left : left + width]
            noisy = (part + np.roll(noise, 7 * n)).clip(0, 255).astype(np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(noisy, format="rgb24")))
        file.mux(stream.encode())
    return path
