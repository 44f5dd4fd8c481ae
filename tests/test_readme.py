"""The README, followed from the top in an empty directory: its code blocks are run exactly as they stand."""

import csv
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import numpy as np
import pytest
from PIL import Image

from support.camera import write_two_scenes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
INSTALL, *COMMANDS = [code for language, code in BLOCKS if language == "sh"]
PROGRAM = "\n".join(code for language, code in BLOCKS if language == "python")


def test_a_newcomer_reads_it_to_the_end():
    assert README.count("\n") <= 150
    assert len(README) <= 9000


def test_its_numbers_are_those_of_the_experiments():
    quoted, measured = (
        set(re.findall(r"-?[\d.]+ ± [\d.]+\d", text))
        for text in (README, (ROOT / "experiments" / "README.md").read_text("utf-8"))
    )
    assert quoted <= measured


def test_it_has_the_five_commands():
    first_words = [shlex.split(line)[:2] for block in COMMANDS for line in block.splitlines()]
    assert [words[1] for words in first_words] == ["run", "label", "predict", "export", "predict"]


class Person:
    """Opens the labelling page's interface with the URL that was printed, and answers what it asks."""

    def __init__(self, url):
        parts = urlsplit(url)
        self.base, self.run = f"http://{parts.netloc}", parts.path.rpartition("/")[2]
        self.token = parse_qs(parts.query)["token"][0]

    def call(self, path, content=None):
        request = urllib.request.Request(self.base + path, headers={"Authorization": f"Bearer {self.token}"})
        if content is not None:
            request.data = json.dumps({"request": uuid4().hex, **content}).encode()
            request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def label_all(self):
        page = f"/api/runs/{self.run}"
        while not (state := json.loads(self.call(f"{page}/labels")))["ready"]:
            time.sleep(0.1)  # the features of the questions are computed when the page is first opened
        numbers = {}
        for name in ("disc", "square"):
            classes = json.loads(self.call(f"{page}/classes", {"name": name}))["classes"]
            numbers[name] = next(one["id"] for one in classes if one["name"] == name)
        while state["next"]:
            task = state["next"][0]
            picture = np.asarray(Image.open(io.BytesIO(self.call(task["picture"]))).convert("RGB"), float)
            red, _, blue = picture.mean((0, 1))
            sent = {"kind": "label", "tasks": [task["id"]], "class": numbers["disc" if red > blue else "square"]}
            state = json.loads(self.call(f"{page}/labels", sent))
        while json.loads(self.call(f"{page}/labels"))["accuracy"]["training"]:
            time.sleep(0.1)


def follow(directory, environment):
    """Run the commands one after the other; returns what each printed."""
    printed = []
    for line in (line for block in COMMANDS for line in block.splitlines()):
        process = subprocess.Popen(
            line, shell=True, executable="/bin/bash", cwd=directory, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        if shlex.split(line)[1] == "label":
            try:
                printed.append(process.stdout.readline())
                assert printed[-1].startswith("open http://"), printed[-1]
                Person(printed[-1].split()[1]).label_all()
            finally:
                os.killpg(process.pid, signal.SIGINT)
                process.communicate()
            assert process.returncode in (0, 130)
            continue
        out, err = process.communicate()
        assert process.returncode == 0, f"{line}\n{out}\n{err}"
        printed.append(out)
    return printed


def check(directory, printed):
    assert "next: streamclr label runs/clip (about 2 minutes)" in printed[0]
    rows = printed[2].splitlines()
    assert rows[0].split() == ["image", "class", "probability"]
    assert len(rows) == 121
    with (directory / "predictions.csv").open(newline="") as file:
        classes = [row["class"] for row in csv.DictReader(file)]
    assert [row.split()[1] for row in rows[1:]] == classes  # the file says what the run says
    truth = ["disc"] * 60 + ["square"] * 60
    assert sum(a == b for a, b in zip(classes, truth, strict=True)) >= 114  # 95 %


@pytest.mark.system
def test_from_a_video_file_to_a_classifier_that_predicts(tmp_path):
    pytest.importorskip("av")
    write_two_scenes(tmp_path / "clip.mp4")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    check(tmp_path, follow(tmp_path, environment))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(step \d+ \| loss \d+\.\d+ \| \d+ of \d+ replaced \| \d+\.\d % re-scored\n){4}", done.stdout)


@pytest.mark.long
def test_the_install_command_is_all_that_is_needed(tmp_path):
    """A copy of the repository, the README's own environment, and nothing of the one that runs the tests."""
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(["bash", "-ec", INSTALL], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(tmp_path / ".venv" / "bin"), os.environ["PATH"]])
    write_two_scenes(tmp_path / "clip.mp4")
    check(tmp_path, follow(tmp_path, environment | {"PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}))
