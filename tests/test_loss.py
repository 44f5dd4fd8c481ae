import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from streamclr import FIFOReplace, Learner, RandomReplace, StrongViews, UserError, nt_xent, resnet18
from streamclr.base.errors import NotFinite
from streamclr.compute.memory import MemoryPlan
from streamclr.encoders.projection import ContrastiveModel
from streamclr.loss import BYOL, Loss, barlow_twins, vicreg
from streamclr.recipe import LOSSES, build_loss
from support.damage import break_gradient
from support.images import random_images


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


# ----------------------------------------------------------------------------------------------------------------------
# The contract of every loss, and what each promises beyond it.


def own_function(z0, z1):
    """Of a researcher: without negatives it would collapse, which a few steps do not show."""
    return 1 - (z0 * z1).sum(1).mean()


class OwnModule(nn.Module):
    """One that learns its temperature."""

    def __init__(self):
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, z0, z1):
        logits = z0 @ z1.T * (-self.log_temperature).exp()
        return F.cross_entropy(logits, torch.arange(len(logits)))


class OwnQueue(Loss):
    """MoCo's queue of negatives: state that changes as it is called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.ones(6, 128), dim=1))

    def forward(self, z0, z1):
        logits = torch.cat([(z0 * z1).sum(1, keepdim=True), z0 @ self.queue.to(z0).T], 1) / 0.2
        self.queue = torch.cat([self.queue, z1.detach().to(self.queue)])[-6:]
        return F.cross_entropy(logits, torch.zeros(len(z0), dtype=torch.long))


class Stateful:
    def __call__(self, z0, z1):
        return own_function(z0, z1)

    def state_dict(self):
        return {}


MAKERS = {name: lambda name=name: name for name in LOSSES} | {
    "vicreg, options": lambda: "vicreg?covariance=4",
    "byol, momentum": lambda: "byol?momentum=0.5&width=16",
    "a function": lambda: own_function,
    "a module": OwnModule,
    "a queue": OwnQueue,
}
every_loss = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def learner_with(loss, seed=3, dtype=torch.float32, norm="group", **options):
    torch.manual_seed(0)
    model = ContrastiveModel(resnet18(4, norm=norm)).to(dtype)
    usual = {"policy": RandomReplace(), "buffer": 8, "lr": 1e-3, "device": "cpu"}
    return Learner(model, seed=seed, loss=loss, **usual | options)


def learn(learner, n_steps, first=0, n=8):
    return [learner.learn_many(random_images(n, seed=first + step)).loss for step in range(n_steps)]


def tensors(tree):
    if isinstance(tree, dict):
        return [t for key in sorted(tree) for t in tensors(tree[key])]
    return [t for item in tree for t in tensors(item)] if isinstance(tree, list) else [tree]


def same(a, b):
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    return all(
        torch.equal(x.nan_to_num(7), y.nan_to_num(7)) if isinstance(x, torch.Tensor) else x == y for x, y in pairs
    )


@every_loss
def test_a_loss_takes_segments_of_any_size_and_leaves_the_global_generator_alone(make):
    random_state = torch.get_rng_state()
    loss = make()
    torch.set_rng_state(random_state)
    learner = Learner(resnet18(4), RandomReplace(), 8, loss=loss, device="cpu")
    drawn = torch.get_rng_state()
    for seed, n in enumerate((1, 1, 5, 20)):
        assert math.isfinite(learner.learn_many(random_images(n, seed=seed)).loss)
    assert torch.equal(torch.get_rng_state(), drawn)


@every_loss
def test_a_loss_depends_on_no_order_of_the_images(make, model):
    loss = build_loss(make())
    loss.begin(model)
    loss.double()
    z0, z1 = unit(12, 128, 0), unit(12, 128, 1)
    targets = () if loss.target is None else (unit(12, 128, 2), unit(12, 128, 3))
    order = torch.randperm(12)
    state = copy.deepcopy(loss.state_dict())
    one = loss(z0, z1, *targets)
    loss.load_state_dict(state)
    other = loss(z0[order], z1[order], *(t[order] for t in targets))
    assert one.item() == pytest.approx(other.item(), rel=1e-5)


@every_loss
def test_a_loss_resumes_bit_by_bit(make):
    learner, other = learner_with(make()), learner_with(make(), seed=99)
    learn(learner, 3)
    state = learner.state_dict()
    kept = copy.deepcopy(state)
    ahead = learn(learner, 3, first=3)
    assert same(state, kept)  # it was a copy
    other.load_state_dict(state)
    assert learn(other, 3, first=3) == ahead
    assert same(learner.state_dict(), other.state_dict())


@every_loss
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_loss_in_chunks_has_the_plain_gradient(make, norm):
    """In double precision: of the encoder, the projection head, and what is in the loss. In small steps: with BatchNorm
    some gradients are 0 but for the rounding, which Adam makes as large as any."""
    learners = [learner_with(make(), dtype=torch.float64, norm=norm, lr=1e-9) for _ in range(2)]
    learners[1].plan = MemoryPlan(5, 0)
    for learner in learners:
        learner.views = lambda images, generator: StrongViews()(images, generator).double()
    losses = [learn(learner, 2) for learner in learners]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    plain, chunked = (torch.cat([p.grad.flatten() for p in one.optimizer.parameters]) for one in learners)
    assert float(F.cosine_similarity(plain, chunked, dim=0)) > 0.99999
    assert torch.allclose(plain, chunked, rtol=1e-4, atol=1e-7 * float(plain.abs().max()))
    for a, b in zip(*(one.loss.state_dict().values() for one in learners), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-7)


@every_loss
def test_a_step_that_is_not_finite_is_undone_in_the_loss_too(make):
    learner, other = learner_with(make()), learner_with(make())
    learn(learner, 2)
    learn(other, 2)
    before = copy.deepcopy([learner.model.state_dict(), learner.loss.state_dict(), learner.optimizer.state_dict()])
    break_gradient(learner)
    with pytest.raises(NotFinite, match="the gradient at step 3 is not finite"):
        learn(learner, 1, first=50)
    assert same(before, [learner.model.state_dict(), learner.loss.state_dict(), learner.optimizer.state_dict()])
    other.buffer.n_seen = learner.buffer.n_seen  # its images still count as seen
    assert learn(learner, 2, first=2) == learn(other, 2, first=2)


@pytest.mark.parametrize("name", LOSSES)
def test_it_falls(name):
    mild = StrongViews((0.8, 1.0), jitter=0, grey=0)
    learner = learner_with(name, policy=FIFOReplace(), buffer=32, norm="batch", lr=1e-2, views=mild)
    images = random_images(32, seed=0)
    losses = [learner.learn_many(images).loss for _ in range(60)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("name", ["byol", "cla", "a queue"])
def test_a_state_of_another_loss_changes_nothing(name):
    learner, other = learner_with(MAKERS[name]()), learner_with("nt-xent")
    learn(other, 1)
    before = learner.state_dict()
    with pytest.raises(UserError, match=r"the saved loss does not fit the model: .* is missing|its optimizer has"):
        learner.load_state_dict(other.state_dict())
    assert same(before, learner.state_dict())


def test_the_target_network_follows_the_model(model):
    loss = build_loss("byol?momentum=0.75")
    loss.begin(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    loss.follow(model)
    for name, tensor in loss.target.state_dict().items():
        step = 0.25 if tensor.is_floating_point() else 1
        assert torch.allclose(tensor, before[name] + step), name
    assert not any(p.requires_grad for p in loss.target.parameters())


def slow_vicreg(z0, z1):
    n, d = z0.shape
    z0, z1 = z0 * math.sqrt(d), z1 * math.sqrt(d)
    loss = 25 * sum((float(a) - float(b)) ** 2 for a, b in zip(z0.flatten(), z1.flatten(), strict=True)) / (n * d)
    for z in (z0, z1):
        for i in range(d):
            std = math.sqrt(float(z[:, i].var(correction=0)) + 1e-4)
            loss += 25 * max(0, 1 - std) / d / 2
            for j in range(d):
                if i != j:
                    covariance = float(((z[:, i] - z[:, i].mean()) * (z[:, j] - z[:, j].mean())).mean())
                    loss += covariance**2 / d
    return loss


def slow_barlow_twins(z0, z1):
    total = 0.0
    for i in range(z0.shape[1]):
        for j in range(z0.shape[1]):
            r = float(torch.corrcoef(torch.stack([z0[:, i], z1[:, j]]))[0, 1])
            total += (1 - r) ** 2 if i == j else 0.005 * r**2
    return total


@pytest.mark.parametrize(("fast", "slow"), [(vicreg, slow_vicreg), (barlow_twins, slow_barlow_twins)])
def test_it_equals_a_slow_explicit_loop_too(fast, slow):
    z0, z1 = unit(9, 5, 0).double(), unit(9, 5, 1).double()
    assert float(fast(z0, z1)) == pytest.approx(slow(z0, z1), rel=1e-4)


def test_equal_views_that_vary_have_no_loss_left():
    z = torch.linalg.qr(torch.randn(40, 8, dtype=torch.double))[0]
    z = z - z.mean(0)
    assert float(barlow_twins(z, z, redundancy=0)) == pytest.approx(0, abs=1e-5)
    wide = 40**0.5 * torch.linalg.qr(z)[0] / 8**0.5  # unit variance in each of 8 dimensions, none of them alike
    assert float(vicreg(wide, wide)) == pytest.approx(0, abs=2e-3)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        ("vicrog", "no loss 'vicrog': did you mean 'vicreg'"),
        ("vicreg?margin=1", "the loss vicreg has no option 'margin': .*invariance, variance, covariance"),
        ("byol?momentum=1", "momentum is 1.0: use 0"),
        ("byol?width=0", "width is 0: use at least 1"),
        (BYOL, "give a function of z0 and z1, or a Loss, as BYOL"),
        (7, "loss is 7: give a function"),
        (Stateful(), "the loss Stateful has a state that would not be saved: derive it from Loss"),
        (lambda z0, z1: 0.5, "the loss returned a float: return one number with gradient"),
        (lambda z0, z1: (z0 * z1).sum(1), r"the loss returned a tensor of shape \(8,\)"),
        (lambda z0, z1: z0.detach().sum(), r"the loss returned a tensor of shape \(\) without gradient"),
    ],
)
def test_what_cannot_be_a_loss(loss, told):
    with pytest.raises(UserError, match=told):
        learn(learner_with(loss), 1)
