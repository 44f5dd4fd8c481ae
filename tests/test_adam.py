import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from streamclr.compute.adam import Adam


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


def test_resumes_exactly_and_its_state_is_a_copy():
    net = model()
    optimizer = Adam(net.parameters(), 1e-2)
    learn(net, optimizer, 5)
    state, weights = optimizer.state_dict(), copy.deepcopy(net.state_dict())
    learn(net, optimizer, 5, seed=1)
    again = model()
    again.load_state_dict(weights)
    other = Adam(again.parameters(), 1e-2)
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
