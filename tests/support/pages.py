"""For tests of the pages: a small finished run, a server in a process of its own, and a real browser."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import sync_playwright

from streamclr.records.options import RunOptions
from streamclr.runs.run import run
from streamclr.web.site import run_id

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync"
ARTEFACTS = Path(__file__).parents[2] / "artefacts"  # screenshots, not committed


def finished_run(out, **options):
    """A run of the built-in stream with a label queue."""
    settings = {"images": 1536, "width": 4, "buffer": 32, "probes": 2, "fractions": "0.1", "label_budget": "80"}
    settings["classifier"], settings["recipe"] = "linear", "paper"
    path, _ = run(RunOptions(source="synthetic:", out=str(out), **settings | options))
    return path


class Served:
    """`streamclr serve RUN` (or `label RUN`), with the URL that it printed."""

    def __init__(self, *words, port=0):
        command = [sys.executable, "-m", "streamclr", *map(str, words), "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        line = self.process.stdout.readline().decode()
        self.url = re.search(r"http://\S+", line)[0]
        self.port, self.token = re.search(r":(\d+)/.*token=(.+)", self.url).groups()
        self.base = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.base, headers={"Authorization": f"Bearer {self.token}"}, timeout=60)

    def api(self, run, path=""):
        return f"/api/runs/{run_id(run)}{path}"

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self):
        self.client.close()
        if self.process.poll() is not None:  # killed
            return
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def find_chromium():
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("no Chromium here: `make .venv/.chromium` installs Debian's, as root")
    return found


def browser():
    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS.split(), timeout=120_000)
        yield one
        one.close()
