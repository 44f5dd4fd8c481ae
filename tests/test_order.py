import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamclr import UserError
from streamclr.labelling import order as choice
from streamclr.labelling.order import asking_order


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blobs(sizes, noise=1e-3, seed=0):
    """Rows around one corner for each size, in a drawn order, and which corner each belongs to."""
    corner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    corner = corner[torch.randperm(len(corner), generator=torch.Generator().manual_seed(seed))]
    features = torch.eye(len(sizes))[corner]
    return features + noise * draw(*features.shape, seed=seed), corner


quick = settings(max_examples=25)


@quick
@given(
    rows=st.integers(1, 60),
    distinct=st.integers(1, 60),
    d=st.integers(1, 5),
    share=st.floats(0, 1),
    seed=st.integers(0),
)
def test_asks_about_different_rows_whatever_they_are(rows, distinct, d, share, seed):
    seed %= 2**63
    features = draw(distinct, d, seed=distinct)[torch.arange(rows) % distinct]
    n = round(share * rows)
    order = asking_order(features, n, seed)
    assert order.shape == (n,)
    assert order.dtype == torch.long
    assert len(set(order.tolist())) == n
    assert all(0 <= index < rows for index in order.tolist())


@quick
@given(sizes=st.lists(st.integers(2, 200), min_size=3, max_size=12), seed=st.integers(0, 100))
def test_every_group_is_asked_once_before_any_is_asked_twice(sizes, seed):
    """Groups that are far smaller than the distance between them, up to a hundred times larger than each other."""
    features, corner = blobs(sizes, seed=seed)
    order = asking_order(features, len(sizes), seed)
    assert sorted(corner[order].tolist()) == list(range(len(sizes)))


def test_large_groups_come_first():
    features, corner = blobs([3, 30, 300, 10])
    assert corner[asking_order(features, 4)].tolist()[0] == 2
    assert corner[asking_order(features, 4)].tolist()[-1] == 0


def test_copies_are_not_asked_about_while_there_is_anything_else():
    features = torch.cat([draw(1, 8).expand(500, 8), draw(30, 8, seed=1)])
    order = asking_order(features, 40)
    assert (order[:31] < 500).sum() == 1
    assert (order[31:] < 500).all()


@quick
@given(n=st.integers(0, 80), seed=st.integers(0, 5))
def test_the_first_part_of_an_order_is_the_order_for_fewer(n, seed):
    features = draw(80, 6)
    order, fewer = asking_order(features, 80, seed), asking_order(features, n, seed)
    assert torch.equal(fewer, order[:n])


def test_each_answer_brings_the_rows_nearer_than_a_uniform_draw_does():
    features = draw(400, 8) + 3 * torch.eye(8)[torch.arange(400) % 8]
    x = choice.directions(features)

    def far(rows):
        return float(torch.cdist(x, x[rows]).amin(1).mean())

    order = asking_order(features, 40)
    for n in (8, 20, 40):
        assert far(order[:n]) < min(far(torch.randperm(400)[:n]) for _ in range(5))


def test_the_shortcut_finds_what_looking_at_all_rows_finds():
    features = draw(60, 4)
    order = asking_order(features, 20)
    x = choice.directions(features)
    distance = torch.cdist(x.double(), x.double())
    nearest = torch.full((60,), 2.0).double()
    for index in order.tolist():
        gain = (nearest - distance).clamp(min=0).sum(1)
        assert gain[index] > gain.max() - 1e-4
        nearest = torch.minimum(nearest, distance[index])


def test_few_rows_are_looked_at_again(monkeypatch):
    """One update of N_AT_ONCE gains costs a part of what all of them would: there must be few for each answer."""
    n_looks = 0
    topk = torch.Tensor.topk

    def counted(*arguments, **options):
        nonlocal n_looks
        n_looks += 1
        return topk(*arguments, **options)

    monkeypatch.setattr(torch.Tensor, "topk", counted)
    asking_order(draw(1000, 16), 100)
    assert n_looks < 100 * 1000 / choice.N_AT_ONCE / 4


def test_a_seed_decides_among_equals_and_nothing_else():
    features, copies = draw(200, 5), torch.ones(50, 5)
    assert torch.equal(asking_order(features, 50, 3), asking_order(features, 50, 3))
    assert torch.equal(asking_order(features, 8, 3), asking_order(features, 8, 4))
    assert not torch.equal(asking_order(copies, 50, 3), asking_order(copies, 50, 4))
    before = torch.get_rng_state()
    asking_order(copies, 50)
    assert torch.equal(before, torch.get_rng_state())


def test_neither_scale_nor_offset_of_a_feature_nor_a_constant_one_matters():
    features = draw(80, 6)
    scaled = torch.cat(
        [features * torch.logspace(-3, 3, 6) + 5 * torch.logspace(-3, 3, 6), torch.full((80, 2), 0.1)], 1
    )
    assert torch.equal(asking_order(features, 8), asking_order(scaled, 8))


def test_of_too_many_rows_a_draw_is_asked_about_first(monkeypatch):
    monkeypatch.setattr(choice, "MAX_ROWS", 32)
    features, corner = blobs([30, 40, 50])
    order = asking_order(features, 120)
    assert sorted(corner[order[:3]].tolist()) == [0, 1, 2]
    assert sorted(order.tolist()) == list(range(120))
    for n in (5, 32, 40):
        assert torch.equal(asking_order(features, n), order[:n])


@pytest.mark.parametrize(
    "features",
    [
        torch.zeros(0, 4),
        torch.ones(1, 4),
        torch.zeros(7, 4),
        torch.ones(7, 0),
        torch.tensor([[0.0], [0.0], [1e38], [-1e38]]),
        torch.full((5, 2), 0.1) + torch.tensor([[1e-42], [0], [0], [0], [0]]),
        torch.ones(6, 3, dtype=torch.half),
        torch.eye(6).double().requires_grad_(),
    ],
    ids=["none", "one", "zeros", "no features", "huge", "tiny", "half", "with gradient"],
)
def test_degenerate_features(features):
    order = asking_order(features, len(features))
    assert sorted(order.tolist()) == list(range(len(features)))


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(UserError, match="finite"):
        asking_order(torch.tensor([[torch.nan, 1.0]]), 1)
    with pytest.raises(UserError, match="one row of finite numbers per image"):
        asking_order(torch.ones(3), 1)
    for n in (-1, 4):
        with pytest.raises(UserError, match="use 0 to 3"):
            asking_order(torch.ones(3, 2), n)
    with pytest.raises(UserError, match="seed"):
        asking_order(torch.ones(3, 2), 1, seed=-1)


def test_where_something_is_asked_already_it_is_not_asked_again():
    x, group = blobs([60, 40, 20, 10])
    known = torch.zeros(len(x), dtype=torch.bool)
    known[(group == 0).nonzero()[:5, 0]] = True
    known[(group == 2).nonzero()[:1, 0]] = True
    order = asking_order(x, 12, known=known)
    assert set(order[:6].tolist()) == set(known.nonzero()[:, 0].tolist())
    assert set(group[order[6:8]].tolist()) == {1, 3}
    assert len(set(order.tolist())) == 12
    everything = torch.ones(len(x), dtype=torch.bool)
    assert sorted(asking_order(x, len(x), known=everything).tolist()) == list(range(len(x)))
