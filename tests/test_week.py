"""A short week: `benchmarks/week.py` with a hundred thousand frames and small files, killed once."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamclr.records.directory import RunDirectory
from streamclr.records.journal import files_of, lines_of
from support.waiting import until

WEEK = Path(__file__).parents[1] / "benchmarks" / "week.py"
N_FRAMES, SEGMENT, LIMIT = 100_000, 64, 2**18


@pytest.mark.system
def test_a_hundred_thousand_frames_take_no_more_than_the_first_ones(tmp_path):
    out, results = tmp_path / "week", tmp_path / "week.md"
    words = ["--frames", N_FRAMES, "--segment", SEGMENT, "--log-disk", "256K", "--out", out, "--results", results]
    command = [sys.executable, str(WEEK), *map(str, words)]
    run = RunDirectory(out / "run")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        until(lambda: run.path.exists() and first.poll() is None and len(run.checkpoints.numbers()) == 3, seconds=300)
        first.kill()
    assert first.returncode == -signal.SIGKILL
    subprocess.run(command, check=True, capture_output=True)

    steps, n_steps = run.steps(), -(-N_FRAMES // SEGMENT)
    numbers = [step["number"] for step in steps]
    assert numbers == sorted(set(numbers))
    assert numbers[-150:] == list(range(n_steps - 149, n_steps + 1))
    assert numbers[0] <= 16
    assert len(numbers) < 0.8 * n_steps
    images = [json.loads(line)["image"] for line in lines_of(run.path / "predictions.jsonl")]
    assert images == sorted(set(images))
    assert images[-400:] == list(range(N_FRAMES - 400, N_FRAMES))
    assert images[0] == 0
    assert len(images) < 0.03 * N_FRAMES
    people = json.loads((out / "people.json").read_text())
    for name in ("journal.jsonl", "events.jsonl", "predictions.jsonl"):
        assert 0 < people["largest"][name] <= LIMIT
        assert sum(file.stat().st_size for file in files_of(run.path / name) if file.exists()) <= LIMIT
    assert people["status"]["seen"] > N_FRAMES / 2  # by the dashboard
    samples = [json.loads(line) for line in lines_of(out / "samples.jsonl")]
    assert [one["frames"] for one in samples] == sorted({one["frames"] for one in samples})

    # Once predictions are made by a head, memory stays where it is.
    served = [step for step in steps if step["served"]]
    assert served[-1]["number"] - served[0]["number"] > n_steps / 4
    early = max(step["memory"] for step in served[: len(served) // 4])
    assert served[-1]["memory"] < 1.03 * early
    assert "| memory " in results.read_text()
