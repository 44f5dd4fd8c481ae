import os

import numpy as np
import pytest
import torch

from streamclr.base.errors import UserError
from streamclr.labelling.candidates import Candidates, place, read_candidates
from streamclr.records.label_budget import LabelBudget, n_candidates_that_fit
from support.images import random_images


def filled(path, n, capacity=20, seed=0, size=8, segment=7):
    images = random_images(n, size)
    candidates = Candidates(path, capacity, (3, size, size), seed)
    for first in range(0, n, segment):
        candidates.offer(images[first : first + segment], first)
    candidates.close()
    return images


def test_the_images_are_those_of_their_numbers(tmp_path):
    images = filled(tmp_path / "c", 100)
    found = read_candidates(tmp_path / "c")
    assert len(found) == 20
    assert [c.arrival for c in found] == sorted({c.arrival for c in found})
    for candidate in found:
        assert torch.equal(candidate.image, images[candidate.arrival])


def test_a_short_stream_is_kept_whole(tmp_path):
    filled(tmp_path / "c", 13)
    assert [c.arrival for c in read_candidates(tmp_path / "c")] == list(range(13))


def test_the_file_never_grows(tmp_path):
    filled(tmp_path / "c", 20)
    size = (tmp_path / "c").stat().st_size
    assert size <= 4096 + 20 * (32 + 3 * 8 * 8)
    assert n_candidates_that_fit(size, 8) == 20
    filled(tmp_path / "c", 500)
    assert (tmp_path / "c").stat().st_size == size


def test_each_image_has_the_same_chance(tmp_path):
    n, capacity, n_seeds = 400, 50, 200
    counts = np.zeros(n)
    for seed in range(n_seeds):
        slots = np.full(capacity, -1)
        for number, where in enumerate(place(np.arange(n), capacity, seed)):
            if where < capacity:
                slots[where] = number
        assert len(set(slots)) == capacity
        counts[slots] += 1
    expected = n_seeds * capacity / n
    z = (counts - expected) / np.sqrt(expected * (1 - capacity / n))
    assert abs(z).max() < 5
    thirds = counts.reshape(4, -1).sum(1) / (n_seeds * capacity)
    np.testing.assert_allclose(thirds, 0.25, atol=0.02)


def test_offered_again_after_a_restart_it_is_the_same_file(tmp_path):
    """The run goes back to its last checkpoint, and offers what came after it once more."""
    images = random_images(300, 8)
    whole, broken = (Candidates(tmp_path / name, 20, (3, 8, 8)) for name in ("whole", "broken"))
    for first in range(0, 300, 10):
        whole.offer(images[first : first + 10], first)
    for first in range(0, 250, 10):
        broken.offer(images[first : first + 10], first)
    broken.close()
    again = Candidates(tmp_path / "broken", 20, (3, 8, 8))
    for first in range(130, 300, 10):
        again.offer(images[first : first + 10], first)
    kept = [[(c.key, c.arrival) for c in read_candidates(tmp_path / name)] for name in ("whole", "broken")]
    assert kept[0] == kept[1]


def test_the_same_picture_is_asked_about_once(tmp_path):
    image = random_images(1, 8)
    candidates = Candidates(tmp_path / "c", 20, (3, 8, 8))
    candidates.offer(image.expand(15, -1, -1, -1), 0)
    assert [c.arrival for c in read_candidates(tmp_path / "c")] == [0]


def test_a_write_that_was_cut_costs_one_image(tmp_path):
    filled(tmp_path / "c", 20)
    with (tmp_path / "c").open("r+b") as file:
        file.seek(4096 + 5 * (32 + 192) + 100)
        file.write(b"torn")
    assert [c.arrival for c in read_candidates(tmp_path / "c")] == [n for n in range(20) if n != 5]
    os.truncate(tmp_path / "c", 4096 + 3 * (32 + 192) + 10)
    assert [c.arrival for c in read_candidates(tmp_path / "c")] == [0, 1, 2]


def test_a_file_of_another_kind_is_begun_anew_by_a_run_and_refused_by_a_reader(tmp_path):
    (tmp_path / "c").write_bytes(b"something else" * 1000)
    with pytest.raises(UserError, match="holds no candidates"):
        read_candidates(tmp_path / "c")
    filled(tmp_path / "c", 5)
    assert len(read_candidates(tmp_path / "c")) == 5
    with pytest.raises(UserError, match="no label queue"):
        read_candidates(tmp_path / "missing")


def test_no_room_is_said_before_the_run_begins(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="No space left"):
        Candidates(tmp_path / "c", 20, (3, 8, 8))


@pytest.mark.parametrize(("text", "n_seen", "n"), [("1%", 5000, 50), ("500", 10, 500), ("100%", 7, 7), ("0.5%", 10, 1)])
def test_a_budget_is_a_number_or_a_share(text, n_seen, n):
    assert LabelBudget.parse(text).of(n_seen) == n


@pytest.mark.parametrize("text", ["0", "0%", "101%", "-5", "many", "", "%", "1.5", "nan%", "inf%"])
def test_a_budget_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="label_budget"):
        LabelBudget.parse(text)
