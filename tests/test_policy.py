"""The contract that every policy passes, and what each one promises beyond it."""

import copy
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from streamclr import (
    ContrastScoring,
    FIFOReplace,
    Guarded,
    KCenter,
    RandomReplace,
    Reservoir,
    SelectiveBackprop,
    UserError,
)
from streamclr.buffer import Buffer, Pool
from streamclr.encoders.inference import infer
from streamclr.policy import POLICIES, Mixture, ScoredReservoir, draw_batch, k_center
from streamclr.score import contrast_score
from support.images import random_images

MAKERS = {
    **POLICIES,
    "contrast, lazy": lambda: ContrastScoring(rescore_every=3),
    "contrast, fresh": lambda: ContrastScoring(rescore_every=3, fresh=0.4),
    "reservoir, fading": lambda: Reservoir(horizon=2),
    "selective-bp, beta": lambda: SelectiveBackprop(beta=1.0),
    "contrast, auto": lambda: ContrastScoring(precision="auto"),
    **{f"{name}, guarded": lambda make=make: Guarded(make()) for name, make in POLICIES.items()},
}
every_policy = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def make_pool(n_old, n_new, seed=0):
    """A pool as the buffer makes it: old images with scores and ages, new ones without."""
    n = n_old + n_new
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(n, generator=generator)
    age = torch.randint(1, 9, (n,), generator=generator)
    score[n_old:], age[n_old:] = torch.nan, 0
    return Pool(random_images(n, seed=seed), score, age, torch.arange(n), n_buffer=n_old)


contract = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@every_policy
@contract
@given(n_old=st.integers(0, 12), n_new=st.integers(1, 12), share=st.floats(0, 1), seed=st.integers(0, 5))
def test_keeps_exactly_the_asked_number_of_different_images_in_range(make, model, n_old, n_new, share, seed):
    pool = make_pool(n_old, n_new, seed)
    size = max(1, round(share * len(pool)))
    keep = make().keep(pool, size, model)
    assert keep.shape == (size,)
    assert keep.dtype == torch.long
    assert len(set(keep.tolist())) == size
    assert keep.min() >= 0
    assert keep.max() < len(pool)


@every_policy
def test_leaves_images_and_model_alone(make, model):
    pool, random_state = make_pool(6, 6), torch.get_rng_state()
    before, weights = copy.deepcopy(pool), {k: v.clone() for k, v in model.state_dict().items()}
    make().keep(pool, 6, model)
    for name in ("images", "age", "arrival"):
        assert torch.equal(getattr(pool, name), getattr(before, name))
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def steps(policy, model, sizes, buffer_size=6, first=0):
    """The arrival numbers in the buffer after each segment."""
    buffer, kept = Buffer(buffer_size), []
    for seed, n in enumerate(sizes, first):
        pool = buffer.pool(random_images(n, seed=seed))
        buffer.replace(pool, policy.keep(pool, min(buffer_size, len(pool)), model))
        kept.append(buffer.arrivals.tolist())
    return kept


@every_policy
def test_deterministic_by_seed_and_resumes_bit_by_bit(make, model):
    first, second = make(), make()
    assert steps(first, model, [5, 7, 3]) == steps(second, model, [5, 7, 3])
    state = copy.deepcopy(first.state_dict()) if hasattr(first, "state_dict") else None
    ahead = steps(first, model, [7, 4, 7], first=3)
    third = make()
    if state is not None:
        third.load_state_dict(state)
    assert steps(third, model, [7, 4, 7], first=3) == ahead


@every_policy
@pytest.mark.parametrize("n_old", [0, 1])
def test_a_pool_of_one_image(make, model, n_old):
    assert make().keep(make_pool(n_old, 1 - n_old), 1, model).tolist() == [0]


@every_policy
@pytest.mark.parametrize("sizes", [[2, 3, 9, 1, 6, 6, 20], [1, 1, 1, 1], [40, 2]])
def test_works_in_a_buffer_with_segments_of_any_size(make, model, sizes):
    for n_seen, kept in zip(itertools.accumulate(sizes), steps(make(), model, sizes), strict=True):
        assert len(set(kept)) == min(6, n_seen)


