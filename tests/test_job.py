import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from streamclr import UserError
from streamclr.sweeps import job as job_module
from streamclr.sweeps.job import RESULT, Clock, Job, do_job, last_log_line, n_seen
from streamclr.sweeps.lab import Lab, LabOptions


def test_a_job_is_known_by_what_it_is_wherever_it_runs(tmp_path, monkeypatch):
    one = Job("one", "run", "module:function", {"images": 100, "width": 64, "out": None})
    same = Job("one", "run", "moved:renamed", {"images": 100, "checkpoint_steps": 3}, ("file",), keeps_run=True)
    assert one.key == same.key
    assert one.key != Job("one", "other", "module:function", one.arguments).key
    assert one.key != Job("one", "run", "module:function", one.arguments | {"width": 8}).key


def test_the_results_of_earlier_versions_have_the_same_name(tmp_path):
    """experiments/jobs is committed: a key that changes would have it all done again."""
    (job,) = Lab(LabOptions(out=tmp_path, seeds=1, device="cpu")).runs(source="synthetic:", images=1000)
    assert job.key == "contrast-0-5b673eaaa0"


def test_the_time_before_an_interruption_counts(tmp_path, monkeypatch):
    now = itertools.count(7.0)  # each look at it takes a second
    monkeypatch.setattr(job_module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    (tmp_path / "seconds.json").write_text("100.0")
    assert Clock(tmp_path).read() == 101
    assert Clock(tmp_path).read() == 102  # read again by the process that goes on


def test_two_threads_read_the_time_at_once(tmp_path):
    clock = Clock(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda _: clock.read() > 0, range(200)))


def test_how_far_it_is_says_the_last_whole_line(tmp_path):
    assert n_seen(tmp_path) == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_text('{"seen": 16}\n{"seen": 32}\n{"see')
    assert n_seen(tmp_path) == 32
    (tmp_path / "run" / "journal.jsonl").rename(tmp_path / "run" / "journal.jsonl.1")
    (tmp_path / "run" / "journal.jsonl").write_text("")  # the file before was full
    assert n_seen(tmp_path) == 32


def test_a_dataset_that_cannot_be_had_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "nothing"))
    Job("one", "test", "support.sweep_jobs:count", {"source": "tiny-imagenet-20?stc=10"}).write(tmp_path)
    with pytest.raises(UserError, match=r"cannot get Tiny ImageNet-20 .*--from PATH"):
        do_job(tmp_path, Clock(tmp_path))


@pytest.mark.system
def test_its_process_ends_with_whoever_started_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__)]))
    process = Job("one", "test", "support.sweep_jobs:sleep", {"told": str(tmp_path), "name": "begun"}).start(
        tmp_path / "job", 1
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(timeout=60) == 1
    assert not (tmp_path / "job" / RESULT).exists()


def test_a_job_of_which_nothing_was_heard(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"\xff first\nlast\n\n")
    assert last_log_line(tmp_path) == "last"
    (tmp_path / "log.txt").write_text("")
    assert last_log_line(tmp_path) == "empty log"
