import json
import time
from statistics import mean

import numpy as np
import pytest

from streamclr.recipe import SCRATCH
from streamclr.streams.datasets.images import ArrayImages
from streamclr.sweeps.compare import PROBE, demo, pixel_probe, run_for_compare
from support.images import make_folder, random_images


def test_pixel_probe_reads_what_is_linear_in_pixels_and_nothing_else():
    labels = np.arange(120) % 2
    noise = random_images(120, size=8).numpy()
    bright = noise // 2
    bright[labels == 1] += 100
    for images, low, high in ((bright, 0.95, 1), (noise, 0.2, 0.8)):
        data = ArrayImages(images, labels, ("dark", "bright"))
        train, test = (
            ArrayImages(data.images(part), labels[part], data.classes) for part in np.split(np.arange(120), [80])
        )
        assert low <= pixel_probe(train, test) <= high


def test_a_job_that_was_killed_between_its_run_and_its_result_has_the_results_of_the_run(tmp_path):
    source = f"folder:{make_folder(tmp_path / 'images', size=8)}"
    config = {"source": source, "images": 16, "buffer": 8, "width": 1, "probes": 0, "fractions": "1"}
    config["classifier"] = "linear"
    first = run_for_compare(tmp_path, **config)
    assert run_for_compare(tmp_path, **config) == json.loads(json.dumps(first))


@pytest.mark.long
def test_the_demo_shows_what_it_promises(tmp_path):
    started = time.monotonic()
    out, _ = demo(str(tmp_path / "demo"))
    assert time.monotonic() - started < 300
    assert (out / "report.html").stat().st_size > 100_000
    rows = json.loads((out / "results.json").read_text())["accuracy"]
    default, fifo, supervised = (rows[name]["0.01"] for name in (SCRATCH.policy, "fifo", "supervised"))
    assert mean(default) >= 0.6
    assert min(default) > max(supervised)
    assert mean(default) > mean(fifo)
    assert rows["raw pixels"][PROBE][0] <= mean(rows[SCRATCH.policy][PROBE]) / 2  # `synthetic:` is no toy
