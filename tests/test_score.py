import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import nn

from conftest import random_images
from streamclr import UserError, contrast_score
from streamclr.encoders.inference import infer
from streamclr.score import rank_correlation, stand_ins
from streamclr.views import flip


def test_is_equation_2(model):
    images = random_images(10)
    z0, z1 = infer(model, images), infer(model, flip(images))
    score = contrast_score(model, images)
    assert torch.allclose(score, 1 - (z0 * z1).sum(1), atol=1e-5)
    assert ((score >= 0) & (score <= 2)).all()
    assert score.std() > 0


def test_range_holds_for_opposite_projections():
    class Sided(nn.Module):
        def forward(self, x):  # +1 or -1, by which half is brighter
            half = x.shape[-1] // 2
            return (x[..., :half].mean((1, 2, 3)) - x[..., half:].mean((1, 2, 3))).sign()[:, None]

    assert torch.allclose(contrast_score(Sided(), random_images(20)), torch.tensor(2.0))


def test_a_mirror_symmetric_image_scores_zero(model):
    images = random_images(6)
    images = torch.maximum(images, flip(images))
    assert (contrast_score(model, images) <= 1e-6).all()


@settings(max_examples=15)
@given(split=st.integers(1, 19), seed=st.integers(0, 9))
def test_same_for_any_batch_composition(split, seed):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = random_images(20, seed=seed)
    whole = contrast_score(encoder, images)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    parts = torch.cat([contrast_score(encoder, images[order[:split]]), contrast_score(encoder, images[order[split:]])])
    assert torch.allclose(parts, whole[order], atol=1e-5)


def test_identical_on_repeat_and_in_large_batches(model):
    images = random_images(1100)  # more than one chunk
    score = contrast_score(model, images)
    assert torch.equal(score, contrast_score(model, images))
    assert torch.allclose(contrast_score(model, images[500:501]), score[500:501], atol=1e-5)


def test_changes_nothing(model):
    model.encoder.layer1.eval()  # a mixed mode must come back as it was
    modes = {name: module.training for name, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    images = random_images(9)
    before, random_state = images.clone(), torch.get_rng_state()
    contrast_score(model, images)
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frames_at_rest_share_a_score_and_a_slow_change_is_not_missed():
    frame = random_images(1)[0].short().clamp(10, 200)
    at_rest = torch.stack([frame + (i % 2 == 0) * (torch.rand(3, 16, 16) < 0.3) for i in range(5)])
    drifting = torch.stack([frame + 30 + 0 * frame + i // 2 for i in range(8)])
    images = torch.cat([at_rest, drifting]).to(torch.uint8)
    assert stand_ins(images, 0.5).tolist() == [0, 0, 0, 0, 0, 5, 5, 7, 7, 9, 9, 11, 11]
    assert stand_ins(images, -1).tolist() == list(range(13))
    assert stand_ins(images, 1.0).tolist()[5:] == [5, 5, 5, 5, 9, 9, 9, 9]
    assert stand_ins(images[:1], 0.5).tolist() == [0]
    assert stand_ins(images[:0], 0.5).tolist() == []


@settings(max_examples=30)
@given(tolerance=st.floats(0, 40), seed=st.integers(0, 50))
def test_a_stand_in_is_earlier_near_and_stands_for_itself(tolerance, seed):
    steps = torch.randint(-3, 4, (20, 3, 4, 4), generator=torch.Generator().manual_seed(seed)).cumsum(0) + 100
    images = steps.to(torch.uint8)
    found = stand_ins(images, tolerance)
    assert (found <= torch.arange(20)).all()
    assert torch.equal(found[found], found)
    assert ((images.float() - images[found].float()).abs().mean((1, 2, 3)) <= tolerance + 1e-4).all()


def test_rank_correlation_is_scipys():
    a, b = torch.rand(50), torch.rand(50)
    assert abs(rank_correlation(a, b) - spearmanr(a, b).statistic) < 1e-9
    assert rank_correlation(a, a.exp()) == 1
    assert math.isnan(rank_correlation(a, torch.ones(50)))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("change", [torch.Tensor.float, torch.Tensor.short, lambda x: x / 255, lambda x: x[0]])
def test_what_is_no_batch_of_stored_images_is_refused(model, change, precision):
    with pytest.raises(UserError, match=r"the images are .*uint8"):
        contrast_score(model, change(random_images(4)), precision)
