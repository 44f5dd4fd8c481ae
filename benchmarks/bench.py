"""Speed and memory, as ratios and sizes measured in one run: prints a table and writes results/DATE.md.

    .venv/bin/python benchmarks/bench.py [SECTION …]

Without arguments it measures all sections. A row with a target says whether it was met. Run nothing else meanwhile:
other work makes the times meaningless.
"""

import copy
import datetime
import itertools
import json
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import numpy as np
import torch

from streamclr import (
    ContrastScoring,
    FIFOReplace,
    Learner,
    StrongViews,
    UserError,
    contrast_score,
    open_stream,
    resnet18,
)
from streamclr.base.files import json_line
from streamclr.buffer import Buffer
from streamclr.compute.allocator import keep_freed_memory
from streamclr.compute.chunked import backward
from streamclr.loss import nt_xent
from streamclr.policy import POLICIES
from streamclr.score import rank_correlation, stand_ins

HERE = Path(__file__).parent
ROWS: list[tuple[str, str, str]] = []  # figure, measured, target


def row(figure: str, measured: str, target: str = "", met: bool | None = None) -> None:
    verdict = "" if met is None else (" (met)" if met else " (not met)")
    ROWS.append((figure, measured, target + verdict))
    print(f"{figure:78} {measured:>24}   {target}{verdict}", flush=True)


def seconds(function, repeat: int = 3) -> float:
    """The median of some calls after one that warms up."""
    function()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def images(n: int, size: int = 32) -> torch.Tensor:
    return open_stream(f"synthetic:?size={size}&stc=1").read(n)


def child(code: str, threads: int = 2, **names: object) -> list:
    """What a script in a process of its own prints as JSON."""
    for name, value in names.items():
        code = code.replace(f"${name}", repr(value))
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env).stdout)


# ----------------------------------------------------------------------------------------------------------------------


def scoring() -> None:
    """The paper's table of T: relative batch time and re-scored share; ResNet-18, width 64, N = 256."""
    keep_freed_memory()
    pool = images(512)
    learner = Learner(resnet18(), FIFOReplace(), buffer=256, device="cpu")
    learner.learn_many(pool[:256])
    policy = ContrastScoring(precision="auto")
    policy._score(learner.model, pool[:128])  # chooses the precision
    shares = {every: rescored_share(every) for every in (1, 4, 20, 50, 100, 200)}
    plain, spent = [], {every: [] for every in shares}
    for turn in range(3):  # training and scoring in turns, so that a slow minute hits both
        plain.append(learner.learn_many(pool[:256]).seconds_training)
        for every, share in shares.items():
            due = 256 + round(256 * share)
            if turn:
                started = time.perf_counter()
                policy._score(learner.model, pool[:due])
                spent[every].append(time.perf_counter() - started)
    step = statistics.median(plain[1:])
    started = time.perf_counter()
    contrast_score(learner.model, pool[:256])
    exact = (time.perf_counter() - started) / step
    row("precision chosen by auto, width 64, 32 px", policy._fast)
    for every, share in shares.items():
        ratio = 1 + statistics.median(spent[every]) / step
        name = "disabled" if every == 1 else every
        target = {50: 1.10, 1: 1.20}.get(every)
        row(
            f"step with contrast scoring, T = {name}, of the same step without (width 64, N = 256)",
            f"{ratio:.3f}, {100 * share:.1f} % re-scored",
            f"at most {target:.2f}" if target else "",
            ratio <= target if target else None,
        )
    row("the same in exact fp32, T large", f"{1 + exact:.3f}")
    for width in (16, 8):
        narrow_scoring(width, pool)


def narrow_scoring(width: int, pool: torch.Tensor) -> None:
    learner = Learner(resnet18(width), FIFOReplace(), buffer=256, device="cpu")
    policy = ContrastScoring()
    step = seconds(lambda: learner.learn_many(pool[:256]), 5)
    fast = seconds(lambda: policy._score(learner.model, pool[:261]), 5)
    exact = seconds(lambda: contrast_score(learner.model, pool[:261]), 3)
    row(
        f"the same, T = 50, width {width} ({policy._fast}; exact fp32)",
        f"{1 + fast / step:.3f}; {1 + exact / step:.3f}",
    )