@pytest.mark.parametrize("make", [RandomReplace, Reservoir, SelectiveBackprop, KCenter])
def test_the_seed_matters(make, model):
    keeps = [make(seed=seed).keep(make_pool(20, 20), 20, model).sort().values for seed in range(4)]
    assert any(not torch.equal(keeps[0], other) for other in keeps[1:])


def test_contrast_scoring_keeps_the_highest_scores(model):
    pool = make_pool(8, 8)
    keep = ContrastScoring().keep(pool, 8, model)
    expected = contrast_score(model, pool.images)
    assert torch.equal(pool.score, expected)
    assert set(keep.tolist()) == set(expected.topk(8).indices.tolist())
    assert pool.n_rescored == 8


def test_lazy_scoring_scores_what_is_new_or_due_and_copies_the_rest(model):
    pool = make_pool(12, 4)
    before = pool.score.clone()
    ContrastScoring(rescore_every=4).keep(pool, 12, model)
    due = pool.age % 4 == 0
    assert due[12:].all()
    assert torch.equal(pool.score[due], contrast_score(model, pool.images[due]))
    assert torch.equal(pool.score[~due], before[~due])
    assert pool.n_rescored == int(due[:12].sum())


@pytest.mark.parametrize("fresh", [0.0, 0.1, 0.5, 1.0])
def test_a_share_of_the_buffer_is_fresh_even_if_old_scores_are_high(model, fresh):
    pool = make_pool(20, 10)
    pool.score[:20] += 2  # no new image has such a score
    pool.age[:20] = 2 * torch.randperm(20, generator=torch.Generator().manual_seed(1)) + 1  # none is due
    keep = ContrastScoring(rescore_every=2, fresh=fresh).keep(pool, 20, model)
    n = min(10, round(20 * fresh))
    assert set(keep[keep >= 20].tolist()) == set((20 + pool.score[20:].topk(n).indices).tolist())
    stayed = torch.isin(torch.arange(20), keep)
    assert int(stayed.sum()) == 20 - n
    assert n == 0 or pool.score[:20][stayed].min() > pool.score[:20][~stayed].max()  # the lowest scores went


def test_new_images_that_come_in_by_their_scores_count_as_fresh(model):
    pools = make_pool(20, 10), make_pool(20, 10)
    for pool in pools:
        pool.score[:20] -= 2
    alone, fresh = (ContrastScoring(9, fresh=f).keep(p, 20, model) for f, p in zip((0.0, 0.5), pools, strict=True))
    assert torch.equal(alone, fresh)


def test_fifo_keeps_the_newest(model):
    assert sorted(FIFOReplace().keep(make_pool(6, 4), 6, model).tolist()) == [4, 5, 6, 7, 8, 9]


def test_random_keeps_an_image_with_probability_one_half(model):
    policy, counts = RandomReplace(), torch.zeros(40)
    for _ in range(2000):
        counts[policy.keep(make_pool(20, 20), 20, model)] += 1
    assert (counts / 2000 - 0.5).abs().max() < 0.05


def test_reservoir_is_uniform_over_the_stream(model):
    counts = torch.zeros(30)
    for seed in range(600):
        buffer, policy = Buffer(6), Reservoir(seed)
        for _ in range(10):
            pool = buffer.pool(torch.zeros(3, 3, 8, 8, dtype=torch.uint8))
            buffer.replace(pool, policy.keep(pool, min(6, len(pool)), model))
        counts[buffer.arrivals] += 1
    assert (counts / 600 - 6 / 30).abs().max() < 0.06


def test_selective_backprop_keeps_the_largest_losses(model):
    pool = make_pool(8, 8)
    keep = SelectiveBackprop().keep(pool, 8, model)
    assert set(keep.tolist()) == set(pool.score.topk(8).indices.tolist())
    assert pool.score.isfinite().all()


def test_selective_backprop_beta_prefers_large_losses_without_insisting(model):
    policy, ranks = SelectiveBackprop(beta=2.0), []
    for seed in range(20):
        pool = make_pool(10, 10, seed)
        keep = policy.keep(pool, 5, model)
        ranks.append(pool.score.argsort().argsort()[keep].float().mean())
    mean = torch.stack(ranks).mean()
    assert 9.5 + 1 < mean < 17 - 0.5  # uniform gives 9.5, the largest five 17


def naive_k_center(features, size, first):
    distances = torch.cdist(features.double(), features.double())
    chosen = [first]
    while len(chosen) < size:
        nearest = distances[:, chosen].min(1).values
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    return chosen


