import itertools

import numpy as np
import pytest
import torch

from streamclr import UserError, open_stream
from streamclr.streams.datasets.synthetic import CLASSES


def test_tracks_are_stc_long_and_change_class():
    source = open_stream("synthetic:?stc=7").source
    runs = [(c, len(list(g))) for c, g in itertools.groupby(source.labels(np.arange(7 * 500)).tolist())]
    assert {length for _, length in runs} == {7}
    counts = torch.tensor([c for c, _ in runs]).bincount()
    assert counts.tolist() == [50] * 10


def test_tracks_have_numbers():
    stream = open_stream("synthetic:?stc=7&train=20&test=10")
    assert stream.tracks(torch.arange(21)).tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert stream.shard(1, 2, 7).tracks(torch.arange(14)).tolist() == [1] * 7 + [3] * 7
    assert stream.train.tracks.tolist() == list(range(20))  # each a frame of that track of the stream
    assert np.array_equal(stream.source.labels(7 * stream.train.tracks), stream.train.labels)
    assert stream.test.tracks.min() > 10**18  # of tracks that the stream never shows


def test_consecutive_frames_are_alike_and_not_the_same():
    images = open_stream("synthetic:?stc=50").read(200).float()
    change = (images[1:] - images[:-1]).abs().mean((1, 2, 3))
    inside = torch.tensor([i % 50 != 49 for i in range(199)])
    assert change[inside].max() < change[~inside].min()
    assert change[inside].min() > 0


def test_deterministic_by_seed_and_independent_of_what_was_read_before():
    source, again = open_stream("synthetic:").source, open_stream("synthetic:").source
    numbers = np.array([12_345, 7, 400, 7])
    images = source.images(numbers)
    again.images(np.arange(30))
    assert np.array_equal(images, again.images(numbers))
    assert np.array_equal(images[1], images[3])
    assert not np.array_equal(images, open_stream("synthetic:?seed=1").source.images(numbers))


@pytest.mark.parametrize("size", [8, 33, 96])
def test_any_size(size):
    assert open_stream(f"synthetic:?size={size}").read(3).shape == (3, 3, size, size)


def test_test_images_are_never_in_the_stream():
    source = open_stream("synthetic:?stc=1").source
    train, test = source.train, source.test
    first, stream = (torch.from_numpy(s.images(np.arange(n))).float() for s, n in ((test, 50), (source, 2000)))
    assert torch.cdist(first.flatten(1), stream.flatten(1)).min() > 100
    assert len(train) == 5000
    assert np.bincount(train.labels).tolist() == [500] * 10
    assert np.bincount(test.labels).tolist() == [200] * 10


def test_fewer_labelled_images_are_the_first_of_the_default_ones():
    few, default = open_stream("synthetic:?train=40&test=30", size=16), open_stream("synthetic:", size=16)
    for some, every in ((few.train, default.train), (few.test, default.test)):
        numbers = np.arange(len(some))
        assert np.array_equal(some.labels, every.labels[numbers])
        assert np.array_equal(some.images(numbers), every.images(numbers))
    assert (len(few.train), len(few.test), len(default.train), len(default.test)) == (40, 30, 5000, 2000)


@pytest.mark.parametrize("option", ["train=9", "test=0", "train=100001", "test=-1"])
def test_too_few_or_too_many_labelled_images_are_refused(option):
    name, n = option.split("=")
    with pytest.raises(UserError, match=f"^{name} is {n}: use 10 to 100,000 labelled images$"):
        open_stream(f"synthetic:?{option}")


def test_neither_shape_nor_texture_alone_tells_the_class():
    shapes, textures = zip(*CLASSES.values(), strict=True)
    assert set(shapes) == {"disc", "square", "triangle", "petals", "star"}
    assert set(textures) == {"rings", "rays", "dots", "checks", "stripes"}
    assert len(set(CLASSES.values())) == 10
    assert len(set(shapes)) < 10
    assert len(set(textures)) < 10