def rescored_share(every: int) -> float:
    """In a run long enough for T, with an encoder small enough for the time."""
    learner = Learner(resnet18(2), ContrastScoring(every), buffer=32, lr=1e-3, device="cpu")
    stream = open_stream("synthetic:?size=8&stc=32")
    shares = [learner.learn_many(stream.read(32)).rescored for _ in range(3 * max(every, 20))]
    return sum(shares[1:]) / (len(shares) - 1)


def agreement() -> None:
    """Fast against exact score on encoders that have learned, on images that they have not seen."""
    source = cifar()
    stream = open_stream("cifar10", stc=500) if source else open_stream("synthetic:?size=32")
    name = "CIFAR-10" if source else "synthetic"
    learner = Learner(resnet18(16), buffer=256, lr=1e-3, device="cpu")
    for segment in stream.segments(256, until=256 * 20):
        learner.learn_many(segment)
    unseen = torch.from_numpy(source.images(np.arange(2048))) if source else images(2048)
    exact, fast = (contrast_score(learner.model, unseen, precision) for precision in ("fp32", "int8"))
    overlaps = []
    for e, f in zip(exact.split(512), fast.split(512), strict=True):
        overlaps.append(len(set(e.topk(256).indices.tolist()) & set(f.topk(256).indices.tolist())) / 256)
    spearman, overlap = rank_correlation(exact, fast), sum(overlaps) / len(overlaps)
    row(
        f"int8 against exact score, width 16 after 5,120 images of {name}: Spearman",
        f"{spearman:.4f}",
        "at least 0.98",
        spearman >= 0.98,
    )
    row("the same: overlap of the chosen 256 of 512", f"{100 * overlap:.1f} %", "at least 95 %", overlap >= 0.95)


def cifar():
    """CIFAR-10's test images, or None where it is not in the cache."""
    try:
        return open_stream("cifar10").test
    except UserError:
        return None


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


def memory() -> None:
    """Whole-process peaks of one step with contrast scoring, each in a process of its own."""
    cases = [
        ("GroupNorm, 32 px", "group", "small", 32, None, None),
        ("GroupNorm, 32 px, --memory 600M", "group", "small", 32, "600M", 600),
        ("BatchNorm (exact), 32 px, --memory 1G", "batch", "small", 32, "1G", 1024),
        ("GroupNorm, 224 px, imagenet stem, --memory 1.5G", "group", "imagenet", 224, "1.5G", 1536),
    ]
    for name, norm, stem, size, budget, limit in cases:
        names = {"width": 64, "norm": norm, "stem": stem, "size": size, "memory": budget}
        chunk_size, predicted, peak = child(MEMORY, **names)
        how = f", {chunk_size} views at a time" if chunk_size else ""
        row(
            f"peak of one step, width 64, N = 256, {name}{how}",
            f"{peak:.0f} MiB",
            f"at most {limit} MiB" if limit else "",
            peak <= limit if limit else None,
        )
        if limit:
            off = predicted / peak - 1
            row("    predicted before it", f"{predicted:.0f} MiB ({100 * off:+.1f} %)", "within 10 %", abs(off) <= 0.1)


