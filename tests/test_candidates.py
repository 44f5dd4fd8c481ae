import hashlib
import io
import json
import os
import struct
from contextlib import closing

import numpy as np
import pytest
import torch
from PIL import Image

from streamclr.base.errors import UserError
from streamclr.labelling.candidates import Candidates, open_candidates, place, read_candidates, read_clips
from streamclr.records.label_budget import (
    CLIP,
    THUMBNAIL_BYTES,
    LabelBudget,
    clips_that_fit,
    n_candidates_that_fit,
    record_size,
)
from support.images import random_images
from support.runs import run_plan


def filled(path, n, capacity=20, seed=0, size=8, segment=7, clip=1):
    images = random_images(n, size)
    candidates = Candidates(path, capacity, (3, size, size), seed, clip)
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


# ----------------------------------------------------------------------------------------------------------------------
# Clips.


def test_a_clip_is_kept_whole_and_one_frame_of_it_is_a_candidate(tmp_path):
    images = filled(tmp_path / "c", 500, capacity=9, clip=CLIP)
    clips = read_clips(tmp_path / "c")
    assert len(clips) == 9
    for clip in clips:
        first = clip[0].arrival
        assert first % CLIP == 0
        assert [frame.arrival for frame in clip] == list(range(first, min(first + CLIP, 500)))
        assert all(torch.equal(frame.image, images[frame.arrival]) for frame in clip)
    assert [c.arrival for c in read_candidates(tmp_path / "c")] == [clip[len(clip) // 2].arrival for clip in clips]
    assert (tmp_path / "c").stat().st_size == 4096 + 9 * CLIP * (32 + 192)


def test_each_clip_has_the_same_chance(tmp_path):
    counts, n_seeds = np.zeros(20), 150
    images = random_images(20 * CLIP, 2)
    for seed in range(n_seeds):
        candidates = Candidates(tmp_path / f"{seed}", 5, (3, 2, 2), seed, CLIP)
        candidates.offer(images, 0)
        candidates.close()
        for clip in read_clips(tmp_path / f"{seed}"):
            counts[clip[0].arrival // CLIP] += 1
    assert counts.sum() == n_seeds * 5
    expected = n_seeds * 5 / 20
    assert abs((counts - expected) / np.sqrt(expected * (1 - 5 / 20))).max() < 4


@pytest.mark.parametrize("n", range(41, 64))
def test_frames_of_two_clips_never_mix(tmp_path, n):
    """A newer clip takes a place frame by frame, and the run may stop in the middle of it."""
    filled(tmp_path / "c", n, capacity=2, clip=CLIP, segment=1)
    for clip in read_clips(tmp_path / "c"):
        assert len({frame.arrival // CLIP for frame in clip}) == 1
        assert [frame.arrival for frame in clip] == list(range(clip[0].arrival, clip[-1].arrival + 1))
    newest = [clip for clip in read_clips(tmp_path / "c") if clip[0].arrival // CLIP == (n - 1) // CLIP]
    assert all(clip[-1].arrival == n - 1 for clip in newest)


def test_clips_are_the_same_after_a_restart_in_the_middle_of_one(tmp_path):
    images = random_images(300, 8)
    whole, broken = (Candidates(tmp_path / name, 6, (3, 8, 8), clip=CLIP) for name in ("whole", "broken"))
    for first in range(0, 300, 10):
        whole.offer(images[first : first + 10], first)
    for first in range(0, 250, 10):
        broken.offer(images[first : first + 10], first)
    broken.close()
    again = Candidates(tmp_path / "broken", 6, (3, 8, 8), clip=CLIP)
    for first in range(130, 300, 10):
        again.offer(images[first : first + 10], first)
    kept = [
        [[(frame.key, frame.arrival) for frame in clip] for clip in read_clips(tmp_path / name)]
        for name in ("whole", "broken")
    ]
    assert kept[0] == kept[1]


def test_a_frame_has_the_track_that_the_stream_gave(tmp_path):
    candidates = Candidates(tmp_path / "c", 2, (3, 8, 8), clip=CLIP)
    candidates.offer(random_images(10, 8), 0, torch.arange(10) // 3 - 2)
    candidates.offer(random_images(4, 8, seed=1), 10)
    tracks = [frame.track for clip in read_clips(tmp_path / "c") for frame in clip]
    assert tracks == [-2, -2, -2, -1, -1, -1, 0, 0, 0, 1, -1, -1, -1, -1]


def test_a_frame_that_was_cut_costs_its_clip_nothing_else(tmp_path):
    filled(tmp_path / "c", 24, capacity=3, clip=CLIP)
    with (tmp_path / "c").open("r+b") as file:
        file.seek(4096 + 12 * (32 + 192) + 100)
        file.write(b"torn")
    assert [[frame.arrival for frame in clip] for clip in read_clips(tmp_path / "c")] == [
        list(range(8)), [8, 9, 10, 11, 13, 14, 15], list(range(16, 24)),
    ]  # fmt: skip


def test_a_file_of_single_frames_goes_on_as_such(tmp_path):
    """As version 0.1 wrote it: no clip in the header, no track in the records."""
    images = random_images(300, 8)
    header = json.dumps({"candidates": 20, "shape": [3, 8, 8], "seed": 3}).encode().ljust(4095) + b"\n"
    records = [b""] * 20
    for number, where in enumerate(place(np.arange(100), 20, 3)):
        content = struct.pack("<qd", number + 1, 0.0) + images[number].numpy().tobytes()
        if where < 20:
            records[where] = hashlib.blake2b(content, digest_size=16).digest() + content
    (tmp_path / "c").write_bytes(header + b"".join(records))
    before = [(c.arrival, c.track) for c in read_candidates(tmp_path / "c")]
    candidates = Candidates(tmp_path / "c", 2, (3, 8, 8), 3, CLIP)
    assert [(c.arrival, c.track) for c in read_candidates(tmp_path / "c")] == before
    candidates.offer(images[100:], 100, torch.arange(200))
    found = read_candidates(tmp_path / "c")
    filled(tmp_path / "new", 300, 20, seed=3)
    assert [c.arrival for c in found] == [c.arrival for c in read_candidates(tmp_path / "new")]
    assert all(torch.equal(c.image, images[c.arrival]) and c.track == -1 for c in found)
    assert (tmp_path / "c").stat().st_size == 4096 + 20 * (32 + 192)


@pytest.mark.parametrize(
    ("n_frames", "n_asked", "n_clips", "length"),
    [(10_000, 50, 400, 8), (10_000, 500, 1250, 8), (3000, 500, 1000, 3), (900, 500, 900, 1), (500, 500, 500, 1),
     (10_000, None, 1250, 8), (500, None, 250, 2), (19, 1, 2, 8), (5, 1, 2, 2), (1, 1, 1, 1)],
)  # fmt: skip
def test_clips_are_shorter_where_there_would_be_too_few_to_choose_from(n_frames, n_asked, n_clips, length):
    room = 4096 + n_frames * record_size((3, 8, 8))
    assert clips_that_fit(room, 8, None, n_asked) == (n_clips, length, 0)
    assert clips_that_fit(2**40, 8, n_frames, n_asked) == (n_clips, length, 0)


@pytest.mark.parametrize(
    ("options", "epoch", "clip", "n_clips"),
    [({}, None, 8, 131), ({"label_budget": "10"}, None, 8, 80), ({"label_budget": "100"}, None, 5, 210),
     ({"images": 200}, None, 5, 40), ({}, 120, 3, 40), ({"label_disk": "30K"}, None, 2, 59)],
)  # fmt: skip
def test_a_run_has_room_for_two_clips_a_question(tmp_path, options, epoch, clip, n_clips):
    """234K of disk holds 1,051 frames, 30K holds 118."""
    plan = run_plan(**{"size": 8, "label_budget": "20", "label_disk": "234K", "images": 5000} | options)
    candidates = open_candidates(tmp_path, plan, epoch)
    candidates.close()
    assert (candidates.clip, candidates.n_clips) == (clip, n_clips)


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "n_seen", "n"),
    [("1%", 9000, 90), ("500", 10, 500), ("100%", 7, 7), ("1%", 600, 50), ("0.5%", 10, 10), ("1%", 0, 1)],
)
def test_a_budget_is_a_number_or_a_share(text, n_seen, n):
    """Of a clip of 600 frames 1 % would be six: too few to tell two classes apart."""
    assert LabelBudget.parse(text).of(n_seen) == n


@pytest.mark.parametrize("text", ["0", "0%", "101%", "-5", "many", "", "%", "1.5", "nan%", "inf%"])
def test_a_budget_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="label_budget"):
        LabelBudget.parse(text)


# ----------------------------------------------------------------------------------------------------------------------
# Thumbnails.


def jpeg_of(number, side=64, quality=80):
    content = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(noise).save(content, "JPEG", quality=quality)
    return content.getvalue()


def with_thumbnails(path, numbers, every=4, n_clips=5, segment=7, clip=CLIP):
    """Frames of which every Nth has a thumbnail."""
    images = random_images(max(numbers) + 1, 8)
    candidates = Candidates(path, n_clips, (3, 8, 8), clip=clip, thumbnail=THUMBNAIL_BYTES)
    for first in range(0, len(numbers), segment):
        own = numbers[first : first + segment]
        given = {number: jpeg_of(number) for number in own if number % every == 0}
        candidates.offer(images[own], own[0], thumbnail_of=given.get)
    candidates.close()
    return candidates


@pytest.mark.parametrize("segment", [1, 3, 7, 64])
def test_the_frame_to_ask_about_has_the_thumbnail_nearest_to_the_middle(tmp_path, segment):
    with_thumbnails(tmp_path / "c", range(400), segment=segment)
    found = read_candidates(tmp_path / "c")
    assert len(found) == 5
    for candidate in found:
        assert candidate.arrival % CLIP == CLIP // 2
        assert candidate.thumbnail == jpeg_of(candidate.arrival)
    for clip in read_clips(tmp_path / "c"):
        assert len(clip) == CLIP
        assert sum(frame.thumbnail is not None for frame in clip) == 1


def test_a_clip_without_a_thumbnail_never_shows_that_of_the_clip_before_it(tmp_path):
    with_thumbnails(tmp_path / "c", range(400), every=400)  # the first frame alone has one
    for candidate in read_candidates(tmp_path / "c"):
        assert candidate.thumbnail is None or candidate.arrival == 0
    with_thumbnails(tmp_path / "d", range(400), every=3, segment=1)
    for candidate in read_candidates(tmp_path / "d"):
        assert candidate.thumbnail == jpeg_of(candidate.arrival)


def test_offered_again_the_thumbnails_are_the_same(tmp_path):
    for name, numbers in (("whole", [*range(300)]), ("again", [*range(250)])):
        with_thumbnails(tmp_path / name, numbers)
    images, size = random_images(300, 8), (tmp_path / "whole").stat().st_size
    again = Candidates(tmp_path / "again", 5, (3, 8, 8), clip=CLIP, thumbnail=THUMBNAIL_BYTES)
    for first in range(130, 300, 10):
        given = {number: jpeg_of(number) for number in range(first, first + 10) if number % 4 == 0}
        again.offer(images[first : first + 10], first, thumbnail_of=given.get)
    kept = [[(*c[:2], c.thumbnail) for c in read_candidates(tmp_path / name)] for name in ("whole", "again")]
    assert kept[0] == kept[1]
    assert (tmp_path / "again").stat().st_size == size == 4096 + 5 * (CLIP * (32 + 192) + THUMBNAIL_BYTES)


def test_a_thumbnail_that_is_too_large_is_made_smaller(tmp_path):
    large = jpeg_of(0, 256, 95)
    assert len(large) > THUMBNAIL_BYTES
    candidates = Candidates(tmp_path / "c", 2, (3, 8, 8), thumbnail=THUMBNAIL_BYTES)
    candidates.offer(random_images(1, 8), 0, thumbnail_of=lambda number: large)
    (candidate,) = read_candidates(tmp_path / "c")
    assert len(candidate.thumbnail) <= THUMBNAIL_BYTES
    assert max(Image.open(io.BytesIO(candidate.thumbnail)).size) >= 128


def test_a_thumbnail_that_was_cut_costs_nothing_else(tmp_path):
    with_thumbnails(tmp_path / "c", range(16), n_clips=2)
    with (tmp_path / "c").open("r+b") as file:
        file.seek(4096 + CLIP * (32 + 192) + 100)
        file.write(b"torn")
    first, second = read_clips(tmp_path / "c")
    assert len(first) == len(second) == CLIP
    assert not any(frame.thumbnail for frame in first)
    assert [frame.arrival for frame in second if frame.thumbnail] == [12]


def test_a_file_without_thumbnails_goes_on_as_such(tmp_path):
    filled(tmp_path / "c", 100, capacity=4, clip=CLIP)
    size = (tmp_path / "c").stat().st_size
    candidates = Candidates(tmp_path / "c", 3, (3, 8, 8), clip=CLIP // 2, thumbnail=THUMBNAIL_BYTES)
    assert (candidates.n_clips, candidates.clip, candidates.thumbnail_every) == (4, CLIP, 0)
    candidates.offer(random_images(100, 8, seed=1), 100, thumbnail_of=jpeg_of)
    assert (tmp_path / "c").stat().st_size == size
    found = read_candidates(tmp_path / "c")
    assert max(candidate.arrival for candidate in found) >= 100
    assert not any(candidate.thumbnail for candidate in found)


def test_the_disk_holds_clips_with_their_thumbnails():
    for n_bytes, side, n_asked in ((64 * 2**20, 64, 200), (64 * 2**20, 96, 500), (10 * 2**20, 64, 24)):
        n_clips, length, each = clips_that_fit(n_bytes, side, None, n_asked, THUMBNAIL_BYTES)
        assert each == THUMBNAIL_BYTES
        assert n_clips >= 2 * n_asked
        assert 4096 + n_clips * (length * record_size((3, side, side)) + each) <= n_bytes
    assert clips_that_fit(64 * 2**20, 64, None, 200, THUMBNAIL_BYTES)[:2] == (605, 8)
    assert clips_that_fit(200_000, 8, None, 20, THUMBNAIL_BYTES) == (109, 8, 0)  # no room: what is learned comes first
    assert clips_that_fit(2**30, 64, 30, 24, THUMBNAIL_BYTES) == (30, 1, THUMBNAIL_BYTES)  # a short stream


@pytest.mark.parametrize(("size", "has", "each"), [(64, True, THUMBNAIL_BYTES), (64, False, 0), (256, True, 0)])
def test_a_run_keeps_thumbnails_where_they_show_more(tmp_path, size, has, each):
    plan = run_plan(size=size, label_budget="4", images=5000)
    with closing(open_candidates(tmp_path, plan, None, has)) as candidates:
        assert candidates.thumbnail == each
        assert candidates.thumbnail_every == (4 if each else 0)
