import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from streamclr.compute.adam import Adam
from streamclr.compute.muon import Muon, orthogonal
from streamclr.peers.orthogonal import OrthogonalAdam


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def learn(net, optimizer, n, seed=0):
    torch.manual_seed(seed)
    for _ in range(n):
        optimizer.zero_grad()
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()


def test_is_torchs_adam():
    ours, theirs = model(), model()
    unused = nn.Linear(2, 2)
    learn(ours, Adam([*ours.parameters(), *unused.parameters()], 1e-2, 1e-3), 30)
    learn(theirs, torch.optim.Adam(theirs.parameters(), 1e-2, weight_decay=1e-3), 30)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4), (16, 27)])
def test_orthogonal_moves_every_singular_value_near_1(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.3
    direction = (found * (u @ v)).sum() / (found.norm() * (u @ v).norm())
    assert direction > 0.95  # of the nearest matrix with all singular values 1


def test_orthogonal_of_nothing_is_nothing():
    assert not orthogonal(torch.zeros(3, 4)).any()


def test_muon_turns_matrices_and_leaves_the_rest_to_adam():
    ours, theirs = model(), model()
    optimizer = Muon(ours.parameters(), lr=0.02)
    learn(ours, optimizer, 1)
    learn(theirs, torch.optim.Adam(theirs.parameters(), 0.05 * 0.02), 1)
    before = model()
    for name in ("0.bias", "2.bias"):
        assert torch.allclose(ours.get_parameter(name), theirs.get_parameter(name))
    moved = before[0].weight - ours[0].weight
    assert torch.linalg.svdvals(moved / 0.02).sub(1).abs().max() < 0.5
    learn(ours, optimizer, 60)
    assert ours(torch.randn(64, 6)).square().mean() < 0.2 * before(torch.randn(64, 6)).square().mean()


def test_weight_decay_of_muon_shrinks_the_weights_themselves():
    nets = [model(), model()]
    for net, decay in zip(nets, (0.0, 0.5), strict=True):
        learn(net, Muon(net.parameters(), 0.02, decay), 1)
    shrunk = 0.5 * 0.02 * model()[0].weight
    assert torch.allclose(nets[0][0].weight - nets[1][0].weight, shrunk, atol=1e-6)


@pytest.mark.parametrize("make", [Adam, Muon, OrthogonalAdam])
def test_resumes_exactly_and_its_state_is_a_copy(make):
    net = model()
    optimizer = make(net.parameters(), 1e-2)
    learn(net, optimizer, 5)
    state, weights = optimizer.state_dict(), copy.deepcopy(net.state_dict())
    learn(net, optimizer, 5, seed=1)
    again = model()
    again.load_state_dict(weights)
    other = make(again.parameters(), 1e-2)
    other.load_state_dict(state)
    learn(again, other, 5, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


@pytest.mark.system
def test_a_step_does_not_import_the_compiler():
    code = (
        "import sys, torch\n"
        "from streamclr import Learner, resnet18\n"
        "learner = Learner(resnet18(width=4), buffer=4)\n"
        "learner.learn_many(torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
