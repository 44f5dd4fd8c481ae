"""What a step costs beyond the encoder: views, buffer, bookkeeping and journal, as a share of the whole step.

    .venv/bin/python benchmarks/overhead.py [--width 64] [--steps 3]

Each part is called on its own on what a step gives it, after a warm-up, and set against whole steps of the same run.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import torch

from streamclr import Learner, open_stream, resnet18
from streamclr.checkpoint import json_line

parser = argparse.ArgumentParser(description="views, buffer and bookkeeping as a share of a step")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--buffer", type=int, default=256)
arguments = parser.parse_args()


def seconds(function, repeat=10):
    function()
    started = time.perf_counter()
    for _ in range(repeat):
        function()
    return (time.perf_counter() - started) / repeat


stream = open_stream("synthetic:")
learner = Learner(resnet18(width=arguments.width), buffer_size=arguments.buffer, device="cpu")
segments = list(stream.segments(arguments.buffer, until=(arguments.steps + 2) * arguments.buffer))
learner.learn_many(segments[0])
step = learner.learn_many(segments[1])  # the first steps allocate
started = time.perf_counter()
for images in segments[2:]:
    step = learner.learn_many(images)
whole = (time.perf_counter() - started) / arguments.steps

buffer, batch = learner.buffer, learner.buffer.images.repeat(2, 1, 1, 1)
keep = torch.arange(arguments.buffer) * 2  # half of the buffer replaced: more than contrast scoring does


def journal():
    line = dataclasses.asdict(step)
    line["classes"] = stream.source.labels(buffer.arrivals).bincount(minlength=10).tolist()
    with (Path(directory) / "journal.jsonl").open("a") as file:
        file.write(json_line(line))


with tempfile.TemporaryDirectory() as directory:
    parts = {
        "views": seconds(lambda: learner.views(batch, learner.generator)),
        "buffer": seconds(lambda: buffer.replace(buffer.pool(segments[-1]), keep)),
        "journal": seconds(journal),
    }
print(f"one step, width {arguments.width}, buffer {arguments.buffer}, {torch.get_num_threads()} threads: {whole:.2f} s")
for name, spent in parts.items():
    print(f"  {name:8} {spent / whole:7.3%} of the step")
share = sum(parts.values()) / whole
print(f"  together {share:7.3%} of the step (at most 5 %)")
raise SystemExit(share > 0.05)
