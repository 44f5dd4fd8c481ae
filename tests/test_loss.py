import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from streamclr import UserError, nt_xent


def unit(n, d, seed):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.double), dim=1)


def slow_nt_xent(z0, z1, temperature):
    """Eq. 1, anchor by anchor."""
    n = len(z0)
    z = [*z0, *z1]
    losses = []
    for i in range(2 * n):
        positive = (i + n) % (2 * n)
        total = sum(math.exp(float(z[i] @ z[j]) / temperature) for j in range(2 * n) if j != i)
        losses.append(-math.log(math.exp(float(z[i] @ z[positive]) / temperature) / total))
    return torch.tensor(losses, dtype=torch.double)


@settings(max_examples=30)
@given(n=st.integers(1, 12), d=st.integers(2, 16), temperature=st.floats(0.05, 2), seed=st.integers(0, 99))
def test_equals_a_slow_explicit_loop(n, d, temperature, seed):
    z0, z1 = unit(n, d, seed), unit(n, d, seed + 1000)
    expected = slow_nt_xent(z0, z1, temperature)
    assert torch.allclose(nt_xent(z0, z1, temperature, reduction="none"), expected, atol=1e-6)
    assert nt_xent(z0, z1, temperature).item() == pytest.approx(expected.mean().item(), abs=1e-6)
    assert nt_xent(z0, z1, temperature, reduction="sum").item() == pytest.approx(expected.sum().item(), abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 256])
def test_identical_vectors_give_log_2n_minus_1(n):
    z = F.normalize(torch.ones(n, 8), dim=1)
    assert nt_xent(z, z, 0.5).item() == pytest.approx(math.log(2 * n - 1), abs=1e-5)


@pytest.mark.parametrize(
    ("shapes", "reduction"), [(((4, 3), (3, 3)), "mean"), (((0, 3), (0, 3)), "mean"), (((2, 3), (2, 3)), "max")]
)
def test_bad_input(shapes, reduction):
    with pytest.raises(UserError):
        nt_xent(*map(torch.zeros, shapes), reduction=reduction)


def test_large_pools_are_computed_in_rounds():
    z0, z1 = unit(2100, 4, 0), unit(2100, 4, 1)  # 4,200 anchors: two rounds
    z = torch.cat([z0, z1])
    logits = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
    expected = F.cross_entropy(logits, torch.arange(4200).roll(2100), reduction="none")
    assert torch.allclose(nt_xent(z0, z1, 0.5, reduction="none"), expected)


def test_gradient_is_equation_4():
    """dl/dz_i = -1/tau ((1 - p+) z+ - sum p- z-); the paper prints z_i for z+, see docs/deviations.md."""
    temperature, i = 0.5, 2
    z0, z1 = unit(5, 8, 0).requires_grad_(), unit(5, 8, 1)
    nt_xent(z0, z1, temperature, reduction="none")[i].backward()
    z = torch.cat([z0, z1]).detach()
    others = [j for j in range(10) if j != i]
    p = dict(zip(others, F.softmax(z[others] @ z[i] / temperature, dim=0), strict=True))
    positive = i + 5
    by_hand = (1 - p[positive]) * z[positive] - sum(p[j] * z[j] for j in others if j != positive)
    assert torch.allclose(z0.grad[i], -by_hand / temperature, atol=1e-9)


@pytest.mark.parametrize("temperature", [0, -0.5, math.nan, math.inf])
def test_bad_temperature(temperature):
    with pytest.raises(UserError, match=f"temperature is {temperature}"):
        nt_xent(unit(4, 8, 0), unit(4, 8, 1), temperature)
