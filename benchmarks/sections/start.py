"""How long a person waits at first."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

from .measure import Case, Ratio, Spread, in_turns
from .report import row
from .subjects import clip_and_weights

STREAMCLR = [sys.executable, "-m", "streamclr"]
IMPORTS = "import streamclr; from streamclr import Learner, open_stream"  # what a program begins with
MOST_BEYOND_TORCH = 1.0  # seconds


def start_up(turns: int = 5, run: str = "run --source synthetic: --images 64 --probes 0") -> None:
    """What comes before the first step, each in a process of its own, against `import torch`, which is most of it."""
    with tempfile.TemporaryDirectory() as place:
        cases = {
            "import torch": program("import torch"),
            "import streamclr": program("import streamclr"),
            "its Learner and open_stream": program(IMPORTS),
            "streamclr --help": command("--help"),
            "the first step of a run of the built-in stream": first_step(run.split(), Path(place)),
        }
        costs = in_turns(cases, turns)
    torch = costs["import torch"]
    row("import torch", f"{Spread.of([cost.wall for cost in torch])} s")
    for name in list(cases)[1:]:
        row(f"{name}, of `import torch`", Ratio.of(costs[name], torch))
    imported = zip(costs["its Learner and open_stream"], torch, strict=True)
    extra = Spread.of([cost.wall - usual.wall for cost, usual in imported])
    target = f"at most {MOST_BEYOND_TORCH:g} s"
    row("import of streamclr beyond torch's own", f"{extra} s", target, extra.median <= MOST_BEYOND_TORCH)


def program(code: str) -> Case:
    return lambda: _done([sys.executable, "-c", code])


def command(*words: str) -> Case:
    return lambda: _done([*STREAMCLR, *words])


def _done(words: list[str]) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def first_step(words: list[str], place: Path) -> Case:
    """Until the line of the first step is in the journal of a run."""

    def once() -> float:
        with tempfile.TemporaryDirectory(dir=place) as directory:
            return until_first_step([*STREAMCLR, *words], Path(directory) / "run")[1]

    return once


def until_first_step(words: list[str], out: Path, to_its_end: bool = False) -> tuple[float, float]:
    """Seconds of the whole run, or until it was killed, and until its first step."""
    started = time.perf_counter()
    journal, told = out / "journal.jsonl", out.with_suffix(".log")  # the journal has a line for each step
    with told.open("w") as log, subprocess.Popen([*words, "--out", str(out)], stdout=log, stderr=log) as process:
        while process.poll() is None and not (journal.exists() and journal.stat().st_size):
            time.sleep(0.02)
        first = time.perf_counter() - started
        if not to_its_end:
            process.kill()
    if process.returncode > 0:
        raise SystemExit(told.read_text())
    return time.perf_counter() - started, first


def first_run() -> None:
    """`streamclr run CLIP` with default options on a 720p clip: from the command to the first step, and its memory."""
    with tempfile.TemporaryDirectory() as place:
        if (clip := clip_and_weights("run CLIP with default options", Path(place))) is None:
            return
        whole, first = until_first_step([*STREAMCLR, "run", str(clip)], Path(place) / "run", to_its_end=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    row(f"run {clip.name} with default options: the first step", f"{first:.1f} s", "at most 20 s", first <= 20)
    row(f"run {clip.name} with default options: the whole run", f"{whole:.1f} s")
    row(f"run {clip.name} with default options: memory", f"{peak:.2f} GiB", "at most 1.5 GiB", peak <= 1.5)


def first_question() -> None:
    """`streamclr run CLIP`, and `streamclr label RUN` as soon as it is told: until the page has a question."""
    with tempfile.TemporaryDirectory() as place:
        if (clip := clip_and_weights("run CLIP with default options: the first question", Path(place))) is None:
            return
        out = Path(place) / "run"
        started = time.perf_counter()
        run = subprocess.Popen([*STREAMCLR, "run", clip, "--out", out], stderr=subprocess.PIPE, text=True)
        if not any(line.startswith("questions are there") for line in run.stderr):
            raise SystemExit("run CLIP says nothing of questions")
        told = time.perf_counter() - started
        page = subprocess.Popen([*STREAMCLR, "label", out, "--port", "0"], stdout=subprocess.PIPE, text=True)
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
