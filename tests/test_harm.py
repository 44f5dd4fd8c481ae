import copy

import pytest
import torch

from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import resnet18
from streamclr.runs.harm import compare_encoders, effective_rank
from support.images import random_images


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = ContrastiveModel(resnet18(width=4))
    model(random_images(64, 16) / 255)  # statistics
    return model.eval()


def test_an_encoder_that_is_the_same_does_no_harm(model):
    images = random_images(40, 16)
    found = compare_encoders(model, copy.deepcopy(model), images, images)
    assert found["used"] == "adapted"
    assert found["found"][0] == found["found"][1]
    assert found["n_frames"] == 40


def test_a_collapsed_encoder_is_not_used(model):
    images, collapsed = random_images(40, 16), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in collapsed.encoder.layer4.parameters():
            parameter.zero_()
    found = compare_encoders(model, collapsed, images, images)
    assert found["used"] == "public"
    assert "of the public one's" in found["why"]


def test_the_effective_rank_of_equal_directions_is_their_number():
    basis = torch.cat([torch.eye(6), -torch.eye(6)])
    assert effective_rank(basis) == pytest.approx(6, abs=1e-6)
    assert effective_rank(basis[:, :1].expand(12, 6)) == pytest.approx(1, abs=1e-3)
