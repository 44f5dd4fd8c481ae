"""The two pictures of the docs: a run as it learns from two clips, and its labelling page.

make screenshots CLIPS=dog.mp4:coffee.mp4
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from playwright.sync_api import expect

from streamclr.labelling.session import LabelSession
from streamclr.labelling.store import Labels
from streamclr.records.directory import RunDirectory
from support.pages import Served, browser

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from sections.two_clips import looks_of, nearest_look  # noqa: E402

OUT = ROOT / "docs" / "images"
OPTIONS = "--predict --checkpoint-steps 20 --serve --port 0"
PASSES = 24
N_STEPS = 140  # before the dashboard is taken
N_BEFORE, N_LABELS = 30, 30  # labels that are there when the dashboard is taken, and labels by keyboard


def main() -> None:
    clips = [Path(name).resolve() for name in os.environ.get("CLIPS", "").split(":") if name]
    if len(clips) != 2:
        raise SystemExit("give two clips: make screenshots CLIPS=dog.mp4:coffee.mp4")
    OUT.mkdir(exist_ok=True)
    for chromium in browser():
        page = chromium.new_page(viewport={"width": 1280, "height": 1750})
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            (place / "clips.txt").write_text("".join(f"{clip}?passes={PASSES}\n" for clip in clips))
            learn(page, place, clips)
            label(page, place / "clips", clips)


def learn(page, place: Path, clips: list[Path]) -> None:
    run = place / "clips"
    command = [sys.executable, "-m", "streamclr", "run", "clips.txt", *OPTIONS.split(), "--out", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=place) as process:
        page.goto(re.search(r"http://\S+", process.stdout.readline().decode())[0])
        while not RunDirectory(run).checkpoints.numbers():
            time.sleep(1)
        answer(run, clips)
        while (run / "journal.jsonl").read_text().count("\n") < N_STEPS or not (run / "served").exists():
            time.sleep(1)
        page.wait_for_timeout(5_000)
        page.screenshot(path=OUT / "dashboard.png")
        process.stdout.read()


def answer(run: Path, clips: list[Path]) -> None:
    looks = looks_of(run, clips)
    with closing(LabelSession(RunDirectory(run))) as session:
        session.prepare()
        numbers = [session.labels.add_class(clip.stem) for clip in clips]
        for question in session.labels.questions()[:N_BEFORE]:
            number = numbers[nearest_look(session.labels.picture(question.key), looks)]
            session.labels.answer(f"before-{question.key}", "label", [question.key], number)


def label(page, run: Path, clips: list[Path]) -> None:
    served, looks = Served("label", run), looks_of(run, clips)
    page.set_viewport_size({"width": 1280, "height": 880})
    page.goto(served.url)
    expect(page.locator("#picture")).to_be_visible(timeout=120_000)
    labels = Labels(run / "labels.sqlite")
    for n in range(N_BEFORE + 1, N_BEFORE + N_LABELS + 1):
        page.wait_for_selector("#picture[data-task]")
        picture = labels.picture(page.locator("#picture").get_attribute("data-task"))
        page.keyboard.press(str(nearest_look(picture, looks) + 1))
        expect(page.locator("#saved")).to_have_text(f"saved, {n} answers", timeout=30_000)
    done = re.compile(f"from {N_BEFORE + N_LABELS} labels$")
    expect(page.locator("#accuracy")).to_contain_text(done, timeout=60_000)
    page.screenshot(path=OUT / "label.png")
    served.close()


if __name__ == "__main__":
    main()
