"""Runs as a person has them: a live camera, a dashboard with many readers."""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .measure import BENCHMARKS
from .report import row
from .subjects import clip_and_weights


def live(fps: float = 30, n_frames: int = 1800) -> None:
    """`streamclr run CAMERA` with default options, a camera of 720p: frames that were passed over, and its memory."""
    figure = f"run CAMERA with default options, {fps:g} frames a second of 720p"
    with tempfile.TemporaryDirectory() as place:
        if (clip := clip_and_weights(figure, Path(place))) is None:
            return
        command = [sys.executable, str(BENCHMARKS / "camera.py"), str(clip), str(fps)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as camera:
            url = camera.stdout.readline().strip()
            out = Path(place) / "run"
            words = [sys.executable, "-m", "streamclr", "run", url, "--images", str(n_frames), "--out", "run"]
            told = subprocess.run(words, cwd=place, capture_output=True, text=True)
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
                command = [sys.executable, str(BENCHMARKS / "clients.py"), url, str(n_clients)]
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
