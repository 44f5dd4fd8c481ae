"""Several processes that share one encoder."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .report import row

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
