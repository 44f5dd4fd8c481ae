"""The two pictures of the README: a run as it learns, and its labelling page. `make screenshots`."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import expect

from streamclr.labelling.store import Labels
from streamclr.streams.stream import open_stream
from support.pages import Served, browser

OUT = Path(__file__).parent.parent / "docs" / "images"
SOURCE = "synthetic:?stc=100&seed=0"
OPTIONS = f"--source {SOURCE} --images 40000 --width 8 --lr 1e-3 --label-budget 1% --rescore-every 4"


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for chromium in browser():
        page = chromium.new_page(viewport={"width": 1280, "height": 1750})
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory) / "synthetic-contrast"
            learn(page, run)
            label(page, run)


def learn(page, run: Path) -> None:
    command = [sys.executable, "-m", "streamclr", "run", *OPTIONS.split(), "--serve", "--out", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        page.goto(re.search(r"http://\S+", process.stdout.readline().decode())[0])
        while not (run / "journal.jsonl").exists() or (run / "journal.jsonl").read_text().count("\n") < 140:
            time.sleep(1)
        page.wait_for_timeout(5000)
        page.screenshot(path=OUT / "dashboard.png")
        process.stdout.read()


def label(page, run: Path) -> None:
    served = Served("label", run)
    page.set_viewport_size({"width": 1280, "height": 880})
    page.goto(served.url)
    expect(page.locator("#picture")).to_be_visible(timeout=120_000)
    labels, source = Labels(run / "labels.sqlite"), open_stream(SOURCE).source
    truth = {q.key: int(source.labels(np.array([q.arrival]))[0]) for q in labels.questions()}
    for n in range(1, 121):
        page.wait_for_selector("#picture[data-task]")
        page.keyboard.press(str((truth[page.locator("#picture").get_attribute("data-task")] + 1) % 10))
        expect(page.locator("#saved")).to_have_text(f"saved, {n} answers", timeout=30_000)
    expect(page.locator("#accuracy")).to_contain_text(re.compile("from 120 labels$"), timeout=60_000)
    page.screenshot(path=OUT / "label.png")
    served.close()


if __name__ == "__main__":
    main()
