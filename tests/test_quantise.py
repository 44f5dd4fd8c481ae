"""Which images calibrate int8."""

import torch

from streamclr.models.formats.quantise import N_CALIBRATION, Calibration
from support.images import random_images


def among(images, others):
    return (images.unsqueeze(1) == others).flatten(2).all(2).any(1)


def test_ranges_and_doubts_share_no_image():
    buffer = random_images(40, 8)
    ranges, doubts = Calibration.of(buffer, pure=False)
    assert len(ranges) == len(doubts) == 80
    assert among(buffer, ranges).sum() == among(buffer, doubts).sum() == 20
    assert not (among(buffer, ranges) & among(buffer, doubts)).any()
    assert not among(ranges, doubts).any()
    assert ranges.dtype == doubts.dtype == torch.uint8
    again = Calibration.of(buffer, pure=False)
    assert torch.equal(ranges, again.ranges)
    assert torch.equal(doubts, again.doubts)


def test_pure_takes_the_ranges_from_all():
    buffer = random_images(40, 8)
    ranges, doubts = Calibration.of(buffer, pure=True)
    assert doubts is None
    assert among(buffer, ranges).all()


def test_buffers_small_and_large():
    for n in (1, 2, 3):
        ranges, doubts = Calibration.of(random_images(n, 8), pure=False)
        assert len(ranges)
        assert len(doubts)
    ranges, doubts = Calibration.of(random_images(2000, 4), pure=False)
    assert len(ranges) == len(doubts) == 2 * N_CALIBRATION
