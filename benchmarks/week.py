"""A week of a camera: 18 million frames, 30 a second, through the loop of a run with all that it keeps.

    .venv/bin/python benchmarks/week.py [--frames 18000000] [--out DIRECTORY]

Frames are of 8 px and the encoder has a hundred weights, so that what is measured is the loop: journal, events,
predictions, answers, metrics, checkpoints as many as in a week, candidates for labels, guards. A second process is the
people: it answers questions once, and reads the dashboard all the time. Stopped or killed, the same command goes on.

Prints a table, and writes it to results/DATE-week.md.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from streamclr import Source, UserError, open_stream
from streamclr.base.files import read_json, write_json
from streamclr.base.machine import cpu_name
from streamclr.base.options import parse_size
from streamclr.compute.allocator import keep_freed_memory
from streamclr.compute.memory import resident
from streamclr.labelling.candidates import pixels
from streamclr.labelling.session import LabelSession
from streamclr.records.directory import RunDirectory
from streamclr.records.journal import Journal, cut, lines_of
from streamclr.records.options import RunOptions
from streamclr.records.plan import resolve
from streamclr.runs.assemble import make_learner
from streamclr.runs.loop import learn_stream
from streamclr.runs.status import look
from streamclr.web.view import RunView

HERE = Path(__file__).parent
A_WEEK, FPS, SIZE = 18_000_000, 30, 8
N_CHECKPOINTS = 7 * 24 * 6  # one every ten minutes
N_SAMPLES = 180
LOOK_SECONDS = 0.5
MIB = 2**20


def encoder() -> nn.Module:
    """As `--encoder week:encoder` makes it."""
    net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 8))
    net.n_features = 8
    return net


class Samples:
    """Memory and clocks of this process as the frames go by, in a file; those after `n_frames` are taken back."""

    def __init__(self, path: Path, every: int, n_frames: int = 0):
        cut(path, n_frames)
        self.every, self._file, self._due = every, Journal(path), n_frames

    def take(self, n_frames: int) -> None:
        """Call it often."""
        if n_frames >= self._due:
            self._due = n_frames + self.every
            clocks = {"seconds": time.perf_counter(), "cpu": time.process_time()}
            self._file.write({"frames": n_frames, "memory": resident(), "process": os.getpid()} | clocks)


class Week(Source):
    """Scenes of 16 frames, by day and by night."""

    def __init__(self, n_frames: int):
        self.n_images = n_frames
        self.samples: Samples | None = None
        rng = np.random.default_rng(0)
        self._scenes = rng.integers(0, 160, (1024, 3, 2, 2), np.uint8).repeat(4, 2).repeat(4, 3)
        self._noise = rng.integers(0, 8, (16, 3, SIZE, SIZE), np.uint8)

    def images(self, numbers: np.ndarray) -> np.ndarray:
        if self.samples is not None:
            self.samples.take(int(numbers[0]))
        light = (numbers // 512 % 2 * 80).astype(np.uint8)
        return self._scenes[numbers // 16 % 1024] + self._noise[numbers % 16] + light[:, None, None, None]

    def tracks(self, numbers: np.ndarray) -> np.ndarray:
        return numbers // 16


def learn(out: Path, n_frames: int, segment: int, log_disk: str) -> None:
    """The run, from where it was."""
    keep_freed_memory()
    torch.set_num_threads(1)
    week = Week(n_frames)
    options = RunOptions(
        encoder="week:encoder",
        images=n_frames,
        out=str(out / "run"),
        segment=segment,
        buffer=256,
        batch=32,
        guards="on",
        predict=True,
        to=(str(out / "answers.jsonl"),),
        metrics=0,
        label_budget="200",
        checkpoint_minutes=0,
        checkpoint_steps=max(20, n_frames // segment // N_CHECKPOINTS),
        log_disk=log_disk,
        device="cpu",
    )
    stream = open_stream(week)
    plan = resolve(options, stream)
    with closing(RunDirectory.of(plan)) as directory:
        latest = directory.checkpoints.latest()
        position = 0 if latest is None else latest[1]["stream"]["position"]
        if position == n_frames:
            return
        week.samples = Samples(out / "samples.jsonl", n_frames // N_SAMPLES, position)
        command = [sys.executable, str(HERE / "week.py"), "--people", "--frames", str(n_frames), "--out", str(out)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as people:
            learn_stream(plan, make_learner(plan), stream, directory)
            people.communicate()


def be_the_people(out: Path, n_frames: int) -> None:
    """Look at the dashboard until standard input is closed; answer the questions as soon as there are some."""
    run, told = out / "run", out / "people.json"
    largest = Counter(read_json(told)["largest"] if told.exists() else {})
    samples, view, has_answered, is_over = None, RunView(run), False, False
    os.set_blocking(sys.stdin.fileno(), False)
    while not is_over:
        is_over = sys.stdin.buffer.read() == b""
        look(run)
        view.update()
        view.now()
        view.wall.update()
        status = view.status()
        samples = samples or Samples(out / "people.jsonl", n_frames // N_SAMPLES, status["seen"])
        samples.take(status["seen"])
        largest |= on_disk(run)
        write_json(told, {"largest": largest, "status": status})
        if not has_answered:
            with suppress(UserError):
                has_answered = answer(run)
        time.sleep(LOOK_SECONDS)


def answer(run: Path) -> bool:
    """Which are by day and which by night."""
    with closing(LabelSession(RunDirectory(run))) as session:
        if session.labels.answers():
            return True
        session.prepare()
        if len(session.questions) < 40:
            return False
        for question in session.questions:
            name = "day" if pixels(session.labels.picture(question.key)).float().mean() > 120 else "night"
            session.labels.answer(question.key, "label", [question.key], session.labels.class_named(name))
    return True


def on_disk(run: Path) -> Counter[str]:
    """Bytes by file; a journal with all its files, a directory with all below it."""
    found: Counter[str] = Counter()
    for place, _, names in os.walk(run):  # which passes over what is deleted meanwhile
        for path in (Path(place) / name for name in names):
            with suppress(FileNotFoundError):
                name = path.relative_to(run).parts[0]
                found[re.sub(r"^\.|\.\d+$|(?<=jsonl).*|-(wal|shm)$", "", name)] += path.stat().st_size
    found["all of it"] = found.total()
    return found


# ----------------------------------------------------------------------------------------------------------------------


Row = tuple[str, str, str]  # figure, measured, target


def figures(out: Path, n_frames: int, segment: int, log_disk: str) -> list[Row]:
    samples = read_samples(out / "samples.jsonl")
    n_steps = -(-n_frames // segment)
    rows = [("frames, steps", f"{n_frames:,}, {n_steps:,}", "")]
    rows.append(memory_row("memory of the run", samples, n_frames))
    rows.append(memory_row("memory of the dashboard", read_samples(out / "people.jsonl"), n_frames))
    rows.append(pace_row("CPU time of a step", samples, "cpu", n_frames, segment))
    rows.append((*pace_row("time of a step", samples, "seconds", n_frames, segment)[:2], ""))
    speed = 1 / of_a_frame(samples, "seconds", 0, n_frames) / FPS
    rows.append(("as fast as the camera", f"{speed:.0f} times", ""))
    limit = parse_size(log_disk)
    for name, n_bytes in sorted(read_json(out / "people.json")["largest"].items()):
        is_log = name.endswith(".jsonl")
        if is_log or n_bytes > MIB / 100:
            target = verdict(f"at most {limit / MIB:g} MiB", n_bytes <= limit) if is_log else ""
            rows.append((f"on the disk at most: {name}", f"{n_bytes / MIB:.2f} MiB", target))
    for name, n in (("journal", n_steps), ("predictions", n_frames)):
        n_left = sum(1 for _ in lines_of(out / "run" / f"{name}.jsonl"))
        rows.append((f"lines of {name}.jsonl that are left", f"{n_left:,} of {n:,}", ""))
    return rows


def read_samples(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(path)]


def memory_row(what: str, samples: list[dict[str, Any]], n_frames: int) -> Row:
    """Of the last process: after a 1/18 of the frames, and at the end."""
    own = [one for one in samples if one["process"] == samples[-1]["process"]]
    early = next(one for one in own if one["frames"] >= own[0]["frames"] + n_frames / 18)
    before, after = (one["memory"] / MIB for one in (early, own[-1]))
    grown = 100 * (after / before - 1)
    figure = f"{what} at frame {early['frames']:,} and at frame {own[-1]['frames']:,}"
    return figure, f"{before:.1f} and {after:.1f} MiB: {grown:+.2f} %", verdict("at most +1 %", grown <= 1)


def pace_row(what: str, samples: list[dict[str, Any]], clock: str, n_frames: int, segment: int) -> Row:
    begin = n_frames / 18  # until then the people may still be about to answer, and there are no classes to predict
    tenths = (begin, begin + n_frames / 10), (0.9 * n_frames, n_frames)
    first, last = (1000 * segment * of_a_frame(samples, clock, *tenth) for tenth in tenths)
    measured = f"{first:.2f} and {last:.2f} ms: {100 * (last / first - 1):+.1f} %"
    figure = f"{what} in a tenth of the frames, after 1/18 of them and at the end"
    return figure, measured, verdict("at most +5 %", last / first <= 1.05)


def of_a_frame(samples: list[dict[str, Any]], clock: str, begin: float, end: float) -> float:
    """Seconds for a frame between two places, without those between two processes."""
    pairs = [
        (a, b)
        for a, b in pairwise(samples)
        if a["process"] == b["process"] and begin <= a["frames"] and b["frames"] <= end
    ]
    return sum(b[clock] - a[clock] for a, b in pairs) / sum(b["frames"] - a["frames"] for a, b in pairs)


def verdict(target: str, met: bool) -> str:
    return f"{target} ({'met' if met else 'not met'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=A_WEEK)
    parser.add_argument("--segment", type=int, default=256, help="new frames in one step")
    parser.add_argument("--log-disk", default="64M")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "streamclr-week")
    parser.add_argument("--results", type=Path, default=HERE / "results" / f"{datetime.date.today()}-week.md")
    parser.add_argument("--people", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.people:
        return be_the_people(given.out, given.frames)
    given.out.mkdir(parents=True, exist_ok=True)
    learn(given.out, given.frames, given.segment, given.log_disk)
    made = f"--frames {given.frames} --segment {given.segment} --log-disk {given.log_disk}"
    lines = [
        f"# Benchmark of {datetime.date.today()}",
        "",
        f"{cpu_name()}, {os.cpu_count()} cores, one thread of torch; Python {platform.python_version()}, "
        f"torch {torch.__version__}. Made by `python benchmarks/week.py {made}`.",
        "",
        "| figure | measured | target |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in figures(given.out, given.frames, given.segment, given.log_disk)),
    ]
    given.results.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
