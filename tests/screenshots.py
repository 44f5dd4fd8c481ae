"""The two pictures of the README: a run as it learns, and its labelling page. `make screenshots`."""

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from playwright.sync_api import expect

from streamclr.labelling.session import LabelSession
from streamclr.labelling.store import Labels
from streamclr.records.directory import RunDirectory
from streamclr.streams.stream import open_stream
from support.pages import Served, browser

OUT = Path(__file__).parent.parent / "docs" / "images"
SOURCE = "synthetic:?stc=100&seed=0"
OPTIONS = f"--source {SOURCE} --images 40000 --width 8 --lr 1e-3 --label-budget 1% --rescore-every 4 --policy contrast"
SERVED = "--predict --checkpoint-steps 20 --serve --port 0"
N_BEFORE = 80  # labels that are there when the dashboard is taken


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for chromium in browser():
        page = chromium.new_page(viewport={"width": 1280, "height": 1750})
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory) / "synthetic-contrast"
            learn(page, run)
            label(page, run)


def learn(page, run: Path) -> None:
    command = [sys.executable, "-m", "streamclr", "run", *OPTIONS.split(), *SERVED.split(), "--out", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        page.goto(re.search(r"http://\S+", process.stdout.readline().decode())[0])
        while not RunDirectory(run).checkpoints.numbers():
            time.sleep(1)
        answer(run)
        while (run / "journal.jsonl").read_text().count("\n") < 140 or not (run / "served").exists():
            time.sleep(1)
        page.wait_for_timeout(10_000)
        page.screenshot(path=OUT / "dashboard.png")
        process.stdout.read()


def answer(run: Path) -> None:
    with closing(LabelSession(RunDirectory(run))) as session:
        session.prepare()
        source = open_stream(SOURCE).source
        numbers = {name: session.labels.add_class(name) for name in source.classes}
        for question in session.labels.questions()[:N_BEFORE]:
            name = source.classes[int(source.labels(np.array([question.arrival]))[0])]
            session.labels.answer(f"before-{question.key}", "label", [question.key], numbers[name])


def label(page, run: Path) -> None:
    served = Served("label", run)
    page.set_viewport_size({"width": 1280, "height": 880})
    page.goto(served.url)
    expect(page.locator("#picture")).to_be_visible(timeout=120_000)
    labels, source = Labels(run / "labels.sqlite"), open_stream(SOURCE).source
    truth = {q.key: int(source.labels(np.array([q.arrival]))[0]) for q in labels.questions()}
    for n in range(N_BEFORE + 1, N_BEFORE + 121):
        page.wait_for_selector("#picture[data-task]")
        page.keyboard.press(str((truth[page.locator("#picture").get_attribute("data-task")] + 1) % 10))
        expect(page.locator("#saved")).to_have_text(f"saved, {n} answers", timeout=30_000)
    expect(page.locator("#accuracy")).to_contain_text(re.compile(f"from {N_BEFORE + 120} labels$"), timeout=60_000)
    page.screenshot(path=OUT / "label.png")
    served.close()


if __name__ == "__main__":
    main()
