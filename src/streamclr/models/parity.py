"""An exported file compared with PyTorch: same answers, size, speed."""

import itertools
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamclr.base.table import Table
from streamclr.classifier import Classifier
from streamclr.encoders.inference import as_float, inference_mode

ExportedFunction = Callable[[Tensor], tuple[Tensor, ...]]  # uint8 images to probabilities and features
Runner = Callable[[Tensor], object]
BATCHES = (1, 32)
MAX_DIFFERENCE = 1e-4  # of a probability, in float
MIN_EQUAL = 0.99  # of the classes, in int8


@dataclass(frozen=True)
class Parity:
    """What was measured on real images, on one thread."""

    int8: bool
    n_images: int
    largest_difference: float  # of any probability
    equal_classes: float  # share of the images with the same first class
    n_bytes: int
    n_bytes_torch: int  # of the weights
    seconds: dict[int, float]  # per image, by batch size
    seconds_torch: dict[int, float]
    looked_again: float | None = None  # share of the images that int8 was unsure of

    @property
    def problem(self) -> str | None:
        """What is wrong with the file; None if nothing is."""
        if not self.int8 and not self.largest_difference <= MAX_DIFFERENCE:  # NaN is a problem too
            return f"probabilities differ by up to {self.largest_difference:.2g}, more than {MAX_DIFFERENCE:g}"
        if self.int8 and not self.equal_classes >= MIN_EQUAL:
            return f"{100 * self.equal_classes:.1f} % of the classes are the same, fewer than {100 * MIN_EQUAL:g} %"
        return None

    def as_dict(self) -> dict[str, Any]:
        return {
            "matches": self.problem is None,
            "largest_difference": self.largest_difference,
            "equal_classes": self.equal_classes,
            "looked_again": self.looked_again,
            "bytes": self.n_bytes,
            "bytes_torch": self.n_bytes_torch,
            "milliseconds_per_image": {str(n): 1000 * s for n, s in self.seconds.items()},
            "milliseconds_per_image_torch": {str(n): 1000 * s for n, s in self.seconds_torch.items()},
        }

    def table(self, name: str) -> Table:
        rows = [["MB", f"{self.n_bytes_torch / 1e6:.2f}", f"{self.n_bytes / 1e6:.2f}", ""]]
        for n, here in self.seconds.items():
            there = self.seconds_torch[n]
            what = "ms per image" if n == 1 else f"ms per image, {n} at a time"
            rows.append([what, f"{1000 * there:.2f}", f"{1000 * here:.2f}", f"{there / here:.2f} times as fast"])
        rows.append(["largest difference of a probability", "", f"{self.largest_difference:.1e}", ""])
        rows.append(["same class", "", f"{100 * self.equal_classes:.2f} %", ""])
        if self.looked_again is not None:
            rows.append(["looked at again in float", "", f"{100 * self.looked_again:.1f} %", ""])
        note = f"{self.n_images:,} images of the run, one thread"
        return Table("", ["", "PyTorch", name, ""], rows, note)


def compare(classifier: Classifier, exported: ExportedFunction, images: Tensor, n_bytes: int, int8: bool) -> Parity:
    """images: uint8, of the size that the encoder learned from."""
    with inference_mode(classifier), one_thread():
        exact = torch.cat([classify(classifier, part) for part in images.split(64)])
        found = torch.cat([exported(part)[0] for part in images.split(64)])
        spent = {n: race(lambda part: classify(classifier, part), exported, images, n) for n in BATCHES}
    weights = [*classifier.model.encoder.state_dict().values(), *classifier.head.state_dict().values()]
    return Parity(
        int8,
        len(images),
        float((exact - found).abs().max()),
        float((exact.argmax(1) == found.argmax(1)).double().mean()),
        n_bytes,
        sum(tensor.nbytes for tensor in weights),
        {n: here for n, (_, here) in spent.items()},
        {n: there for n, (there, _) in spent.items()},
    )


def classify(classifier: Classifier, images: Tensor) -> Tensor:
    """The probabilities as `predict` computes them: without the pre-processing that is in the graph."""
    return classifier.head(classifier.model.features(as_float(images))).softmax(1)


def race(one: Runner, other: Runner, images: Tensor, n: int, least: float = 0.5) -> tuple[float, float]:
    """Mean seconds per image of both, n at a time. They take turns, so that a slow moment affects both; of two times on
    the same images the shorter counts. Many images are used, because a second look depends on the image."""
    parts = images.repeat(-(-n // len(images)), 1, 1, 1).split(n)
    parts = [part for part in parts if len(part) == n]
    spent: tuple[list[float], list[float]] = ([], [])
    for run in (one, other):  # warms up
        run(parts[0])
    began = time.perf_counter()
    for part in itertools.islice(itertools.cycle(parts), 200):
        for run, times in zip((one, other), spent, strict=True):
            times.append(min(timeit.repeat(partial(run, part), number=1, repeat=2)) / n)
        if time.perf_counter() - began > least and len(spent[0]) >= 5:
            break
    return statistics.mean(spent[0]), statistics.mean(spent[1])


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
