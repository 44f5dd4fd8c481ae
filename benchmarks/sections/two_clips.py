"""From two clips to a classifier as a person does it: run, 40 labels by keyboard in a real browser, predict."""

import csv
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from streamclr import open_stream
from streamclr.labelling.candidates import pixels
from streamclr.labelling.store import Labels
from streamclr.records.directory import RunDirectory

from .report import row
from .subjects import clip_and_weights, clips_in

STREAMCLR = [sys.executable, "-m", "streamclr"]
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync"
N_LABELS = 40
SECONDS_A_LABEL = 1.0  # what a quick person takes

Row = tuple[str, str, str, bool]


def two_clips() -> None:
    """From two clips to predictions with 40 labels given by keyboard in a real browser, all by default options."""
    figure, chromium = "from two clips to predictions", shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        row(figure, "skipped: no Chromium")
        return
    with tempfile.TemporaryDirectory() as place:
        if clip_and_weights(figure, Path(place)):
            for figures in from_clips_to_predictions(clips_in(Path(place)), chromium, Path(place)):
                row(*figures)


def from_clips_to_predictions(clips: list[Path], chromium: str, place: Path) -> Iterator[Row]:
    """All with default options. Both clips are read at the same time, as two cameras would be."""
    (place / "clips.txt").write_text("".join(f"{clip}\n" for clip in clips))
    out = place / "run"
    started = time.perf_counter()
    with (place / "run.log").open("w") as log:
        run = subprocess.Popen([*STREAMCLR, "run", "clips.txt", "--out", out], cwd=place, stdout=log, stderr=log)
        while not (out / "config.json").exists():
            time.sleep(0.05)
            if run.poll():
                raise SystemExit((place / "run.log").read_text())
    label = subprocess.Popen([*STREAMCLR, "label", out, "--port", "0"], cwd=place, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+", label.stdout.readline())[0]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS.split())
            page = browser.new_page()
            page.goto(url)
            page.wait_for_selector("#picture[data-task]:not([hidden])", timeout=120_000)
            first = time.perf_counter() - started
            yield "two clips: the first question is on the page", f"{first:.1f} s", "at most 20 s", first <= 20
            give_labels(page, out, clips)
            page.screenshot(path=place / "label.png")
            browser.close()
    finally:
        label.terminate()
        label.wait()
    run.wait()
    table = place / "predictions.csv"
    command = [*STREAMCLR, "predict", out, "--source", "clips.txt", "--csv", table]
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
    minutes = (time.perf_counter() - started) / 60
    right = [row["class"] == Path(row["source"]).stem for row in rows_of(table)]
    share = f"{100 * sum(right) / len(right):.1f} % of {len(right)} frames"
    target = "at least 95 %"
    yield f"two clips: predictions of the right clip after {N_LABELS} labels", share, target, np.mean(right) >= 0.95
    yield "two clips: all of it, a second for each label", f"{minutes:.1f} min", "under 10 min", minutes < 10


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def give_labels(page: Page, out: Path, clips: list[Path]) -> None:
    """By keyboard, as somebody who knows both clips."""
    looks = looks_of(out, clips)
    for i, clip in enumerate(clips):
        page.keyboard.press("a") if i else page.wait_for_selector("#add:not([hidden])")
        page.keyboard.type(clip.stem)
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#classes [data-class] >> nth={i}")
    labels, answered = Labels(out / "labels.sqlite"), set[str]()
    for _ in range(N_LABELS):
        task = wait_for_another(page, answered)
        time.sleep(SECONDS_A_LABEL)
        page.keyboard.press(str(nearest_look(labels.picture(task), looks) + 1))
        answered.add(task)
    while labels.n_answers() < N_LABELS:
        time.sleep(0.1)
    page.wait_for_timeout(3000)  # the classifier of the last answer
    labels.close()


def looks_of(out: Path, clips: list[Path]) -> list[np.ndarray]:
    """The frames of each clip as the run sees them, n x 3 x H x W."""
    size = RunDirectory(out).config.size
    return [np.concatenate([part.numpy() for part in open_stream(clip, size=size).segments(64)]) for clip in clips]


def nearest_look(picture: bytes, looks: list[np.ndarray]) -> int:
    """The number of the clip that a question was taken from."""
    image = pixels(picture).numpy().astype(np.int16)
    return int(np.argmin([np.abs(look - image).mean((1, 2, 3)).min() for look in looks]))


def wait_for_another(page: Page, answered: set[str]) -> str:
    """The next picture, when it has come."""
    while True:
        picture = page.locator("#picture")
        if (task := picture.get_attribute("data-task")) not in {"", None, *answered} and picture.evaluate(
            "image => image.naturalWidth"
        ):
            return task
        page.wait_for_timeout(50)
