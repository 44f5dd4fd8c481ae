import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamclr import UserError
from streamclr.fleet.split import Subset, deal, whole_of
from streamclr.streams.datasets.images import ArrayImages

LABELS = np.repeat(np.arange(10), 50)


@given(st.integers(1, 30), st.integers(1, 10), st.integers(0, 5))
def test_every_device_has_its_classes_and_no_image_goes_to_two(n_devices, n_classes, seed):
    parts = deal(LABELS, f"classes:{n_classes}", n_devices, seed)
    assert len(parts) == n_devices
    together = np.concatenate(parts)
    assert len(set(together.tolist())) == len(together)
    assert all(len(set(LABELS[part].tolist())) == n_classes for part in parts)
    if n_devices * n_classes >= 10:
        assert len(together) == len(LABELS)


def test_ten_devices_with_two_of_ten_classes_have_even_shares():
    parts = deal(LABELS, "classes:2", 10, 0)
    assert [len(part) for part in parts] == [50] * 10


def test_stc_deals_all_classes_evenly():
    parts = deal(LABELS, "stc", 10, 0)
    assert all(np.bincount(LABELS[part], minlength=10).tolist() == [5] * 10 for part in parts)


@pytest.mark.parametrize(
    ("split", "n", "message"),
    [
        ("classes:11", 2, "1 to 10 classes"),
        ("classes:0", 2, "1 to 10 classes"),
        ("classes:two", 2, "whole number"),
        ("class:2", 2, "no split 'class:2'"),
        ("stc", 0, "at least 1"),
        ("classes:1", 2000, "too few"),
    ],
)
def test_wrong_splits_are_told(split, n, message):
    with pytest.raises(UserError, match=message):
        deal(LABELS, split, n, 0)


def test_a_part_is_some_of_the_images():
    images = np.arange(500, dtype=np.int64)[:, None, None, None].astype(np.uint8) * np.ones((1, 3, 2, 2), np.uint8)
    part = Subset(ArrayImages(images, LABELS, [str(i) for i in range(10)]), np.array([7, 60, 499]))
    assert len(part) == 3
    assert part.labels.tolist() == [0, 1, 9]
    assert part.images(np.array([1, 2]))[:, 0, 0, 0].tolist() == [60, 499 % 256]


def test_a_source_without_classes_cannot_be_dealt_out(tmp_path):
    with pytest.raises(UserError, match="cannot be dealt out"):
        whole_of("synthetic:")
