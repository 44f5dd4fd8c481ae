"""A block in training, fused: the same features, gradients and statistics as layer by layer, in less memory."""

import copy

import pytest
import torch

from streamclr import Learner, compact, mobilenet_v2, resnet18, resnet50
from streamclr.encoders.stages import set_trained
from support.images import random_images

ENCODERS = {
    "mobilenet_v2": mobilenet_v2,
    "compact": lambda: compact(8),
    "resnet18": lambda: resnet18(8),
    "resnet50": lambda: resnet50(4, "imagenet"),
}


def results(encoder, x):
    """Features, gradients and BatchNorm statistics of one pass."""
    x = x.clone().requires_grad_()
    features = encoder(x)
    (features * torch.linspace(-1, 1, features.shape[1], dtype=features.dtype)).square().sum().backward()
    own = {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}
    return {"features": features.detach(), "x": x.grad, **own, **dict(encoder.named_buffers())}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("training", [True, False])
def test_the_same_as_layer_by_layer(name, training):
    torch.manual_seed(0)
    plain = ENCODERS[name]().double().train(training)
    fused = copy.deepcopy(plain)
    next(plain.children()).register_forward_hook(lambda *_: None)  # who is watched runs layer by layer
    x = torch.rand(9, 3, 40, 40, dtype=torch.double)
    due, found = results(plain, x), results(fused, x)
    assert due.keys() == found.keys()
    for key, value in due.items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-9, msg=key)


def kept_bytes(encoder, x):
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encoder(x)
    return sum(size for size, _ in seen.values())


def test_it_keeps_two_thirds_for_the_backward_pass_at_most():
    encoder, x = mobilenet_v2().train(), torch.rand(4, 3, 64, 64)
    fused = kept_bytes(encoder, x)
    encoder.features[0].register_forward_hook(lambda *_: None)
    assert fused < 0.67 * kept_bytes(encoder, x)


@pytest.mark.parametrize("train", ["all", "norms", "2"])
def test_a_learner_takes_the_same_steps(train):
    encoder, losses = compact(8), []
    for watched in (False, True):
        learner = Learner(copy.deepcopy(encoder), recipe="device", buffer=16, batch_size=16, train=train)
        if watched:
            learner.encoder.stem.register_forward_hook(lambda *_: None)
        losses.append([learner.learn_many(random_images(16, 32, seed=seed)).loss for seed in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_frozen_weights_of_a_learning_block_get_no_gradient():
    learner = Learner(compact(8), recipe="device", buffer=16, batch_size=16)
    set_trained(learner.model, "norms")
    encoder = learner.encoder.train()
    encoder(torch.rand(8, 3, 32, 32)).sum().backward()
    for name, parameter in encoder.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
