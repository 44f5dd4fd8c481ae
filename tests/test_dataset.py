import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamclr import UserError
from streamclr.fleet.split import Subset
from streamclr.streams.datasets.images import ArrayImages, DatasetSource, every_fifth_track
from streamclr.streams.stream import DatasetStream


def numbered_dataset(counts):
    """Images whose first pixel says their index, `counts[c]` of each class, shuffled."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    images = np.zeros((len(labels), 3, 8, 8), np.uint8)
    for byte in range(3):
        images[:, byte] = ((np.arange(len(labels)) >> (8 * byte)) & 255)[:, None, None]
    return ArrayImages(images, labels, [f"class {c}" for c in range(len(counts))])


def indices(images):
    return sum(images[:, byte, 0, 0].long() << (8 * byte) for byte in range(3)).tolist()


def stream(counts, stc, seed=0, **options):
    data = numbered_dataset(counts)
    return DatasetStream(DatasetSource(data, data, None, stc, seed, **options))


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (np.zeros((2, 3, 8, 8), np.float32), "2 x 3 x 8 x 8 of float32: give n x 3 x H x W of uint8"),
        (np.zeros((2, 3, 8, 8), np.int64), "of int64"),
        (np.zeros((2, 8, 8, 3), np.uint8), "2 x 8 x 8 x 3 of uint8"),
        (np.zeros((3, 3, 8, 8), np.uint8), "3 images and 2 labels"),
    ],
)
def test_images_that_are_not_uint8_are_refused(images, told):
    with pytest.raises(UserError, match=told):
        ArrayImages(images, np.zeros(2), ["a"])


def test_a_source_of_float_images_is_refused():
    source = stream([5], None).source
    source.streamed.images = lambda numbers: np.zeros((len(numbers), 3, 8, 8))
    with pytest.raises(UserError, match="of float64: give n x 3 x H x W of uint8"):
        DatasetStream(source).read(2)


def run_lengths(labels):
    return [(label, len(list(group))) for label, group in itertools.groupby(labels)]


@settings(max_examples=40)
@given(
    n_classes=st.integers(2, 7),
    n_runs=st.integers(1, 5),
    stc=st.integers(2, 9),
    seed=st.integers(0, 99),
    n_passes=st.integers(1, 4),
)
def test_runs_are_exactly_stc_long_within_and_across_passes(n_classes, n_runs, stc, seed, n_passes):
    s = stream([n_runs * stc] * n_classes, stc, seed)
    n = n_classes * n_runs * stc
    labels = s.source.labels(np.arange(n_passes * n)).tolist()
    assert {length for _, length in run_lengths(labels)} == {stc}
    seen = indices(s.read(n_passes * n))
    for i in range(n_passes):
        assert sorted(seen[i * n : (i + 1) * n]) == list(range(n))


def test_cifars_shape():
    s = stream([500] * 10, 50)
    labels = s.source.labels(np.arange(15_000)).tolist()
    assert {length for _, length in run_lengths(labels)} == {50}
    first, second = labels[:5000], labels[5000:10_000]
    assert first != second  # a new order each pass


def test_a_class_that_does_not_divide_ends_with_one_shorter_run():
    s = stream([25, 31, 10], 10)
    runs = run_lengths(s.source.labels(np.arange(66)).tolist())
    assert sorted(runs) == [(0, 5), (0, 10), (0, 10), (1, 1), (1, 10), (1, 10), (1, 10), (2, 10)]


def test_a_class_with_more_than_half_of_the_runs_repeats_as_rarely_as_it_must():
    s = stream([60, 10], 10)
    labels = s.source.labels(np.arange(70)).tolist()
    assert sorted(indices(s.read(70))) == list(range(70))
    assert run_lengths(labels)[0][0] == 0
    assert len(run_lengths(labels)) == 3  # class 1 stands between runs of class 0


def test_stc_1_is_iid():
    s = stream([300] * 4, 1)
    labels = torch.tensor(s.source.labels(np.arange(1200)).tolist())
    repeats = (labels[1:] == labels[:-1]).float().mean()
    assert 0.18 < repeats < 0.32  # one in four for independent draws
    assert sorted(indices(s.read(1200))) == list(range(1200))


@settings(max_examples=25)
@given(position=st.integers(0, 400), stc=st.sampled_from([1, 2, 5, None]), seed=st.integers(0, 5), n=st.integers(1, 50))
def test_resumes_exactly_from_any_position(position, stc, seed, n):
    whole, resumed = stream([20] * 4, stc, seed, passes=6), stream([20] * 4, stc, seed, passes=6)
    list(whole.segments(7, until=position))
    state = whole.state_dict()
    resumed.load_state_dict(state)
    ahead = [indices(images) for images in whole.segments(n)]
    assert [indices(images) for images in resumed.segments(n)] == ahead
    assert sum(map(len, ahead)) == 480 - position


def test_same_seed_same_stream_whatever_the_segment_size():
    streams = [indices(torch.cat(list(stream([20] * 4, 5, 3).segments(n, until=160)))) for n in (1, 7, 100)]
    assert streams[0] == streams[1] == streams[2]
    assert streams[0] != indices(stream([20] * 4, 5, 4).read(160))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stc": 0}, "stc is 0"),
        ({"stc": 5, "passes": 0}, "passes is 0"),
        ({"stc": 5, "order": "iid"}, "order=iid and stc=5 are two orders: use one"),
        ({"stc": None, "order": "track"}, "order is 'track': did you mean 'tracks'"),
        ({"stc": None, "order": "tracks"}, "order=tracks, and these images have no tracks"),
    ],
)
def test_bad_options(options, told):
    with pytest.raises(UserError, match=told):
        stream([5, 5], **options)


def tracked(lengths, seed=0, **options):
    """A stream of tracks of these lengths, whose numbers are 7, 14, …; their frames are scattered in the dataset."""
    tracks = np.random.default_rng(1).permutation(np.repeat(7 * np.arange(1, len(lengths) + 1), lengths))
    plain = numbered_dataset([len(tracks)])
    data = ArrayImages(plain.images(np.arange(len(tracks))), plain.labels, plain.classes, tracks)
    return DatasetStream(DatasetSource(data, data, None, None, seed, **options))


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_whole_tracks_in_a_new_order_each_pass(lengths, seed):
    s, n = tracked(lengths, seed, order="tracks"), sum(lengths)
    seen, tracks = indices(s.read(3 * n)), s.tracks(torch.arange(3 * n)).tolist()
    assert tracks == s.source.streamed.tracks[seen].tolist()
    for first in range(0, 3 * n, n):
        assert sorted(seen[first : first + n]) == list(range(n))
        runs = run_lengths(tracks[first : first + n])
        assert sorted(runs) == [(7 * (i + 1), length) for i, length in enumerate(lengths)]
        for _, frames in itertools.groupby(seen[first : first + n], key=lambda i: s.source.streamed.tracks[i]):
            assert (frames := list(frames)) == sorted(frames)


def test_the_order_of_tracks_changes_with_pass_and_seed_alone():
    s = tracked([3] * 20, order="tracks")
    passes = indices(s.read(180))
    assert passes[:60] != passes[60:120] != passes[120:]
    again = tracked([3] * 20, order="tracks")
    again.load_state_dict({"position": 120})  # without the passes before
    assert indices(again.read(60)) == passes[120:]
    assert indices(tracked([3] * 20, seed=1, order="tracks").read(60)) != passes[:60]


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_pairs_of_a_track_in_random_order(lengths, seed):
    s, n = tracked(lengths, seed, order="pairs"), sum(lengths)
    seen, tracks = indices(s.read(2 * n)), s.tracks(torch.arange(2 * n)).tolist()
    for first in (0, n):
        assert sorted(seen[first : first + n]) == list(range(n))
        runs = run_lengths(tracks[first : first + n])
        singles = {7 * (i + 1) for i, length in enumerate(lengths) if length % 2}  # left over
        assert {track for track, length in runs if length % 2} <= singles


def test_pairs_of_a_track_are_apart():
    tracks = tracked([10] * 50, order="pairs").tracks(torch.arange(500))
    assert (tracks[::2] == tracks[1::2]).all()
    assert (tracks[2::2] == tracks[1:-1:2]).sum() < 25  # 1 in 50 by chance


@pytest.mark.parametrize(
    ("options", "in_time"),
    [({}, True), ({"order": "tracks"}, True), ({"order": "pairs"}, True), ({"order": "iid"}, False)],
)
def test_whether_images_come_in_the_order_of_time(options, in_time):
    assert tracked([3, 3], **options).in_time is in_time
    assert not stream([5, 5], 2).in_time
    assert stream([5, 5], None).shard(0, 2, 2).in_time


def test_order_iid_is_stc_1():
    assert indices(stream([20] * 4, None, 3, order="iid").read(160)) == indices(stream([20] * 4, 1, 3).read(160))


def test_images_without_tracks_have_none():
    assert stream([5, 5], None).tracks(torch.arange(3)) is None
    assert stream([5, 5], None).source.tracks(np.arange(3)) is None


def test_a_part_of_a_dataset_keeps_its_tracks():
    data = tracked([3, 2, 4]).source.streamed
    part = Subset(data, np.array([1, 4, 8]))
    assert part.tracks.tolist() == data.tracks[[1, 4, 8]].tolist()


def test_one_track_for_each_image():
    with pytest.raises(UserError, match="3 images and 2 tracks: give one track for each image"):
        ArrayImages(np.zeros((3, 3, 8, 8), np.uint8), np.zeros(3), ["a"], np.zeros(2))


def test_every_fifth_track_of_each_class():
    #  Class 0 has tracks 90 to 80, in this order; class 1 has four, too few.
    tracks = np.repeat([*range(90, 79, -1), 1, 2, 3, 4], 3)
    labels = np.repeat([0] * 11 + [1] * 4, 3)
    assert set(tracks[every_fifth_track(labels, tracks)]) == {86, 81}
    held_back = every_fifth_track(labels, tracks)
    assert not set(tracks[held_back]) & set(tracks[~held_back])


def test_images_are_scaled_as_they_are_read():
    images = np.random.default_rng(0).integers(0, 256, (600, 3, 16, 16), np.uint8)
    small = ArrayImages(images, np.zeros(600), ["a"], size=8)
    every = small.images(np.arange(600))
    assert every.shape == (600, 3, 8, 8)
    assert np.array_equal(every[[5, 300]], small.images(np.array([5, 300])))  # whatever is read with them
    assert abs(every[0].mean() - images[0].mean()) < 5
    assert ArrayImages(images, np.zeros(600), ["a"], size=16).images(np.array([2])).tolist() == images[[2]].tolist()
    with pytest.raises(UserError, match="size is 7"):
        ArrayImages(images, np.zeros(600), ["a"], size=7)
