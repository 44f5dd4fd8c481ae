"""Whether a faster score is as good: the same ranking, the same accuracy."""

import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from streamclr import ContrastScoring, Learner, contrast_score, open_stream, resnet18
from streamclr.score import rank_correlation, stand_ins

from .measure import child
from .report import row
from .subjects import cifar, clips_at_hand, images


def agreement(width: int = 16, n_steps: int = 20, n_unseen: int = 2048) -> None:
    """Fast against exact score on an encoder that has learned, on images that it has not seen."""
    source = cifar()
    stream = open_stream("cifar10", stc=500) if source else open_stream("synthetic:?size=32")
    name = "CIFAR-10" if source else "synthetic"
    learner = Learner(resnet18(width), buffer=256, lr=1e-3, device="cpu")
    for segment in stream.segments(256, until=256 * n_steps):
        learner.learn_many(segment)
    unseen = torch.from_numpy(source.images(np.arange(n_unseen))) if source else images(n_unseen)
    exact, fast = (contrast_score(learner.model, unseen, precision) for precision in ("fp32", "int8"))
    overlaps = []
    for e, f in zip(exact.split(512), fast.split(512), strict=True):
        overlaps.append(len(set(e.topk(256).indices.tolist()) & set(f.topk(256).indices.tolist())) / 256)
    spearman, overlap = rank_correlation(exact, fast), sum(overlaps) / len(overlaps)
    row(
        f"int8 against exact score, width {width} after {256 * n_steps:,} images of {name}: Spearman",
        f"{spearman:.4f}",
        "at least 0.98",
        spearman >= 0.98,
    )
    row("the same: overlap of the chosen 256 of 512", f"{100 * overlap:.1f} %", "at least 95 %", overlap >= 0.95)


ACCURACY = """
import json, torch
from streamclr import ContrastScoring, Learner, open_stream, resnet18
from streamclr.compute.allocator import keep_freed_memory
from streamclr.runs.evaluation import extract, knn_accuracy
from streamclr.encoders.inference import seeded
keep_freed_memory()
stream = open_stream("cifar10", stc=500, seed=$seed)
with seeded($seed):
    encoder = resnet18(8, stem="half")
policy = ContrastScoring(50, precision=$precision)
learner = Learner(encoder, policy, buffer=256, lr=3e-3, seed=$seed, device="cpu")
for images in stream.segments(256, until=$images):
    learner.learn_many(images)
train, test = stream.train, stream.test
known = torch.arange(0, len(train), 5)
print(json.dumps([knn_accuracy(extract(learner.model, train, known), extract(learner.model, test), 10)]))
"""

STREAM = """
import json, time, torch
from streamclr import ContrastScoring, Learner, open_stream, resnet18
from streamclr.compute.allocator import keep_freed_memory
from streamclr.compute.memory import MIB, resident
keep_freed_memory()
stream = open_stream("synthetic:?size=16&stc=64")
segments = [stream.read(256) for _ in range(20)]
learner = Learner(resnet18(8), ContrastScoring(20, precision="int8"), buffer=256, lr=1e-3, device="cpu")
sizes, times = {}, {}
for step in range($images // 256 + 1):
    seen = learner.learn_many(segments[step % 20])
    times.setdefault(step * 256 // ($images // 10), []).append(seen.seconds_scoring + seen.seconds_training)
    for mark in (10_000, $images):
        if seen.seen >= mark and mark not in sizes:
            sizes[mark] = resident() / MIB
medians = [sorted(t)[len(t) // 2] for t in times.values()]
print(json.dumps([sizes[10_000], sizes[$images], medians[0], medians[9]]))
"""


def long_runs(n_images: int = 20_480, n_streamed: int = 200_000) -> None:
    """CIFAR-10 with the fast score and the exact one, five seeds, and a long stream; two processes side by side."""
    jobs = [(precision, seed) for seed in range(5) for precision in ("fp32", "int8")] if cifar() else []
    with ThreadPoolExecutor(2) as two:
        streamed = two.submit(child, STREAM, 1, images=n_streamed)
        results = list(two.map(lambda job: child(ACCURACY, 1, precision=job[0], seed=job[1], images=n_images)[0], jobs))
        before, after, first, last = streamed.result()
    grown = after / before - 1
    row(
        f"resident memory after {n_streamed:,} images against after 10,000 (width 8, 16 px)",
        f"{before:.1f} to {after:.1f} MiB ({100 * grown:+.2f} %)",
        "at most +1 %",
        grown <= 0.01,
    )
    row("time per step in the last tenth of them, of that in the first", f"{last / first:.2f}")
    if not jobs:
        row("accuracy with the fast against the exact score", "skipped: no CIFAR-10", "streamclr data get cifar10")
        return
    by = {p: [100 * r for (q, _), r in zip(jobs, results, strict=True) if q == p] for p in ("fp32", "int8")}
    for precision, name in (("fp32", "exact"), ("int8", "fast (int8)")):
        values, each = by[precision], " ".join(f"{value:.1f}" for value in by[precision])
        row(
            f"kNN accuracy on CIFAR-10, half stem, width 8, {n_images:,} images, T = 50, seeds 0 to 4: {name}",
            f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} % ({each})",
        )
    difference = statistics.mean(by["int8"]) - statistics.mean(by["fp32"])
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in by.values()))
    noise = 2.306 * error  # Student's t for eight degrees of freedom, 95 %
    row(
        "fast less exact, with its interval of 95 %",
        f"{difference:+.2f} ± {noise:.2f} points",
        "within noise",
        abs(difference) <= noise,
    )


def duplicates() -> None:
    """Frames that take over a score, on two clips, and whether the ranking minds."""
    if not (clips := clips_at_hand()):
        row("frames at rest", "skipped: no recordings", "CLIPS=a.mp4:b.mp4 make bench")
        return
    learner = Learner(resnet18(16), buffer=64, lr=1e-3, device="cpu")
    for segment in open_stream("synthetic:?size=32").segments(64, until=64 * 40):
        learner.learn_many(segment)
    for clip in clips:
        frames = decode(clip)
        still = torch.cat([frames[:100], frames[99:100].expand(100, -1, -1, -1), frames[100:]])
        for name, sequence in ((clip.name, frames), (f"{clip.name} with 100 frames at rest", still)):
            stand_in = stand_ins(sequence, ContrastScoring().duplicate)
            exact = contrast_score(learner.model, sequence)
            saved = float((stand_in != torch.arange(len(sequence))).float().mean())
            ranks = rank_correlation(exact, exact[stand_in])
            row(f"{name}, 32 px: frames that take over a score", f"{100 * saved:.1f} %, Spearman {ranks:.4f}")


def decode(clip: Path) -> torch.Tensor:
    import av

    frames = []
    with av.open(str(clip)) as file:
        for frame in file.decode(video=0):
            picture = frame.to_image()
            side = min(picture.size)
            left, top = (picture.width - side) // 2, (picture.height - side) // 2
            picture = picture.crop((left, top, left + side, top + side)).resize((32, 32))
            frames.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    return torch.stack(frames)
