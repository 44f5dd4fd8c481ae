import copy

import pytest
import torch
from torch import nn

from streamclr import Learner, UserError, resnet18, resnet34, resnet50
from streamclr.compute.chunked import backward
from streamclr.encoders.architecture import Architecture
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.stages import set_trained
from streamclr.loss import nt_xent
from support.images import random_images


def gradient(model):
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters() if parameter.requires_grad])


def loss(z):
    return nt_xent(*z.chunk(2))


@pytest.mark.parametrize("make", [resnet18, resnet34, resnet50])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("stem", "size"), [("small", 12), ("half", 20), ("imagenet", 40)])
@pytest.mark.parametrize("chunk_size", [1, 5, 23])
def test_chunked_gradient_is_the_plain_one(make, norm, stem, size, chunk_size):
    """In double precision, where what is left is not rounding: gradients, loss and running statistics."""
    torch.manual_seed(0)
    check_chunked(ContrastiveModel(make(4, stem=stem, norm=norm)), 24, size, chunk_size)


def check_chunked(plain, n, size, chunk_size):
    plain = plain.double().train()
    chunked = copy.deepcopy(plain)
    views = torch.rand(n, 3, size, size).double()
    values = [
        backward(model, lambda rows: views[rows], n, loss, size)
        for model, size in ((plain, None), (chunked, chunk_size))
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert torch.allclose(gradient(plain), gradient(chunked), rtol=1e-6, atol=1e-10)
    assert all(parameter.requires_grad or parameter.grad is None for parameter in chunked.parameters())
    for (name, a), (_, b) in zip(plain.named_buffers(), chunked.named_buffers(), strict=True):
        assert torch.allclose(a, b), name


@pytest.mark.parametrize("train", ["all", "3", "1", "norms"])
def test_of_mobilenet_too_with_any_part_that_learns(train):
    model = Architecture.resolve("mobilenet_v2", 32).make_model()
    set_trained(model, train)
    check_chunked(model, 8, 32, 3)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("train", ["all", "2", "norms"])
def test_of_compact_too(norm, train):
    model = Architecture.resolve("compact", 32, width=4, norm=norm).make_model()
    set_trained(model, train)
    check_chunked(model, 10, 20, 3)


@pytest.mark.parametrize("make", [resnet18, resnet50])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("train", ["all", "4", "1", "norms"])
def test_of_a_part_that_learns_and_a_head_with_batch_norm(make, norm, train):
    """`4` freezes the stem alone, whose norm is then in eval mode."""
    model = ContrastiveModel(make(4, "imagenet", norm), projection="batchnorm")
    model.train()(torch.rand(8, 3, 40, 40))  # statistics that are not the initial ones
    set_trained(model, train)
    check_chunked(model, 10, 40, 4)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_of_the_head_alone(norm):
    model = ContrastiveModel(resnet18(4, norm=norm))
    model.encoder.requires_grad_(False)
    check_chunked(model, 10, 12, 4)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_in_single_precision_it_is_no_less_exact_than_the_plain_one(norm):
    """Plain BatchNorm rounds more than chunks do, so that the two may differ by more than 1e-5; both against double."""
    torch.manual_seed(1)
    plain = ContrastiveModel(resnet18(8, norm=norm)).train()
    chunked, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    views = torch.rand(64, 3, 32, 32)
    for model, size in ((plain, None), (chunked, 16), (exact, None)):
        dtype = next(model.parameters()).dtype
        backward(model, lambda rows, dtype=dtype: views[rows].to(dtype), 64, loss, size)

    def error(model):
        return 1 - float(torch.cosine_similarity(gradient(model).double(), gradient(exact), dim=0))

    assert error(chunked) <= error(plain) + 1e-9
    assert error(chunked) < 1e-5


def test_gradients_add_up_as_autograds_do():
    torch.manual_seed(0)
    model = ContrastiveModel(resnet18(4)).double().train()
    views = torch.rand(8, 3, 12, 12).double()
    backward(model, lambda rows: views[rows], 8, loss, 3)
    once = gradient(model)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_running_stats()
    backward(model, lambda rows: views[rows], 8, loss, 3)
    assert torch.allclose(gradient(model), 2 * once, rtol=1e-6, atol=1e-12)


def test_dropout_drops_the_same_in_both_passes():
    class Encoder(nn.Module):
        n_features = 6

        def __init__(self):
            super().__init__()
            self.layer, self.masks = nn.Linear(48, 6), []

        def forward(self, x):
            y = nn.functional.dropout(self.layer(x.flatten(1)), 0.5, self.training)
            self.masks.append(y.detach() == 0)
            return y

    model = ContrastiveModel(Encoder()).train()
    views = torch.rand(8, 3, 4, 4)
    before = torch.get_rng_state()
    backward(model, lambda rows: views[rows], 8, loss, 4)
    first, second = model.encoder.masks[:2], model.encoder.masks[2:]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(torch.get_rng_state(), before)  # the next step drops others


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_learner_in_chunks_learns_the_same(norm):
    """Same views, same selection, same weights after several steps, up to rounding."""
    learners = []
    for chunk_size in (None, 5):
        torch.manual_seed(0)
        learner = Learner(resnet18(4, norm=norm), buffer=8, seed=1, device="cpu")
        if chunk_size:
            learner.memory = 2**40
            learner.fit((8, 3, 16, 16))
            learner.plan = type(learner.plan)(chunk_size, 0)
        learners.append(learner)
    for step in range(4):
        plain, chunked = (learner.learn_many(random_images(8, seed=step)) for learner in learners)
        assert plain.loss == pytest.approx(chunked.loss, rel=1e-3)
        assert plain.replaced == chunked.replaced
    assert torch.equal(learners[0].buffer.arrivals, learners[1].buffer.arrivals)
    assert torch.equal(learners[0].generator.get_state(), learners[1].generator.get_state())


def test_a_foreign_encoder_with_batch_norm_is_refused():
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(UserError, match="BatchNorm but is none of resnet18, "):
        Learner(encoder, memory="1G", device="cpu")
