"""What memory a step takes, and what a limit costs."""

import copy
import time

import torch

from streamclr import Learner, StrongViews, resnet18
from streamclr.compute.allocator import keep_freed_memory
from streamclr.compute.chunked import backward
from streamclr.loss import nt_xent

from .measure import child
from .report import row
from .subjects import images

MEMORY = """
import json, torch
from streamclr import Learner, resnet18
from streamclr.compute.memory import peak
learner = Learner(resnet18($width, stem=$stem, norm=$norm), buffer=256, device="cpu", memory=$memory)
images = torch.randint(256, (256, 3, $size, $size), dtype=torch.uint8)
learner.learn_many(images)
plan = learner.plan
print(json.dumps([plan and plan.chunk_size, plan and plan.peak / 2**20, peak() / 2**20]))
"""


CASES = (
    ("GroupNorm, 32 px", "group", "small", 32, None, None),
    ("GroupNorm, 32 px, --memory 600M", "group", "small", 32, "600M", 600),
    ("BatchNorm (exact), 32 px, --memory 1G", "batch", "small", 32, "1G", 1024),
    ("GroupNorm, 224 px, imagenet stem, --memory 1.5G", "group", "imagenet", 224, "1.5G", 1536),
)


def memory(cases: tuple = CASES, width: int = 64) -> None:
    """Whole-process peaks of one step with contrast scoring, each in a process of its own."""
    for name, norm, stem, size, budget, limit in cases:
        names = {"width": width, "norm": norm, "stem": stem, "size": size, "memory": budget}
        chunk_size, predicted, peak = child(MEMORY, **names)
        how = f", {chunk_size} views at a time" if chunk_size else ""
        row(
            f"peak of one step, width {width}, N = 256, {name}{how}",
            f"{peak:.0f} MiB",
            f"at most {limit} MiB" if limit else "",
            peak <= limit if limit else None,
        )
        if limit:
            off = predicted / peak - 1
            row("    predicted before it", f"{predicted:.0f} MiB ({100 * off:+.1f} %)", "within 10 %", abs(off) <= 0.1)


def chunks(width: int = 64, n: int = 256) -> None:
    """The gradient in chunks against the plain one, same allocator."""
    keep_freed_memory()
    for norm in ("group", "batch"):
        model, views = Learner(resnet18(width, norm=norm), device="cpu").model.train(), strong_views(n)
        gradient(model, views[:64], None)  # warms up
        limits = {64: 1.35, 16: 1.6} if norm == "group" else {64: None}
        # Each in turn, twice, the faster time of each: a gradient takes seconds, and the machine has its moods.
        rounds = [{size: timed_gradient(model, views, size) for size in (None, *limits)} for _ in range(2)]
        spent = {size: min(found[size][1] for found in rounds) for size in rounds[0]}
        plain = rounds[0][None][0]
        for size, limit in limits.items():
            chunked, ratio = rounds[0][size][0], spent[size] / spent[None]
            row(
                f"time of a gradient in chunks of {size}, of the plain one (width {width}, {2 * n} views, {norm} norm)",
                f"{ratio:.2f}",
                f"at most {limit}" if limit else "",
                ratio <= limit if limit else None,
            )
            if norm == "group":
                cosine = float(torch.cosine_similarity(plain, chunked, dim=0))
                row("    cosine with the plain gradient", f"{cosine:.8f}", "at least 0.99999", cosine >= 0.99999)
    # torch's own BatchNorm, channels last, rounds more than the chunked one does: set both against double precision.
    model, views = Learner(resnet18(16), device="cpu").model.train(), strong_views(128)
    plain, chunked = (gradient(model, views, size) for size in (None, 32))
    exact = gradient(copy.deepcopy(model).double(), views.double(), None)
    plain, chunked = (float(torch.cosine_similarity(exact, found, dim=0)) for found in (plain, chunked))
    row(
        "BatchNorm in chunks of 32, width 16: cosine with the plain gradient in double precision",
        f"{chunked:.8f}",
        "at least 0.99999",
        chunked >= 0.99999,
    )
    row("    the plain gradient in single precision has", f"{plain:.8f}")


def strong_views(n: int) -> torch.Tensor:
    return StrongViews()(images(n).repeat(2, 1, 1, 1), torch.Generator().manual_seed(0))


def timed_gradient(model: torch.nn.Module, views: torch.Tensor, size: int | None) -> tuple[torch.Tensor, float]:
    started = time.perf_counter()
    return gradient(model, views, size), time.perf_counter() - started


def gradient(model: torch.nn.Module, views: torch.Tensor, size: int | None) -> torch.Tensor:
    model.zero_grad()
    backward(model, lambda rows: views[rows], len(views), lambda z: nt_xent(*z.chunk(2)), size)
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])
