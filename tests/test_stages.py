import copy

import pytest
import torch
from torch import nn

from streamclr import UserError, resnet18
from streamclr.compute.adam import Adam
from streamclr.encoders.architecture import Architecture
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.stages import set_trained
from streamclr.loss import nt_xent


@pytest.fixture(params=["resnet18", "mobilenet_v2"])
def model(request):
    width = {"width": 4} if request.param == "resnet18" else {}
    return Architecture.resolve(request.param, 32, **width, projection="batchnorm").make_model()


def changed(model, train):
    """The names of what one step of learning changes."""
    set_trained(model, train)
    before = copy.deepcopy(model.state_dict())
    optimizer = Adam(model.parameters(), 0.01)
    model.train()
    nt_xent(*model(torch.rand(8, 3, 32, 32)).chunk(2)).backward()
    optimizer.step()
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def test_all_learns_everything(model):
    assert changed(model, "all") == set(model.state_dict()) - {"mean", "std"}


@pytest.mark.parametrize("n", [1, 3, 5])
def test_the_last_stages_learn_and_nothing_before_them_moves(model, n):
    """BatchNorm statistics included, and the gradient does not go below the first stage that learns."""
    parts = [list(nn.ModuleList(stage).state_dict(keep_vars=True).values()) for stage in model.encoder.stages]
    in_stage = {id(tensor): number for number, part in enumerate(parts) for tensor in part}
    names = {
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name.startswith("head.") or in_stage.get(id(tensor), -1) >= 5 - n
    }
    assert changed(model, str(n)) == names
    assert sum(map(len, parts)) == len(model.encoder.state_dict())


def test_norms_learn_alone(model):
    moved = changed(model, "norms")
    norms = {
        f"encoder.{name}.{key}"
        for name, module in model.encoder.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for key in module.state_dict()
    }
    assert moved == norms | {f"head.{name}" for name in model.head.state_dict()}


def test_what_is_frozen_can_learn_again(model):
    set_trained(model, "1")
    assert not model.encoder.stages[0][0].training
    set_trained(model, "all")
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_copy_stays_frozen(model):
    set_trained(model, "2")
    twin = copy.deepcopy(model).eval().train()
    assert [module.training for module in twin.modules()] == [module.training for module in model.modules()]
    assert not twin.encoder.stages[2][0].training


@pytest.mark.parametrize("train", ["0", "6", "-1", "half", "", "1.5", "²"])
def test_what_cannot_be_trained_is_said(model, train):
    with pytest.raises(UserError, match=f"train is '{train}': use 'all', 'norms', or .*, 1 to 5"):
        set_trained(model, train)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_encoder_without_stages():
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = ContrastiveModel(nn.Sequential(pool, nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
    with pytest.raises(UserError, match="train is '1', and a Sequential has no stages: use 'all' or 'norms'"):
        set_trained(model, "1")
    set_trained(model, "norms")
    assert [name for name, p in model.encoder.named_parameters() if p.requires_grad] == ["2.weight", "2.bias"]
    plain = ContrastiveModel(nn.Sequential(pool, nn.Linear(3, 4)))
    with pytest.raises(UserError, match="train is 'norms', and the encoder, a Sequential, has none"):
        set_trained(plain, "norms")


def test_group_norm_learns_as_a_norm():
    model = ContrastiveModel(resnet18(4, norm="group"))
    set_trained(model, "norms")
    assert all(
        ("bn" in name or "downsample.1" in name) == p.requires_grad for name, p in model.encoder.named_parameters()
    )
