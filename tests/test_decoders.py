"""Image files that are decoded by other processes, ahead of the step."""

import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from streamclr import UserError, open_stream
from streamclr.cli.entry import main
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream
from streamclr.runs.run import run
from streamclr.streams.datasets.decoders import Decoders
from streamclr.streams.frame import BadFrame
from streamclr.streams.sight import MIDDLE, decode
from support.images import make_folder
from support.runs import small_options
from support.waiting import until


@pytest.fixture
def folder(tmp_path):
    """40 images of two classes, one of them damaged."""
    root = make_folder(tmp_path / "images")
    (root / "ant" / "3.png").write_bytes(b"no image")
    return root


class InThisProcess:
    """Decoders that keep count of what they are asked for."""

    def __init__(self):
        self.asked = []

    def decode(self, path, size, sight):
        self.asked.append(path)
        future = Future()
        try:
            future.set_result(decode(path, size, sight))
        except BadFrame as error:
            future.set_exception(error)
        return future


def counted(folder, **options):
    stream = open_stream(f"folder:{folder}", **options)
    one = stream.source.streamed.decoders = InThisProcess()
    return stream, one.asked


def segments(stream, **options):
    return [images.clone() for images in stream.segments(8, **options)]


@pytest.mark.system
def test_the_stream_is_the_same_as_without(folder):
    """The same images in the same order, the same account, and the same after a resume."""
    options = {"stc": 5, "size": 12}
    here, there = (open_stream(f"folder:{folder}?decoders={n}", **options) for n in (0, 2))
    for until_image in (24, 90):
        for one, other in zip(segments(here, until=until_image), segments(there, until=until_image), strict=True):
            assert torch.equal(one, other)
        assert here.state_dict() == there.state_dict()
    resumed = open_stream(f"folder:{folder}?decoders=1", **options)
    resumed.load_state_dict(here.state_dict())
    assert torch.equal(resumed.read(20), here.read(20))
    for index in range(2):
        shards = (stream.shard(index, 2, 8) for stream in (here, there))
        for one, other in zip(*(segments(shard, until=50) for shard in shards), strict=True):
            assert torch.equal(one, other)


def test_a_file_is_read_once_and_never_more_than_two_segments_ahead(tmp_path):
    stream, asked = counted(make_folder(tmp_path / "images"), stc=1)
    for n_read, _ in enumerate(stream.segments(8, until=40), 1):
        assert len(asked) == min(8 * n_read + 16, 40)
    assert len(set(asked)) == 40
    assert not stream.source.streamed._coming


def test_what_was_read_ahead_in_vain_is_dropped(folder):
    stream, _ = counted(folder, stc=1)
    reading = stream.segments(8)
    state = stream.state_dict()
    first = next(reading).clone()
    stream.load_state_dict(state)  # as when a run goes back to its last checkpoint
    assert torch.equal(next(reading), first)
    assert len(stream.source.streamed._coming) == 16
    reading.close()
    assert not stream.source.streamed._coming


def test_labelled_images_that_are_read_between_do_not_change_the_stream(folder):
    stream, _ = counted(folder, stc=5)
    own = []
    for images in stream.segments(8, until=80):
        own.append(images.clone())
        stream.train.images(np.array([1, 2, 1, 5]))
    assert torch.equal(torch.cat(own), torch.cat(segments(open_stream(f"folder:{folder}", stc=5), until=80)))


def test_a_damaged_file_is_the_same_error_and_nothing_is_read_twice(folder):
    stream, asked = counted(folder)
    stream.read(40)
    assert len(asked) == 40
    assert stream.account.rejected == {"not an image": 1}
    with pytest.raises(BadFrame) as error:
        stream.source.streamed.images(np.array([2, 3]))
    with pytest.raises(BadFrame) as expected:
        decode(folder / "ant" / "3.png", 16)
    assert str(error.value) == str(expected.value)


