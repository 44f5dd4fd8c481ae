import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamclr import Buffer, UserError
from support.images import random_images


def numbered(first, n):
    """Images whose pixels say their arrival number."""
    numbers = torch.arange(first, first + n)
    images = torch.zeros(n, 3, 8, 8, dtype=torch.uint8)
    for byte in range(3):
        images[:, byte] = ((numbers >> (8 * byte)) & 255).byte()[:, None, None]
    return images


def number_of(images):
    return sum(images[:, byte, 0, 0].long() << (8 * byte) for byte in range(3))


def test_scores_ages_and_arrivals_stay_with_their_images_through_a_thousand_replacements():
    generator = torch.Generator().manual_seed(0)
    buffer, entered, scored = Buffer(17), {}, {}
    for step in range(1000):
        n = int(torch.randint(1, 40, (), generator=generator))
        pool = buffer.pool(numbered(buffer.n_seen, n))
        for number in number_of(pool.images[pool.age == 0]).tolist():
            entered[number] = step
        due = torch.rand(len(pool), generator=generator) < 0.5
        due |= pool.age == 0
        new = torch.rand(int(due.sum()), generator=generator)
        pool.rescore(due, new)
        scored.update(zip(number_of(pool.images[due]).tolist(), new.tolist(), strict=True))
        size = min(17, len(pool))
        keep = torch.randperm(len(pool), generator=generator)[:size]
        expected = set(number_of(pool.images[keep]).tolist())
        kept_before = len(expected & set(number_of(buffer.images).tolist()))
        assert buffer.replace(pool, keep) == kept_before
        numbers = number_of(buffer.images).tolist()
        assert set(numbers) == expected
        assert len(numbers) == size
        assert buffer.arrivals.tolist() == numbers
        assert buffer.ages.tolist() == [step - entered[number] for number in numbers]
        assert buffer.scores.tolist() == pytest.approx([scored[number] for number in numbers])


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), size=st.integers(2, 12))
def test_any_segment_sizes(sizes, size):
    buffer = Buffer(size)
    for n in sizes:
        before = len(buffer)
        pool = buffer.pool(numbered(buffer.n_seen, n))
        assert len(pool) == before + n
        buffer.replace(pool, pool.arrival.topk(min(size, len(pool))).indices)
    seen = sum(sizes)
    assert len(buffer) == min(size, seen)
    assert sorted(buffer.arrivals.tolist()) == list(range(max(0, seen - size), seen))
    assert sorted(number_of(buffer.images).tolist()) == sorted(buffer.arrivals.tolist())


def test_draw_is_uniform_without_repeats():
    buffer, generator = Buffer(10), torch.Generator().manual_seed(0)
    buffer.replace(buffer.pool(numbered(0, 10)), torch.arange(10))
    counts = torch.zeros(10)
    for _ in range(2000):
        numbers = number_of(buffer.pairs(buffer.draw(3, generator))[0])
        assert len(set(numbers.tolist())) == 3
        counts[numbers] += 1
    assert (counts / 2000 - 0.3).abs().max() < 0.05
    assert torch.equal(buffer.pairs(buffer.draw(10, generator))[0], buffer.images)


def test_state_round_trip():
    buffer = Buffer(4)
    pool = buffer.pool(numbered(0, 9))
    pool.rescore(pool.age == 0, torch.arange(9.0))
    buffer.replace(pool, torch.tensor([8, 2, 5, 0]))
    other = Buffer(4)
    other.load_state_dict(buffer.state_dict())
    for mine, theirs in zip(buffer.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
    for b in (buffer, other):
        b.replace(b.pool(numbered(9, 30)), torch.tensor([0, 3, 12, 33]))
    assert torch.equal(buffer.images, other.images)
    assert torch.equal(buffer.ages, other.ages)
    with pytest.raises(UserError, match="buffer=4"):
        Buffer(2).load_state_dict(buffer.state_dict())


@pytest.mark.parametrize("size", [1, 0, -5])
def test_too_small(size):
    with pytest.raises(UserError, match="at least 2"):
        Buffer(size)


def test_a_change_of_image_size_is_refused_and_changes_nothing():
    buffer = Buffer(4)
    buffer.replace(buffer.pool(random_images(4)), torch.arange(4))
    with pytest.raises(UserError, match="size="):
        buffer.pool(random_images(4, size=20))
    assert buffer.n_seen == 4
    assert buffer.ages.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("keep", [[0, 1, 2, 8], [-1, 0, 1, 2]])
def test_a_policy_that_keeps_what_is_not_there_is_told(keep):
    buffer = Buffer(4)
    with pytest.raises(UserError, match=r"the policy returned index (8|-1), .* indices of the pool"):
        buffer.replace(buffer.pool(random_images(8)), torch.tensor(keep))


@pytest.mark.parametrize("keep", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 3, 4]])
def test_a_policy_that_keeps_the_wrong_number_is_named(keep):
    buffer = Buffer(4)
    with pytest.raises(UserError, match="return 4 different indices of the pool"):
        buffer.replace(buffer.pool(random_images(8)), torch.tensor(keep))