@settings(max_examples=25)
@given(n=st.integers(2, 60), d=st.integers(1, 8), seed=st.integers(0, 50))
def test_k_center_agrees_with_a_naive_reference(n, d, seed):
    features = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    size, first = max(1, n // 2), seed % n
    assert k_center(features, size, first).tolist() == naive_k_center(features, size, first)


def test_k_center_at_scale_needs_no_matrix_of_pairs(monkeypatch):
    features = torch.randn(2048, 128, generator=torch.Generator().manual_seed(0))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        chosen = k_center(features, 128)
    assert largest <= 2048 * 128  # the size of the features themselves; all pairs would be 16 times as many
    assert chosen.tolist() == naive_k_center(features, 128, 0)


def test_k_center_survives_duplicates():
    assert sorted(k_center(torch.zeros(6, 3), 6).tolist()) == list(range(6))


def test_k_center_policy_covers_the_features(model):
    pool = make_pool(10, 10)
    keep = KCenter().keep(pool, 10, model)
    features = infer(model, pool.images, model.features)
    assert keep.tolist() == naive_k_center(features, 10, int(keep[0]))


def test_k_center_takes_a_plain_module_as_the_feature_space():
    flat = nn.Flatten()
    keep = KCenter().keep(make_pool(4, 4), 4, flat)
    assert len(set(keep.tolist())) == 4


def test_a_mixture_is_half_by_score_and_half_a_draw_of_the_stream(model):
    pool = make_pool(0, 20)
    keep = Mixture(share=0.5).keep(pool, 8, model)
    assert set(keep[:4].tolist()) == set(contrast_score(model, pool.images).topk(4).indices.tolist())
    counts = torch.zeros(30)
    for seed in range(200):
        counts[steps(Mixture(share=0, seed=seed), model, [10, 10, 10])[-1]] += 1
    assert (counts / 200 - 6 / 30).abs().max() < 0.12  # four standard deviations


def test_a_fading_reservoir_draws_by_how_long_ago_an_image_came(model):
    """With a buffer of 400 and a horizon of 3, one that came 1,200 images ago has 1/e of the weight of the newest."""
    counts = torch.zeros(8000)
    for seed in range(5):
        buffer, policy = Buffer(400), Reservoir(seed, horizon=3)
        for _ in range(40):
            pool = buffer.pool(torch.zeros(200, 3, 1, 1, dtype=torch.uint8))
            buffer.replace(pool, policy.keep(pool, min(400, len(pool)), model))
        counts[buffer.arrivals] += 1
    newest, before, long_ago = counts[-1200:].sum(), counts[-2400:-1200].sum(), counts[:-6000].sum()
    assert 2 < newest / before < 3.4  # e, less what the few places for many weights take off
    assert long_ago < 0.02 * counts.sum()


def test_a_scored_reservoir_draws_the_highest_scores_of_some(model):
    buffer = Buffer(12)
    pool = buffer.pool(random_images(12))
    buffer.replace(pool, torch.arange(12))
    best = contrast_score(model, buffer.images).topk(4).indices
    for times, expected in ((3, set(best.tolist())), (1, None)):
        rows = draw_batch(ScoredReservoir(times), buffer, 4, model, torch.Generator().manual_seed(0))
        assert len(set(rows.tolist())) == 4
        assert expected is None or set(rows.tolist()) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: ContrastScoring(0),
        lambda: ContrastScoring(-3),
        lambda: SelectiveBackprop(beta=-1),
        lambda: SelectiveBackprop(beta=float("nan")),
        lambda: SelectiveBackprop(temperature=0),
        lambda: Mixture(share=1.1),
        lambda: ScoredReservoir(times=0),
        lambda: Reservoir(horizon=0),
        lambda: ContrastScoring(fresh=-0.1),
        lambda: ContrastScoring(fresh=1.5),
    ],
)
def test_bad_options(make):
    with pytest.raises(UserError):
        make()


def test_scores_do_not_depend_on_the_length_of_the_projections(model):
    images = random_images(5)
    score = contrast_score(model, images)
    with torch.no_grad():
        model.head[2].weight.mul_(7)
        model.head[2].bias.mul_(7)
    assert torch.allclose(contrast_score(model, images), score, atol=1e-5)