@pytest.mark.system
def test_errors_come_through_and_a_process_that_ended_is_told(folder):
    decoders = Decoders(1)
    paths = [folder / "ant" / "3.png", folder / "missing é.png"]
    for path in paths:
        with pytest.raises(BadFrame) as error:
            decoders.decode(path, 16, MIDDLE).result()
        with pytest.raises(BadFrame) as expected:
            decode(path, 16)
        assert (str(error.value), error.value.reason) == (str(expected.value), expected.value.reason)
    (process,) = decoders._idle
    process.send_signal(signal.SIGTERM)  # as a service manager does, to all processes at once
    good = folder / "bee" / "1.png"
    assert np.array_equal(decoders.decode(good, 16, MIDDLE).result(), decode(good, 16))
    process.kill()
    process.wait()
    with pytest.raises(UserError, match=r"^a process ended with code -9 while it decoded .*1\.png: --decoders 0"):
        decoders.decode(good, 16, MIDDLE).result()
    assert np.array_equal(decoders.decode(good, 16, MIDDLE).result(), decode(good, 16))  # by a new one


READS = """
import os, signal, sys
from streamclr import open_stream
from streamclr.streams.datasets import decoders
start, pids = decoders._start, []
def noted():
    process = start()
    pids.append(process.pid)
    return process
decoders._start = noted
for number, _ in enumerate(open_stream(sys.argv[1], decoders=2, stc=1).segments(8)):
    if number == 3:
        print(*pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else sys.exit()
"""


@pytest.mark.system
@pytest.mark.parametrize("how", ["exits", "killed"])
def test_no_process_is_left(folder, how):
    words = [sys.executable, "-c", READS, str(folder), how]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == (0 if how == "exits" else -signal.SIGKILL)
    assert ended.stderr == ""
    pids = ended.stdout.split()
    assert len(pids) == 2
    until(lambda: not any(_is_decoding(pid) for pid in pids))


def _is_decoding(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"decoders" in file.read()
    except OSError:
        return False


@pytest.mark.system
def test_a_run_ends_the_same_with_any_number_of_them(tmp_path):
    (tmp_path / "other").mkdir()
    options = replace(small_options(tmp_path), decoders=0)
    path, results = run(options)
    other, with_two = run(replace(options, decoders=2, out=str(tmp_path / "other" / "run"), checkpoint_steps=3))
    for name in ("model.safetensors", "buffer.safetensors"):
        assert (path / name).read_bytes() == (other / name).read_bytes()
    assert results["labels"] == with_two["labels"]
    (other / "results.json").unlink()  # as if it was interrupted: it goes on with another number
    saved = Checkpoints(other / "checkpoints").numbers()
    Checkpoints(other / "checkpoints").drop_after(saved[0])
    run(replace(options, decoders=1, out=str(other)))
    assert (path / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--source", "synthetic:", "--decoders", "2"], "decoders is 2, and synthetic: has no image files"),
        (["--source", "DIR", "--decoders", "-1"], "decoders is -1: use 0"),
        (["--source", "DIR", "--decoders", "65"], "to 64"),
    ],
)
def test_bad_numbers_of_decoders(folder, words, told, capsys):
    assert main(["run", *(word.replace("DIR", str(folder)) for word in words)]) == 2
    error = capsys.readouterr().err.strip()
    assert told in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("gpu", "device", "environment", "n"),
    [
        (False, None, {}, 0),
        (True, "cpu", {}, 0),
        (True, None, {}, 5),  # of 6 threads
        (True, "cuda", {"LOCAL_WORLD_SIZE": "2"}, 11),  # of 24 cores
        (True, None, {"LOCAL_WORLD_SIZE": "1"}, 16),
    ],
)
def test_as_many_as_a_gpu_can_use(folder, gpu, device, environment, n, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(os, "cpu_count", lambda: 24)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    own = open_run_stream(RunOptions(source=str(folder), device=device, recipe="paper")).source.streamed.decoders
    assert (own._pool._max_workers if own else 0) == n
    written = open_run_stream(RunOptions(source=f"folder:{folder}?decoders=3", device=device, recipe="paper"))
    assert written.source.streamed.decoders._pool._max_workers == 3
    assert open_run_stream(RunOptions(source="synthetic:", device=device, recipe="paper")).size == 32
