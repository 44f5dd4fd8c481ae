import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import random_images
from streamclr import contrast_score
from streamclr.encoder import infer
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


@settings(deadline=None, max_examples=15)
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