def chunks() -> None:
    """The gradient in chunks against the plain one, same allocator."""
    keep_freed_memory()
    for norm in ("group", "batch"):
        model, views = Learner(resnet18(norm=norm), device="cpu").model.train(), strong_views(256)
        gradient(model, views[:64], None)  # warms up
        limits = {64: 1.35, 16: 1.6} if norm == "group" else {64: None}
        # Each in turn, twice, the faster time of each: a gradient takes seconds, and the machine has its moods.
        rounds = [{size: timed_gradient(model, views, size) for size in (None, *limits)} for _ in range(2)]
        spent = {size: min(found[size][1] for found in rounds) for size in rounds[0]}
        plain = rounds[0][None][0]
        for size, limit in limits.items():
            chunked, ratio = rounds[0][size][0], spent[size] / spent[None]
            row(
                f"time of the gradient in chunks of {size}, of the plain one (width 64, 512 views, {norm} norm)",
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


GROWTH = """
import json, statistics, torch
from streamclr import ContrastScoring, Learner, open_stream, resnet18
from streamclr.compute.memory import MIB, peak
learner = Learner(resnet18(8), ContrastScoring(50), buffer=$size, batch_size=$batch, device="cpu")
stream = open_stream("synthetic:?size=32&stc=1")
for _ in range(0, $size, 256):
    learner.buffer.replace(pool := learner.buffer.pool(stream.read(min($size, 256))), torch.arange(len(pool)))
steps = [learner.learn_many(stream.read(256)) for _ in range(4)]
print(json.dumps([statistics.median(s.seconds_scoring + s.seconds_training for s in steps[1:]), peak() / MIB]))
"""


def growth() -> None:
    """Time and memory of a step against buffer size, time against image size and, per policy, pool size; width 8."""
    keep_freed_memory()
    spent = {size: child(GROWTH, size=size, batch=min(256, size)) for size in (32, 256, 1024, 4096)}
    for size, (seconds_, peak) in spent.items():
        row(
            f"step with a buffer of {size:,} (batch {min(256, size)}, segment 256, width 8), of that at 256; peak",
            f"{seconds_ / spent[256][0]:.2f}; {peak:.0f} MiB",
        )
    base = None
    for size in (32, 64, 128, 224):
        learner = Learner(resnet18(8, stem="imagenet"), buffer=32, device="cpu")
        new = images(32, size)
        spent = seconds(lambda: learner.learn_many(new), 2)  # noqa: B023
        base = base or spent
        row(f"step with images of {size} px (buffer 32, imagenet stem), of that at 32 px", f"{spent / base:.1f}")
    model, new = Learner(resnet18(8), device="cpu").model, images(4096, 16)
    for name, policy in POLICIES.items():
        spent = []
        for size in (512, 4096):
            chooser = policy()
            spent.append(seconds(lambda: chooser.keep(Buffer(8).pool(new[:size]), size // 2, model), 1))  # noqa: B023
        row(f"{name}: half of 4,096 chosen, of half of 512 (8 times the images)", f"{spent[1] / spent[0]:.1f}")


def duplicates() -> None:
    """Frames that take over a score, on two clips, and whether the ranking minds."""
    clips = [Path(p) for p in os.environ.get("CLIPS", "").split(":") if p]
    clips = clips or [HERE.parents[1] / "shared" / "data" / name for name in ("dog.mp4", "coffee.mp4")]
    learner = Learner(resnet18(16), buffer=64, lr=1e-3, device="cpu")
    for segment in open_stream("synthetic:?size=32").segments(64, until=64 * 40):
        learner.learn_many(segment)
    for clip in clips:
        if not clip.exists():
            row(f"frames at rest in {clip.name}", "skipped: no such clip", "CLIPS=a.mp4:b.mp4 make bench")
            continue
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
    import numpy as np

    frames = []
    with av.open(str(clip)) as file:
        for frame in file.decode(video=0):
            picture = frame.to_image()
            side = min(picture.size)
            left, top = (picture.width - side) // 2, (picture.height - side) // 2
            picture = picture.crop((left, top, left + side, top + side)).resize((32, 32))
            frames.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    return torch.stack(frames)


def overhead(width: int = 16) -> None:
    """What a step costs beyond the encoder."""
    keep_freed_memory()
    learner = Learner(resnet18(width), FIFOReplace(), buffer=256, device="cpu")
    new = images(256)
    step = seconds(lambda: learner.learn_many(new))
    done = learner.learn_many(new)
    buffer, keep = learner.buffer, torch.arange(256) * 2
    parts = [
        seconds(lambda: learner.views(new.repeat(2, 1, 1, 1), learner.generator), 5),
        seconds(lambda: buffer.replace(buffer.pool(new), keep), 5),
        seconds(lambda: json_line(vars(done)), 5),
    ]
    share = sum(parts) / step
    row(f"views, buffer and journal, of a step of width {width}", f"{100 * share:.2f} %", "at most 5 %", share <= 0.05)


def predicting(width: int = 16, segment: int = 128) -> None:
    """What `run --predict` adds to a step: every image of a segment classified, on one thread."""
    from streamclr.classifier import Classifier, Head
    from streamclr.models.parity import one_thread
    from streamclr.models.versions import Score, Version

    def costs(size: int) -> tuple[float, float]:
        """Of a step: the images of a segment some at a time, and one by one."""
        encoder, policy = resnet18(width, "small" if size < 64 else "imagenet"), ContrastScoring(rescore_every=50)
        learner = Learner(encoder, policy, buffer=segment, device="cpu")
        new, nobody = images(segment, size), frozenset[str]()
        model, head = copy.deepcopy(learner.model), Head(learner.model.n_features, 10)
        version = Version(Classifier(model, head, "abcdefghij", size), 0, nobody, nobody, Score(0, 0, 0.0))
        step = seconds(lambda: learner.learn_many(new))
        some, one = (seconds(lambda n=n: [version.probabilities(part) for part in new.split(n)]) for n in (64, 1))
        return some / step, one / step

    with one_thread():
        for size in (32, 96):
            what = f"classifying {segment} images of {size} px, of a step of width {width}"
            row(f"{what}: some at a time, one by one", "{:.2f}, {:.2f}".format(*costs(size)))


def start() -> None:
    times = {"torch": [], "torch, streamclr": []}
    for _ in range(4):
        for modules, spent in times.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
            spent.append(time.perf_counter() - started)
    extra = min(times["torch, streamclr"]) - min(times["torch"])
    row("import of streamclr beyond torch's own", f"{extra:.2f} s", "at most 1 s", extra <= 1)


def clip_and_weights(figure: str) -> Path | None:
    """A 720p clip, with the public weights in the cache; None, and a row that says why, if one cannot be had."""
    clip = Path(os.environ.get("CLIPS", "").split(":")[0] or HERE.parents[1] / "shared" / "data" / "dog.mp4")
    command = [sys.executable, "-m", "streamclr", "models", "get", "mobilenet_v2"]
    got = subprocess.run(command, capture_output=True, text=True)
    if clip.exists() and not got.returncode:
        return clip
    row(figure, f"skipped: {got.stderr.strip() or 'no such clip'}", "CLIPS=a.mp4 make bench")
    return None


def first_run() -> None:
    """`streamclr run CLIP` with default options on a 720p clip: from the command to the first step, and its memory."""
    if (clip := clip_and_weights("run CLIP with default options")) is None:
        return
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "streamclr", "run", clip, "--out", out], stdout=subprocess.DEVNULL
        )
        journal = out / "journal.jsonl"  # a line for each step
        while process.poll() is None and not (journal.exists() and journal.stat().st_size):
            time.sleep(0.05)
        first = time.perf_counter() - started
        if process.wait():
            raise SystemExit("run CLIP failed")
        whole = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    row(f"run {clip.name} with default options: the first step", f"{first:.1f} s", "at most 20 s", first <= 20)
    row(f"run {clip.name} with default options: the whole run", f"{whole:.1f} s")
    row(f"run {clip.name} with default options: memory", f"{peak:.2f} GiB", "at most 1.5 GiB", peak <= 1.5)


def first_question() -> None:
    """`streamclr run CLIP`, and `streamclr label RUN` as soon as it is told: until the page has a question."""
    if (clip := clip_and_weights("run CLIP with default options: the first question")) is None:
        return
    streamclr = [sys.executable, "-m", "streamclr"]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        started = time.perf_counter()
        run = subprocess.Popen([*streamclr, "run", clip, "--out", out], stderr=subprocess.PIPE, text=True)
        if not any(line.startswith("questions are there") for line in run.stderr):
            raise SystemExit("run CLIP says nothing of questions")
        told = time.perf_counter() - started
        page = subprocess.Popen([*streamclr, "label", out, "--port", "0"], stdout=subprocess.PIPE, text=True)
        url = urlsplit(next(line for line in page.stdout if line.startswith("open ")).removeprefix("open ").strip())
        token = parse_qs(url.query)["token"][0]
        name = url.path.removeprefix("/label/")
        address = f"{url.scheme}://{url.netloc}/api/runs/{name}/labels"
        request = Request(address, headers={"Authorization": f"Bearer {token}"})
        while not json.load(urlopen(request))["next"]:
            time.sleep(0.1)
        first = time.perf_counter() - started
        page.kill()
        run.kill()
        run.wait()
        page.wait()
    row(f"run {clip.name} with default options: questions are told", f"{told:.1f} s")
    row(f"run {clip.name} with default options: the first on its page", f"{first:.1f} s", "at most 20 s", first <= 20)


def live(fps: float = 30, n_frames: int = 1800) -> None:
    """`streamclr run CAMERA` with default options, a camera of 720p: frames that were passed over, and its memory."""
    figure = f"run CAMERA with default options, {fps:g} frames a second of 720p"
    if (clip := clip_and_weights(figure)) is None:
        return
    command = [sys.executable, str(HERE / "camera.py"), str(clip), str(fps)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as camera,
        tempfile.TemporaryDirectory() as place,
    ):
        url = camera.stdout.readline().strip()
        out = Path(place) / "run"
        words = ["run", url, "--images", str(n_frames), "--out", "run"]
        told = subprocess.run([sys.executable, "-m", "streamclr", *words], cwd=place, capture_output=True, text=True)
        camera.stdin.close()
        if told.returncode:
            raise SystemExit(f"run CAMERA failed: {told.stderr}")
        results = json.loads((out / "results.json").read_text())
        peak = max(json.loads(line)["memory"] for line in (out / "journal.jsonl").read_text().splitlines()) / 2**30
    account = results["account"]
    lost = 100 * account["passed"].get("learner busy", 0) / account["received"]
    row(
        f"{figure}: passed over because the learner was busy",
        f"{lost:.1f} % of {account['received']:,}",
        "0",
        lost == 0,
    )
    row(f"{figure}: time of learning", f"{100 * results['seconds_learning'] * fps / n_frames:.0f} % of what is there")
    row(f"{figure}: memory", f"{peak:.2f} GiB", "at most 1.5 GiB", peak <= 1.5)
    for line in [line for line in told.stderr.splitlines() if not line.startswith("measuring")][:3]:
        row("what it says", line.replace("|", "/"))


def two_clips() -> None:
    """From two clips to predictions with 40 labels given by keyboard in a real browser, all by default options."""
    from two_clips import clips_at_hand, from_clips_to_predictions  # its browser is not needed elsewhere

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    clips = clips_at_hand(HERE.parents[1] / "shared" / "data")
    if clip_and_weights("from two clips to predictions") is None:
        return
    if chromium is None or not all(clip.exists() for clip in clips):
        row("from two clips to predictions", "skipped: no Chromium or no clips", "CLIPS=a.mp4:b.mp4 make bench")
        return
    with tempfile.TemporaryDirectory() as place:
        for figures in from_clips_to_predictions(clips, chromium, Path(place)):
            row(*figures)


def dashboard(width: int = 16, n_clients: int = 20, phase: float = 12.0, n_phases: int = 24) -> None:
    """A learner while 20 clients read its dashboard, against the same learner while nobody does, in turns."""
    with tempfile.TemporaryDirectory() as out:
        run = Path(out) / "run"
        options = f"--source synthetic:?stc=100 --images 10000000 --width {width} --probes 0 --serve --out {run}"
        command = [sys.executable, "-m", "streamclr", "run", *options.split()]
        learner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        url = learner.stdout.readline().decode().split()[-1]
        try:
            while not (run / "journal.jsonl").exists() or len((run / "journal.jsonl").read_text().splitlines()) < 20:
                time.sleep(1)
            began, n_bytes, failed = [], 0, []
            for number in range(n_phases):
                began.append(time.time())
                if number % 2 == 0:
                    time.sleep(phase)
                    continue
                command = [sys.executable, str(HERE / "clients.py"), url, str(n_clients)]
                clients = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                time.sleep(phase)
                told = json.loads(clients.communicate()[0])
                n_bytes, failed = n_bytes + told["bytes"], failed + told["failed"]
                time.sleep(16)  # after which nobody looks any more
            began.append(time.time())
        finally:
            learner.kill()
            learner.wait()
        steps = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert not failed, failed
    times = [step["time"] for step in steps]
    typical = []
    for start in began[:-1]:
        own = [t for t in times if start + 2 < t < start + phase]  # the first seconds are those of the clients' start
        steps = sorted(b - a for a, b in itertools.pairwise(own))
        typical.append(statistics.mean(steps[: -(len(steps) // 20) or None]))  # other programs of the machine left out
    slower = [on / off - 1 for off, on in zip(typical[::2], typical[1::2], strict=True)]
    measured, error = statistics.mean(slower), statistics.stdev(slower) / len(slower) ** 0.5
    row(
        f"learner of width {width} with {n_clients} clients at its dashboard, slower by",
        f"{100 * measured:.1f} ± {100 * error:.1f} %",
        "at most 2 %",
        measured <= 0.02,
    )
    row("what they read, each, a minute", f"{n_bytes / n_clients / (n_phases / 2) / phase * 60 / 2**20:.1f} MiB")


def shipped() -> None:
    """The exported files against PyTorch, one thread: CIFAR-10's test images, encoders that learned a little."""

    from streamclr.classifier import Classifier, train_head
    from streamclr.encoders.inference import seeded
    from streamclr.models.formats.onnx_file import looked_again, make_onnx, open_onnx
    from streamclr.models.formats.quantise import Calibration
    from streamclr.models.parity import compare, race
    from streamclr.runs.evaluation import extract

    test = cifar()
    if test is None:
        row("the exported classifier", "skipped: no CIFAR-10", "streamclr data get cifar10")
        return
    unseen = torch.from_numpy(test.images(np.arange(0, len(test), len(test) // 1000)))
    for width, n_steps, batch, n_labels in ((16, 20, 256, 5000), (64, 8, 64, 1000)):
        stream = open_stream("cifar10", stc=50)  # so that 512 images have all classes
        with seeded(0):
            encoder = resnet18(width)
        policy = ContrastScoring(rescore_every=50)
        learner = Learner(encoder, policy, buffer=256, batch_size=batch, lr=1e-3, device="cpu")
        for segment in stream.segments(batch, until=batch * n_steps):
            learner.learn_many(segment)
        train = stream.train
        features, labels, _ = extract(learner.model, train, torch.arange(0, len(train), len(train) // n_labels))
        head = train_head(features, labels, 10, quiet=True)
        module = Classifier(learner.model, head, test.classes, 32)
        buffer = learner.buffer.images
        about = {"format_version": 1, "classes": list(test.classes), "size": 32}
        files = {
            "float": make_onnx(module, about, None),
            "int8": make_onnx(module, about, Calibration.of(buffer, pure=False)),
            "pure int8": make_onnx(module, about, Calibration.of(buffer, pure=True)),
        }
        runs = {name: open_onnx(file) for name, file in files.items()}
        found = {
            name: compare(module, runs[name], unseen, len(files[name]), name != "float") for name in ("float", "int8")
        }
        what = f"width {width}, {len(unseen):,} test images of CIFAR-10"
        exact = found["float"]
        row(
            f"ONNX against PyTorch, {what}: largest difference of a probability, same class",
            f"{exact.largest_difference:.1e}, {100 * exact.equal_classes:.1f} %",
            "at most 1e-4, 100 %",
            exact.largest_difference <= 1e-4 and exact.equal_classes == 1,
        )
        equal = found["int8"].equal_classes
        row(f"int8 ONNX against PyTorch, {what}: same class", f"{100 * equal:.1f} %", "at least 99 %", equal >= 0.99)
        row("    looked at again in float", f"{100 * (looked_again(files['int8'], unseen) or 0):.1f} %")
        classes, pure = (
            torch.cat([runs[name](p)[0].argmax(1) for p in unseen.split(64)]) for name in ("float", "pure int8")
        )
        row("    the same class with --pure", f"{100 * float((classes == pure).double().mean()):.1f} %")
        sizes = ", ".join(f"{len(file) / 1e6:.2f}" for file in files.values())
        row("    size, float, int8 and pure int8", f"{sizes} MB")
        for n in exact.seconds:
            gain = exact.seconds_torch[n] / exact.seconds[n]
            row(f"    ONNX as fast as PyTorch, {n} at a time", f"{gain:.2f} times", "at least 1", gain >= 1)
            gain8 = found["int8"].seconds_torch[n] / found["int8"].seconds[n]
            row(f"    int8 as fast as PyTorch, {n} at a time", f"{gain8:.2f} times", "at least 1.5", gain8 >= 1.5)
            for name in ("int8", "pure int8"):
                slow, fast = race(runs["float"], runs[name], unseen, n)
                row(f"    {name} as fast as float ONNX, {n} at a time", f"{slow / fast:.2f} times")
        if width == 16:
            executorch(module, buffer, unseen[::4])


def executorch(module, buffer: torch.Tensor, unseen: torch.Tensor) -> None:
    from streamclr.models.formats.executorch import make_executorch, open_executorch
    from streamclr.models.formats.quantise import Calibration
    from streamclr.models.parity import compare

    if not find_spec("executorch"):
        row("ExecuTorch", "skipped: not installed", "pip install -c constraints.txt -e '.[executorch]'")
        return
    for int8, name in ((False, "ExecuTorch"), (True, "int8 ExecuTorch")):
        content = make_executorch(module, {}, Calibration.of(buffer, pure=True) if int8 else None)
        found = compare(module, open_executorch(content), unseen, len(content), int8)
        row(
            f"{name} against PyTorch, {len(unseen)} of them: largest difference of a probability, same class",
            f"{found.largest_difference:.1e}, {100 * found.equal_classes:.1f} %",
            "" if int8 else "at most 1e-4, 100 %",
            None if int8 else found.problem is None and found.equal_classes == 1,
        )
        row("    size", f"{found.n_bytes / 1e6:.2f} MB")
        row("    as fast as PyTorch, 1 at a time", f"{found.seconds_torch[1] / found.seconds[1]:.2f} times")


RANKS = """
import json, os, sys, time, torch
from streamclr import ContrastScoring, Learner, open_stream, resnet18
from streamclr.compute.allocator import keep_freed_memory
from streamclr.compute.ranks import join
keep_freed_memory()
torch.set_num_threads(1)
with join("cpu") as ranks:
    norm, n_steps = sys.argv[1], 12
    learner = Learner(resnet18(16, norm=norm), ContrastScoring(50, precision="fp32"), buffer=128, device="cpu")
    learner.join(ranks)
    stream = open_stream("synthetic:?size=32").shard(ranks.index, ranks.n, 128)
    segments = [stream.read(128) for _ in range(2 + n_steps)]
    for images in segments[:2]:
        learner.learn_many(images)
    ranks.largest(0)  # all begin at once
    started = time.perf_counter()
    for images in segments[2:]:
        learner.learn_many(images)
    (spent,) = ranks.largest(time.perf_counter() - started)
    if ranks.index == 0:
        print(json.dumps(ranks.n * 128 * n_steps / spent))
"""


def ranks() -> None:
    """Weak scaling on the CPU: as many images and one thread for each rank. Two cores are all that it knows of."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "ranks.py"
        script.write_text(RANKS)
        for norm in ("group", "batch"):
            speeds = []
            for n in (1, 2):
                words = [*torchrun, str(n), str(script), norm]
                speeds.append(json.loads(subprocess.run(words, capture_output=True, check=True, env=env).stdout))
            row(
                f"images per second of two ranks, of one (width 16, {norm} norm, 128 images and one thread each)",
                f"{speeds[1] / speeds[0]:.2f} ({speeds[0]:.0f}, {speeds[1]:.0f})",
            )


SECTIONS = [
    start,
    first_run,
    first_question,
    live,
    two_clips,
    scoring,
    chunks,
    memory,
    agreement,
    duplicates,
    growth,
    overhead,
    predicting,
    shipped,
    dashboard,
    ranks,
    long_runs,
]


def main() -> None:
    sections = {section.__name__: section for section in SECTIONS}
    if "--help" in sys.argv:
        print(f"{__doc__}\nSections: {', '.join(sections)}")
        return
    if unknown := [name for name in sys.argv[1:] if name not in sections]:
        raise SystemExit(f"no section {unknown[0]!r}: {', '.join(sections)}")
    started = time.perf_counter()
    for name in sys.argv[1:] or sections:
        sections[name]()
        print(f"{name}: {(time.perf_counter() - started) / 60:.1f} minutes so far", file=sys.stderr)
    minutes = (time.perf_counter() - started) / 60
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else platform.processor()
    today = datetime.date.today().isoformat()
    lines = [
        f"# Benchmark of {today}",
        "",
        f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; Python "
        f"{platform.python_version()}, torch {torch.__version__}; {minutes:.1f} minutes. Made by "
        f"{f'`python benchmarks/bench.py {chr(32).join(sys.argv[1:])}`' if sys.argv[1:] else '`make bench`'}.",
        "",
        "| figure | measured | target |",
        "|---|---|---|",
        *(f"| {' | '.join(cell.strip() for cell in cells)} |" for cells in ROWS),
    ]
    file = HERE / "results" / f"{'-'.join([today, *sys.argv[1:]])}.md"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
    print(f"\n{minutes:.1f} minutes; written to benchmarks/results/{file.name}")


if __name__ == "__main__":
    main()
