import itertools
import os
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest

from streamclr.streams.cameras.watch import watch
from support.camera import jpeg


@pytest.fixture(autouse=True)
def meanwhile(monkeypatch):
    """What happens between one look and the next, one thing at a time; there is no other clock."""
    left, n_looks = deque(), itertools.count()

    def sleep(seconds):
        assert next(n_looks) < 1000, "it waits for ever"
        if left:
            left.popleft()()

    monkeypatch.setattr(
        "streamclr.streams.cameras.watch.time", SimpleNamespace(sleep=sleep)
    )  # other threads have the real one
    return left


def names(found, n):
    return [path.name for path, _ in itertools.islice(found, n)]


def test_each_file_once_in_the_order_in_which_it_was_written(tmp_path, meanwhile):
    for i in (1, 2, 10):
        (tmp_path / f"f{i}.jpg").write_bytes(jpeg(i))
        os.utime(tmp_path / f"f{i}.jpg", ns=(0, 1000))
    (tmp_path / "a.jpg").write_bytes(jpeg(3))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / ".hidden.jpg").write_bytes(b"")
    found = watch(str(tmp_path))
    assert names(found, 4) == ["f1.jpg", "f2.jpg", "f10.jpg", "a.jpg"]
    meanwhile.append(lambda: (tmp_path / "b.jpg").write_bytes(jpeg(4)))
    assert names(found, 1) == ["b.jpg"]


def test_a_file_that_is_being_written_is_waited_for(tmp_path, meanwhile):
    content = jpeg(5, (400, 400))
    with (tmp_path / "slow.jpg").open("wb", buffering=0) as file:
        meanwhile += [partial(file.write, content[i : i + 500]) for i in range(0, len(content), 500)]
        assert len(meanwhile) > 5
        (path, _) = next(watch(str(tmp_path)))
        assert path.read_bytes() == content


def test_it_goes_on_after_a_mark(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
        os.utime(tmp_path / f"{i}.jpg", ns=(0, i))
    _, (_, mark) = itertools.islice(watch(str(tmp_path)), 2)
    assert names(watch(str(tmp_path), list(mark)), 2) == ["2.jpg", "3.jpg"]


def test_a_name_that_comes_again_is_another_file(tmp_path, meanwhile):
    found = watch(str(tmp_path))
    (tmp_path / "now.jpg").write_bytes(jpeg(1))
    assert names(found, 1) == ["now.jpg"]
    meanwhile += [(tmp_path / "now.jpg").unlink, lambda: (tmp_path / "now.jpg").write_bytes(jpeg(2))]
    assert names(found, 1) == ["now.jpg"]
    assert not meanwhile


def test_files_of_one_moment_go_on_in_natural_order(tmp_path):
    for name in ("img2", "img3", "img10"):
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(1))
        os.utime(tmp_path / f"{name}.jpg", ns=(0, 5))
    assert names(watch(str(tmp_path), [5, "img2.jpg"]), 2) == ["img3.jpg", "img10.jpg"]
    assert names(watch(str(tmp_path), [5, "img3.jpg"]), 1) == ["img10.jpg"]
